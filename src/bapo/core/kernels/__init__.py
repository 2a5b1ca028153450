"""Triton kernels for CUDA, beside the torch code they stand in for: the same numbers, fewer passes over memory.

`bapo.core.dispatch` decides when they run. Nothing here is imported on machines without CUDA. Tests run these kernels
on CPU under Triton's interpreter.
"""

from __future__ import annotations


def blocks_of(count: int, size: int) -> int:
    """How many blocks of this size hold `count` items. Triton's own `cdiv` takes microseconds on the host."""
    return -(-count // size)
