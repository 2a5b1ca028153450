"""Several GPUs of one machine, without other software: `torchrun --nproc-per-node N -m bapo train RECIPE`.

Every rank runs the same loop with the same scheduler and the same buffer. Work is divided where it is heavy, and its
results are exchanged at once, so all ranks know the same and decide the same:

    sampling   each rank continues its part of the requests with its own in-process engine, which has a copy of all
               weights, and is given all segments (`SharedEngine`). A token budget is divided, too
    scoring    each rank scores its part of the responses (`SharedTask`). A verifier may time out, so nobody repeats the
               work of another
    learning   all ranks take every update together (`learn/fsdp.py`)
    files      the first rank writes logs, screen, summary and model; all write their shards of a checkpoint

Nothing runs ahead: a rank waits for the slowest at each of these places. A run is a function of the configuration and
the number of ranks, and a resumed one repeats an uninterrupted one bit for bit if it has as many ranks. With another
number, sums are taken in another order: it continues from the same weights, but not bit for bit.

On one machine, the ranks speak to each other over the loopback interface, unless GLOO_SOCKET_IFNAME or
NCCL_SOCKET_IFNAME say otherwise. The store where they meet belongs to torchrun.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.errors import ConfigError, RankFailed
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.fsdp import ShardedLearner
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.ranks import PATIENCE, LostRank, failing_together, join, leave
from bapo.rollout.engine import NOTHING_LOADED, Engine, Request, Sampling, Segment
from bapo.runs.write import RunDirectory
from bapo.tasks.task import Task
from bapo.train.team import ALONE, Team
from bapo.types import Problem, Score, Status

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What torchrun puts into the environment of each rank."""
PATIENCE_VARIABLE = "BAPO_RANK_TIMEOUT"
"""How many seconds a rank waits for the others, if the environment says so."""


@contextmanager
def joined(device: str) -> Iterator[Team]:
    """The team of this process: those that torchrun started with it, or nobody else."""
    if not all(name in os.environ for name in TORCHRUN) or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    rank, size, here = (int(os.environ[name]) for name in TORCHRUN)
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        if here >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started {on_this_machine} ranks on this machine, but it has {torch.cuda.device_count()} "
                "GPUs, and every rank needs one. Lower --nproc-per-node."
            )
        torch.cuda.set_device(here)
    if on_this_machine == size and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    ranks = join(rank, size, meeting="env://", device=torch.device(device), patience=_patience())
    try:
        with failing_together(ranks):
            yield Team(ranks, rank, size, on_this_machine)
    except LostRank as error:
        raise RankFailed(
            f"{error} Continue from the newest checkpoint: start the ranks again with `resume RUN`."
        ) from error
    finally:
        leave(ranks)


def _patience() -> float:
    given = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"{PATIENCE_VARIABLE}={given} is not a time. Give the seconds that a rank waits for the others, such as "
            f"{PATIENCE:.0f}."
        )
    return seconds


class SharedEngine:
    """The engines of all ranks as one: each has its part of the requests, and every rank is given all segments."""

    def __init__(self, engine: Engine, team: Team) -> None:
        self.engine, self.team = engine, team
        self.version = engine.version
        self.draws_by_position, self.gives_entropies = engine.draws_by_position, engine.gives_entropies
        self.continuous = engine.continuous

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `Engine.load`. All ranks gather the weights together."""
        self.version = NOTHING_LOADED
        self.engine.load(weights, version=version)
        self.version = version

    def submit(self, requests: Sequence[Request], sampling: Sampling, *, token_budget: int | None = None) -> None:
        """See `Engine.submit`. A rank with fewer requests leaves its part of the budget unused."""
        rank, size = self.team.rank, self.team.size
        budget = None if token_budget is None else token_budget // size + (rank < token_budget % size)
        try:
            self.team.share(lambda: self.engine.submit(requests[rank::size], sampling, token_budget=budget))
        except Exception:
            self.engine.park()  # another rank refused its part
            self.engine.collect(0)
            raise

    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """See `Engine.collect`."""
        parts = self.team.share(lambda: [(id, vars(segment)) for id, segment in self.engine.collect(timeout)])
        return [(id, _segment(values)) for part in parts for id, values in part]

    def park(self) -> None:
        """See `Engine.park`."""
        self.engine.park()


class SharedTask:
    """A task whose responses are scored by all ranks, each a part of them."""

    def __init__(self, task: Task, team: Team) -> None:
        self.task, self.team = task, team
        self.train, self.test = task.train, task.test

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """See `Task.scores`."""
        rank, size = self.team.rank, self.team.size
        mine = responses[rank::size]
        parts = self.team.share(lambda: [vars(score) for score in self.task.scores(mine)] if mine else [])
        return [Score(**parts[index % size][index // size]) for index in range(len(responses))]


def _segment(values: dict[str, Any]) -> Segment:
    """A segment from its fields as JSON data."""
    status = values["status"]
    return Segment(**values | {"status": None if status is None else Status(status)})


class Onlooker(RunDirectory):
    """The run directory as the other ranks have it: they write nothing."""

    def held(self) -> AbstractContextManager[int]:
        """The first rank holds the lock."""
        return nullcontext(-1)

    def write(self, name: str, value: Any) -> None:
        """Nothing."""

    def write_arrays(self, name: str, arrays: dict[str, NDArray[Any]]) -> None:
        """Nothing."""

    def append(self, name: str, *values: dict[str, Any]) -> None:
        """Nothing."""

    def cut(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


def on_the_cpu(config: Any) -> Any:
    """The same configuration for a model that is loaded on the CPU, to be divided from there."""
    model = config.model
    if model.attention == "flash_attention_2":  # it does not run there; packed passes bring their own
        model = model.model_copy(update={"attention": "auto"})
    return config.model_copy(update={"device": "cpu", "model": model})


def make_learner(model: Any, settings: LearnerSettings, config: Config | SftConfig, team: Team) -> Learner:
    """The learner of a model: this process's own, or this rank's part of the team's. A team's model is on the CPU."""
    if team.ranks is None:
        return Learner(model, settings)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return ShardedLearner(model, settings, ranks=team.ranks, device=torch.device(config.device), dtype=dtype)


@torch.no_grad()
def gather_into(model: Any | None, learner: Learner) -> None:
    """Copy the learner's weights into a whole model. All ranks must call this; one without a model only takes part."""
    places = {} if model is None else dict(model.named_parameters())
    for name, tensor in learner.weights():
        if model is not None:
            places.pop(name).copy_(tensor)
    assert not places, f"the learner has no weights {sorted(places)}"
