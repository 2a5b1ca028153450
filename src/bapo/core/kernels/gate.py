"""The gate between the matrix products of an MLP, m = silu(g) u: for sampling and for the forward pass of training."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gate(gated, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    opening = tl.load(gated + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gated + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    opened = (opening / (1.0 + tl.exp(-opening))).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (opened * up).to(dtype), mask=inside)


def gate(gated: Tensor) -> Tensor:  # [rows, 2 width] -> [rows, width]
    """silu(first half) * second half."""
    rows, double = gated.shape
    width = double // 2
    out = gated.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _gate[(rows, triton.cdiv(width, block))](gated, out, width, BLOCK=block, num_warps=4)
    return out
