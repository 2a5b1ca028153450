"""What lies between the matrix products of a layer: RMS norm and gate, for sampling and for both passes of training.

RMS norm over rows, with the addition before it:

    n = g x / sqrt(mean(x^2) + eps),   x = residual + delta
    dx = s (g dn - h mean(g dn h)),   dg = sum over rows of dn h,   with s = 1 / sqrt(mean(x^2) + eps), h = s x

The gate of an MLP:

    m = silu(g) u,   dg = dm u s (1 + g (1 - s)),   du = dm silu(g),   with s = 1 / (1 + exp(-g)), silu(g) = g s

Values are rounded to the model's dtype where transformers rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512
"""Programs that share the rows of a norm's backward pass. Each sums its part of dg."""
GATE_BLOCK = 1024
"""Values of a row that one program of the gate's backward pass handles."""


@triton.jit
def normed(x, delta, gain, added, row, width, eps, dtype, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """The norm of one row and 1 / its size, in float32. The row with its addition goes to `added`."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * width + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(added + row * width + column, value.to(dtype), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    return (value * scale).to(dtype).to(tl.float32) * weight, scale


@triton.jit
def _norm(x, delta, gain, added, out, scales, width, eps, ADD: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    dtype = out.dtype.element_ty
    value, scale = normed(x, delta, gain, added, row, width, eps, dtype, ADD, BLOCK)
    if KEEP:
        tl.store(scales + row, scale)
    tl.store(out + row * width + column, value.to(dtype), mask=column < width)


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> Tensor:
    """RMS norm of x + delta, [rows, width]. The sum replaces x."""
    return _launched(x, delta, gain, eps, added=x, scales=None)


def norm(
    x: Tensor,  # [rows, width]
    gain: Tensor,  # [width]
    eps: float,
    delta: Tensor | None = None,  # added to x first, if given
) -> tuple[Tensor, Tensor, Tensor]:  # x + delta (x itself without delta), its norm, 1 / its size [rows] float32
    """RMS norm of x + delta, and what its backward pass needs."""
    added = x if delta is None else torch.empty_like(x)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    return added, _launched(x, delta, gain, eps, added=added, scales=scales), scales


def _launched(
    x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, *, added: Tensor, scales: Tensor | None
) -> Tensor:
    assert x.is_contiguous(), "rows must lie one after the other"
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        *(x, x if delta is None else delta, gain, added, out, x if scales is None else scales, width, eps),
        ADD=delta is not None, KEEP=scales is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return out


@triton.jit
def _norm_backward(
    gradient, x, gain, scales, passed_on, out, parts, rows, width, programs, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    row = program.to(tl.int64) * width
    for index in range(program, rows, programs):
        pull = tl.load(gradient + row + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + index)
        normed = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32) * scale
        total += pull * normed
        pull = pull * weight
        change = scale * (pull - normed * (tl.sum(pull * normed, axis=0) / width))
        change += tl.load(passed_on + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row + column, change.to(out.dtype.element_ty), mask=inside)
        row += programs * width
    tl.store(parts + program * width + column, total, mask=inside)


def norm_backward(
    gradient: Tensor,  # [rows, width] of the norm
    x: Tensor,  # what was normed
    gain: Tensor,
    scales: Tensor,  # from `norm`
    passed_on: Tensor,  # [rows, width] the gradient of x from everywhere else
) -> tuple[Tensor, Tensor]:  # of x, [rows, width]; of the gain, [width] float32
    """The gradient of x, all of it, and that of the gain."""
    rows, width = x.shape
    programs = min(PROGRAMS, rows)
    out = torch.empty_like(x)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_backward[(programs,)](
        *(gradient, x, gain, scales, passed_on, out, parts, rows, width, programs),
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return out, parts.sum(0)


def warps_of(block: int) -> int:
    """Warps of a program that holds a row of this size."""
    return min(8, max(1, block // 512))


@triton.jit
def opened(gated, row, width, column, dtype):
    """silu(first half) * second half of a row at these columns, in float32."""
    inside = column < width
    opening = tl.load(gated + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gated + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    return (opening / (1.0 + tl.exp(-opening))).to(dtype).to(tl.float32) * up


@triton.jit
def _gate(gated, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype = out.dtype.element_ty
    tl.store(out + row * width + column, opened(gated, row, width, column, dtype).to(dtype), mask=column < width)


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
    _gate_backward[(rows, triton.cdiv(width, GATE_BLOCK))](gradient, gated, out, width, BLOCK=GATE_BLOCK, num_warps=4)
    return out, gradient
