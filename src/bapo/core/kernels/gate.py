"""The gate between the matrix products of an MLP, for sampling and for both passes of training.

m = silu(g) u,   dg = dm u s (1 + g (1 - s)),   du = dm silu(g),   with s = 1 / (1 + exp(-g)), silu(g) = g s
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BACKWARD_BLOCK = 1024


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


@triton.jit
def _gate_backward(gradient, gated, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    opening = tl.load(gated + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gated + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    pull = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-opening))
    opened = (opening * sigmoid).to(dtype).to(tl.float32)
    of_opening = pull * up * sigmoid * (1.0 + opening * (1.0 - sigmoid))
    tl.store(out + row * 2 * width + column, of_opening.to(dtype), mask=inside)
    tl.store(out + row * 2 * width + width + column, (pull * opened).to(dtype), mask=inside)
    tl.store(gradient + row * width + column, (opened * up).to(dtype), mask=inside)


def gate_backward(gradient: Tensor, gated: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of both halves, [rows, 2 width], and what `gate` returned, which overwrites `gradient`."""
    rows, width = gradient.shape
    out = torch.empty_like(gated)
    _gate_backward[(rows, triton.cdiv(width, BACKWARD_BLOCK))](
        gradient, gated, out, width, BLOCK=BACKWARD_BLOCK, num_warps=4
    )
    return out, gradient
