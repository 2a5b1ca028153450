"""What a configuration means on this machine, and what the machine does to a run: its bits and its speed.

Every process of a run decides in the same way what the configuration leaves open, and loads its model in the same way.

`environment` is what decides the bits of a result besides the configuration: threads, switches of torch, versions, the
machine. It is written into the history of a run each time that the run starts or resumes, and compared with the time
before. A difference does not stop a run, but a person is told that it may not go on bit for bit.

A CPU without units for 16-bit numbers multiplies bfloat16 matrices hundreds of times slower than float32 ones.
"""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

import bapo
from bapo.config.base import MICRO_TOKENS, ModelConfig, OptimizerConfig, refuse_on_cpu
from bapo.config.errors import ConfigError
from bapo.config.placement import placed
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.learner_settings import LearnerSettings
from bapo.models.export import check_saves
from bapo.models.layers import LoraSettings
from bapo.models.loading import hush, load_policy
from bapo.models.policy import Policy

Kind = TypeVar("Kind", Config, SftConfig)

LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "triton", "peft", "ray", "vllm")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
TRIALS = 20
"""How often each speed is measured, unless that takes long."""
ENOUGH = 0.5
"""Seconds after which no further trial begins."""
CPU_MICRO_TOKENS = 2048
"""Tokens per forward pass on a CPU: the layers of a small model read what the one before has just written."""
SLOWER = 3
"""How many times slower than float32 a precision must be before a run says so."""


def resolve(config: Kind) -> Kind:
    """Decide everything in the configuration that depends on this machine."""
    elsewhere = isinstance(config, Config) and config.cluster.address is not None
    device, dtype, threads = placed(config.device, config.model.dtype, config.threads, elsewhere=elsewhere)
    refuse_on_cpu(device, config.learn, asked=config.device)
    if isinstance(config, Config) and config.rollout.precision != "model" and (device, dtype) != ("cuda", "bfloat16"):
        raise ConfigError(
            f"rollout.precision={config.rollout.precision!r} is for bfloat16 weights on CUDA, but the run has {dtype} "
            f"on {device}. Set rollout.precision='model'."
        )
    model = config.model.model_copy(update={"dtype": dtype})
    learn = config.learn
    if learn.micro_tokens is None:
        small = device == "cpu" and (isinstance(config, SftConfig) or learner_settings(config).cuts_are_free)
        learn = learn.model_copy(update={"micro_tokens": CPU_MICRO_TOKENS if small else MICRO_TOKENS})
    return config.model_copy(update={"device": device, "threads": threads, "model": model, "learn": learn})


def prompting(model: ModelConfig) -> dict[str, Any]:
    """How prompts become text, for `load_policy` and `outline_policy`."""
    chat = {"auto": None, "yes": True, "no": False}[model.chat]
    return {"chat": chat, "system": model.system, "template_options": dict(model.template_options)}


def make_policy(config: Config | SftConfig) -> Policy:
    """Load the model of a run, without the usual messages."""
    hush()
    model, lora = config.model, config.model.lora
    policy = load_policy(
        model.path,
        dtype=model.dtype,
        device=config.device,
        attention=model.attention,
        **prompting(model),
        lora=LoraSettings(lora.rank, lora.alpha, lora.targets) if lora.rank else None,
        seed=config.seed,
    )
    check_saves(policy)
    return policy


def on_the_cpu(config: Any) -> Any:
    """The same configuration for a model that is loaded on the CPU, to be divided from there."""
    model = config.model
    if model.attention == "flash_attention_2":  # it does not run there; packed passes bring their own
        model = model.model_copy(update={"attention": "auto"})
    return config.model_copy(update={"device": "cpu", "model": model})


def threads_of_actor(config: Config) -> int:
    """Threads of one actor: this machine's cores, shared by as many actors as may be on it."""
    cluster = config.cluster
    actors = cluster.rollouts + cluster.learners if cluster.address is None else 1
    return max(1, config.threads // actors)


def learner_settings(config: Config) -> LearnerSettings:
    """The part of the configuration that the learner needs."""
    learn, objective = config.learn, config.objective
    alike = {field.name: getattr(learn, field.name, None) for field in fields(LearnerSettings)}
    alike["anchor_limit"] = learn.anchor_limit or (0.2 if config.rollout.precision == "model" else 1.0)
    return LearnerSettings(
        **{name: value for name, value in alike.items() if value is not None},
        objective=objective.name,
        clip=objective.clip,
        scope=objective.scope,
        sensor=objective.sensor,
        options=dict(objective.options),
        length=config.rollout.max_tokens,
        reward_weights=config.task.reward_weights,
        temperature=config.rollout.temperature,
        total_updates=config.steps * config.updates_per_step,
        float32_head=config.model.float32_head,
        kept_caches=config.offpolicy.partial_cache == "keep",
        sampler_precision=config.rollout.precision,
    )


def optimizer_settings(learn: OptimizerConfig) -> dict[str, Any]:
    """The settings that every learner needs, whatever its loss."""
    settings = {name: getattr(learn, name) for name in OptimizerConfig.model_fields}
    return {name: value for name, value in settings.items() if value is not None}


# What decides the bits.


def versions() -> dict[str, str | None]:
    """Versions of bapo and of what it computes with; None for a library that is not installed."""
    return {"python": platform.python_version(), "bapo": bapo.__version__} | {
        name: _version(name) for name in LIBRARIES
    }


@cache
def code_digest() -> dict[str, str | None]:
    """What all processes of a cluster must have alike: bapo, with a digest of its files, and what it computes with."""
    root = Path(bapo.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    known = versions()
    alike = {name: known[name] for name in ("torch", "transformers", "python")}
    return {"bapo": f"{known['bapo']} ({digest.hexdigest()[:12]})"} | alike


def environment() -> dict[str, Any]:
    """The present environment, as plain JSON data."""
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        **{name: os.environ.get(name) for name in VARIABLES},
        **versions(),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two environments, in words. What only one of them records says nothing."""
    told = [(name, now[name], value) for name, value in before.items() if name in now and now[name] != value]
    return [f"{name} is {'not set' if a is None else a} and was {'not set' if b is None else b}" for name, a, b in told]


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


# How fast it is.


def measured_speed(config: Config) -> tuple[float, float]:
    """Floating-point operations and bytes per second of this machine, in the precision of the run.

    On the CPU they are those of one thread, in time of its own, so that a busy machine does not look slow.
    """
    device, on_gpu = torch.device(config.device), config.device == "cuda"
    flops = _flops(getattr(torch, config.model.dtype), device)
    large = torch.ones(2**28 if on_gpu else 2**22, device=device)
    bandwidth = 2 * 4 * large.numel() / _seconds_of(large.clone, on_gpu=on_gpu)
    return flops * (1 if on_gpu else config.threads), bandwidth


def slow_precision(config: Config | SftConfig) -> Iterator[str]:
    """Say so if a resolved run on the CPU of this machine is much slower in its precision than in float32."""
    dtype = config.model.dtype
    elsewhere = isinstance(config, Config) and config.cluster.address is not None
    if config.device != "cpu" or dtype == "float32" or elsewhere:
        return
    times = _flops(torch.float32, torch.device("cpu")) / _flops(getattr(torch, dtype), torch.device("cpu"))
    if times > SLOWER:
        yield (
            f"model.dtype={dtype!r} is about {times:.0f} times slower than float32 on this CPU, which has no fast "
            "units for 16-bit numbers. Set model.dtype = 'float32' or 'auto'."
        )


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of matrix products, on a CPU with one thread."""
    on_gpu = device.type == "cuda"
    size = 4096 if on_gpu else 256
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _seconds_of(lambda: a @ b, on_gpu=on_gpu)


def _seconds_of(work: Callable[[], object], *, on_gpu: bool) -> float:
    """How long some work takes, with one thread: the best of several trials, after one that does not count."""
    clock = time.perf_counter if on_gpu else time.thread_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    took: list[float] = []
    while len(took) < 2 or (len(took) < TRIALS and sum(took) <= ENOUGH):
        began = clock()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        took.append(clock() - began)
    torch.set_num_threads(threads)
    return min(took[1:])
