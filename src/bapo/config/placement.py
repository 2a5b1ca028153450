"""Where a run computes: device, precision and threads, as far as its configuration leaves them open."""

import os
from typing import Literal

from bapo.config.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "float32", "bfloat16"]


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """One thread per core, but no more than the user allows by OMP_NUM_THREADS.

    torchrun sets that variable to 1 for its ranks, whatever the user wants, so there it says nothing.
    """
    cores, allowed = available_cores(), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if "TORCHELASTIC_RUN_ID" in os.environ or not allowed.isascii() or not allowed.isdigit() or int(allowed) == 0:
        return cores
    return min(cores, int(allowed))


def placed(
    device: DeviceName, dtype: Precision, threads: int | None, *, elsewhere: bool = False
) -> tuple[DeviceName, Precision, int]:
    """Device, precision and threads on this machine, as far as they were left open. Imports torch.

    `elsewhere`: other machines compute, so this one needs no CUDA device.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available() and not elsewhere:
        raise ConfigError(
            "device='cuda', but torch sees no CUDA device on this machine. Use a machine that has one, with a CUDA "
            "build of torch, or start a new run with device='cpu'."
        )
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, dtype, threads or default_threads()
