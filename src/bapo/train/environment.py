"""What decides the bits of a result besides the configuration: threads, switches of torch, versions, the machine.

It is written into the history of a run each time that the run starts or resumes, and compared with the time before. A
difference does not stop a run, but a person is told that it may not go on bit for bit.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "safetensors", "numpy", "triton", "peft", "ray", "vllm")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")


def environment(bapo: str) -> dict[str, Any]:
    """The present environment, as plain JSON data. `bapo`: our own version."""
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
        "python": platform.python_version(),
        "bapo": bapo,
        **{name: _version(name) for name in LIBRARIES},
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two environments, in words. What only one of them records says nothing."""
    return [
        f"{name} is {_said(now[name])} and was {_said(value)}"
        for name, value in before.items()
        if name in now and now[name] != value
    ]


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _said(value: Any) -> str:
    return "not set" if value is None else str(value)
