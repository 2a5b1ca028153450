"""Triton kernels for CUDA, beside the torch code they stand in for: the same numbers, fewer passes over memory.

    kernel                              torch code
    bounds.signal_partials              bounds.summed_signal
    bounds.choose_bounds                bounds.first_to_reach
    clipped.clipped_loss                objectives.Clipped, reduced by reduction.reduce_tokens
    logprobs.fused_logprobs             logprobs.chunked_logprobs

The torch code says what is computed and runs everywhere. Its module asks `usable`, and imports a kernel only when it
takes it, so a machine without CUDA never imports Triton. Nothing here looks at a value: choosing never makes the host
wait for the device. `layers.py` belongs to sampler and learner, whose layers run on CUDA only. Tests run all
kernels on CPU under Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether kernels can run where this tensor lives: on the current CUDA device, where Triton launches."""
    return tensor.is_cuda and tensor.get_device() == torch.cuda.current_device() and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def blocks_of(count: int, size: int) -> int:
    """How many blocks of this size hold `count` items. Triton's own `cdiv` takes microseconds on the host."""
    return -(-count // size)
