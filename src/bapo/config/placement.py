"""Where a run takes place: device, precision and threads, where its configuration leaves them open."""

from __future__ import annotations

import os

from bapo.config.errors import ConfigError


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def placed(device: str, dtype: str, threads: int | None) -> tuple[str, str, int]:
    """Device, precision and threads on this machine, where they were left open. The first thing to need torch."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda', but torch sees no CUDA device here. Run on a machine with one and a CUDA build of torch; "
            "what is begun anew can also have device='cpu'."
        )
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, dtype, threads or available_cores()
