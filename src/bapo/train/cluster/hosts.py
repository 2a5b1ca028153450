"""What lives in the actors of a cluster: an engine that samples, or one rank of the learner; and what they exchange.

Both are plain objects: they know that they live in an actor only to say where that is. Each is made from the run's
configuration, so that it loads the same model in the same way as every other process.

    Parcel      every weight of a version as plain bytes, in shared memory on each machine that needs it; never pickled
                tensors
    Published   where the parcel of a version is, the fingerprint of its bits, and what a right engine must say

An engine that has loaded a parcel is used only if all three agree: the fingerprint of what arrived, the names of what
it loaded, and the log-probs of what it samples. Versions can be told apart by the fingerprint, because one changed bit
changes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.run import Config
from bapo.learn.learner import Update
from bapo.learn.ranks import join
from bapo.models.bits import Packed, fingerprint, packed, unpacked
from bapo.models.export import write_model
from bapo.models.layers import LoraSettings, merging
from bapo.models.loading import directory_of
from bapo.rollout.engine import Engine, Request, Sampling, Segment
from bapo.rollout.local.engine import engine_for
from bapo.rollout.worker import Worker, probe
from bapo.train.cluster.ray import Hello, introduced, node_address, node_name
from bapo.train.machine import learner_settings, make_policy, on_the_cpu, resolve, threads_of_actor
from bapo.train.torchrun import ALONE, Team, gathered, make_learner
from bapo.types import Group

PROBE_DRAWS = 16
"""Tokens that an engine samples after each context of a probe."""
CPU_CACHE_BYTES = 2**30
"""Memory for the keys and values of a vLLM engine on CPUs."""
SIOCGIFADDR = 0x8915
"""Asks Linux for the address of a network interface."""
TOLERANCES = {"float32": (2e-3, 5e-4), "bfloat16": (1.0, 0.2), "fp8": (5.0, 1.0), "fp8-weights": (5.0, 1.0)}
"""The largest gap between log-probs of an engine and of the learner, and the largest mean gap, that rounding explains.

Measured: float32 up to 9e-5; bfloat16 up to 0.31, in the mean 0.09 (1.5B parameters, large random weights); eight bits
up to 3.1, in the mean 0.23 (a trained model of 135M)."""


Parcel = list[Packed]


@dataclass(frozen=True)
class Probe:
    """What an engine with the right weights says after a few contexts."""

    contexts: list[list[int]]
    logprobs: NDArray[np.float32]
    """[contexts, vocabulary] log-probs of the next token, at temperature 1."""
    temperature: float
    """The temperature to sample at."""


@dataclass(frozen=True)
class Published:
    """The weights of one version, for engines to load. It is handed to `Engine.load` in place of the weights."""

    version: int
    parcel: Any
    """A reference to the parcel."""
    fingerprint: str
    probe: Probe

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        raise TypeError("published weights go to a fleet of engines, which loads them where the engines are.")


def pack(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Parcel:
    """Copy every weight to the host in this precision, or in its own."""
    return [packed(name, weight.detach().to(device="cpu", dtype=dtype)) for name, weight in weights]


Worked = tuple[list[tuple[int, Segment]], float]
"""What an engine has sampled since the last call, by request, and the seconds that it worked."""


class RolloutHost:
    """An engine at work."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = resolve(Config.model_validate(config))
        torch.set_num_threads(threads_of_actor(self.config))
        self.engine = self._engine()
        self.worker = Worker(self.engine)

    def _engine(self) -> Engine:
        config = self.config
        if config.cluster.engine == "vllm":
            from bapo.rollout.vllm.engine import VllmEngine
            from bapo.rollout.vllm.start import Settings

            cpu = config.device == "cpu"
            settings = Settings(
                model=directory_of(config.model.path),
                dtype=config.model.dtype,
                slots=config.rollout.slots,
                tensor_parallel=1 if cpu else config.cluster.gpus_per_rollout,
                cache_bytes=CPU_CACHE_BYTES if cpu else None,
                threads=threads_of_actor(config) if cpu else None,
                seed=config.seed,
                truncates=Sampling(**config.rollout.sampling).truncates,
            )
            return VllmEngine(settings)
        return engine_for(
            make_policy(config).model,
            slots=config.rollout.slots,
            cache_tokens=config.rollout.cache_tokens,
            float32_head=config.model.float32_head,
            precision=config.rollout.precision,
        )

    def hello(self) -> Hello:
        """Say who this is."""
        can = ("draws_by_position", "gives_entropies")
        return introduced(**{name: getattr(self.engine, name) for name in can})

    def load(self, parcel: Parcel, version: int, expected: str, told: Probe) -> float:
        """Load new weights under the responses in progress, and check them.

        Returns the largest difference between a log-prob that the engine sampled with and the learner's.
        """
        if (found := fingerprint(parcel)) != expected:
            raise ValueError(
                f"the weights of version {version} arrived with fingerprint {found} instead of {expected}: they were "
                "changed on the way. Look for faulty memory or a full /dev/shm on this node."
            )
        self.worker.load(map(unpacked, parcel), version=version)
        precision = self.config.rollout.precision
        tolerance, mean_tolerance = TOLERANCES[self.config.model.dtype if precision == "model" else precision]
        probed = probe(
            self.engine,
            told.contexts,
            torch.from_numpy(told.logprobs.copy()),
            temperature=told.temperature,
            draws=PROBE_DRAWS,
            tolerance=tolerance,
            mean_tolerance=mean_tolerance,
        )
        return probed.gap_max

    def work(self, requests: Sequence[Request], sampling: Sampling, seconds: float) -> Worked:
        """Take in these requests and sample for some time."""
        began = time.monotonic()
        if requests:
            self.worker.give(requests, sampling)
        return self.worker.work(seconds), time.monotonic() - began

    def park(self) -> Worked:
        """Give everything back unfinished."""
        return self.worker.park(), 0.0


class LearnerHost:
    """One rank of the learner."""

    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.config, self.rank = resolve(Config.model_validate(config)), rank
        torch.set_num_threads(threads_of_actor(self.config))

    def hello(self) -> Hello:
        """Say who this is."""
        return introduced()

    def free_address(self) -> str:
        """An address of this machine at which the ranks can meet."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return f"{node_address()}:{listener.getsockname()[1]}"

    def meet(self, where: str) -> None:
        """Load the model and join the other ranks at this URL of torch.distributed. One rank meets nobody."""
        config, size = self.config, self.config.cluster.learners
        team = ALONE
        if size > 1:
            # Gloo would take the address of the host's name, which is 127.0.1.1 on many machines.
            interface = "lo" if where.startswith("file:") else interface_of(node_address())
            if interface is not None:
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    os.environ.setdefault(name, interface)
            device, patience = torch.device(config.device), config.cluster.update_seconds
            team = Team(join(self.rank, size, meeting=where, device=device, patience=patience), self.rank, size, size)
        model = make_policy(config if size == 1 else on_the_cpu(config)).model
        self.learner = make_learner(model, learner_settings(config), config, team)

    def step(self, groups: Sequence[Group]) -> Update:
        """Take one update together with the other ranks."""
        return self.learner.step(groups)

    def publish(self, contexts: Sequence[Sequence[int]]) -> tuple[Parcel, tuple[str, Probe | None]]:
        """The weights as they are now, with what an engine that has them must say.

        All ranks take part in gathering; rank 0 has the answer.
        """
        weights, lora = self.learner.weights(), self.config.model.lora
        if lora.rank and self.config.cluster.engine == "vllm":  # it is given whole weights
            weights = merging(weights, LoraSettings(lora.rank, lora.alpha).scale)
        logprobs = self.learner.next_logprobs(contexts)
        if self.rank != 0:
            deque(weights, maxlen=0)
            return [], ("", None)
        parcel = pack(weights, getattr(torch, self.config.model.dtype))
        temperature = self.learner.settings.temperature
        table = torch.log_softmax(logprobs * temperature, dim=-1).cpu().numpy()
        return parcel, (fingerprint(parcel), Probe([list(context) for context in contexts], table, temperature))

    def save(self, directory: Path) -> None:
        """Write this rank's part of a checkpoint. All ranks must see the same directory, on a shared file system."""
        if not directory.is_dir():
            told = f"{node_name()} does not see the run directory; all machines need it on a shared file system"
            raise FileNotFoundError(errno.ENOENT, told, str(directory))
        self.learner.save(directory)

    def load(self, directory: Path, version: int) -> None:
        """Restore what `save` wrote at this version."""
        self.learner.load(directory, version=version)

    def export(self, run: Path, card: str) -> None:
        """Write the model into the directory of the run. All ranks take part in gathering."""
        config = self.config
        if policy := gathered(self.learner, config, leads=self.rank == 0):
            write_model(policy, run, card, config.rollout.sampling, base=config.model.path)


def interface_of(address: str) -> str | None:
    """The name of the network interface of this machine that has this IPv4 address."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):  # some have no address
            told = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return None
