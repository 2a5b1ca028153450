"""Switches that make the same update give the same weights, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def allow_deterministic_products() -> None:
    """Set the variable that deterministic matrix products need. Some versions of torch read it only once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside, CUDA operations add in a fixed order. FlashAttention's backward pass would not, by default.

    The switch holds for the whole process, so it is on no longer than needed. An operation without a deterministic form
    raises an error.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it helps debugging only, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling
