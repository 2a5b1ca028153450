"""Launches a Triton kernel again without Triton's search for the right compilation, which takes longer than the launch.

At every call Triton looks at the type, the value and the alignment of every argument before it knows which compilation
to launch. Whoever knows beforehand what can differ between two calls names it in a key, and `Launcher` remembers the
compilation for that key.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

TAKES_ALL_ARGUMENTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
"""Whether a compiled kernel takes all arguments, as the kernel itself does. Earlier versions left constants out."""
ALIGNMENT = 16
"""Bytes. Triton compiles for addresses that are multiples of this, and separately for others."""
INT32 = 2**31


class Launcher:
    """One kernel, with the options of its launches."""

    def __init__(self, kernel: Any, **options: int) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch. `key`: all in the arguments that makes another compilation; None: let Triton look."""
        compiled = None if key is None else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments)
            return
        compiled = self.kernel[grid](*arguments, **self.options)  # None from the interpreter
        if key is not None and TAKES_ALL_ARGUMENTS and compiled is not None:
            self._compiled[key] = compiled


def kinds_of(*tensors: Tensor) -> tuple[torch.dtype | int, ...] | None:
    """What Triton sees in these tensors, if all of them are aligned: their types and their device."""
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    if address % ALIGNMENT:
        return None
    return (tensors[0].get_device(), *(tensor.dtype for tensor in tensors))
