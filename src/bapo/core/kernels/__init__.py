"""Triton kernels for CUDA, beside the torch code they stand in for: the same numbers, fewer passes over memory.

Nothing here is imported on machines without CUDA. Tests run these kernels on CPU under Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether kernels can run where this tensor lives: on the current CUDA device, where Triton launches."""
    return tensor.is_cuda and tensor.get_device() == torch.cuda.current_device() and _installed()


def blocks_of(count: int, size: int) -> int:
    """Blocks of this size that hold so many. Triton's own `cdiv` takes microseconds on the host."""
    return -(-count // size)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
