"""Matrix products in eight bits: weights and states in e4m3, sums in float32, results in the model's dtype.

e4m3 has four significant bits, so it rounds a normal number by at most 2^-4 of itself; 448 is its largest number, and
below 2^-6 its steps are 2^-9. Each row, of a weight or of states, has a scale of its own:

    q = e4m3(x / s),   s = the least power of two with max |x| <= 448 s

A power of two divides without rounding, so what is rounded is known exactly, and s q is a number of the model's dtype
again: a plain model can hold the rounded weights. No scale is below 2^-126.

States may keep all bits of bfloat16, which has twice as many as e4m3: they are then two rows, one below the other,

    x = s (q + r / 16),   r = e4m3(16 (x / s - q))

and a product is the sum of two. This costs twice the operations and no more bytes of weights. Norm and gate end with a
row, so they round it in the same launch; what attention gives is rounded in one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from bapo.core.kernels.layers import normed, opened, warps_of

EIGHT = torch.float8_e4m3fn
Rounded = tuple[Tensor, Tensor]
"""Rows in e4m3, [rows, width], and their scales, [rows] float32."""


def unsupported(projections: Sequence[nn.Linear], dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why layers cannot multiply in eight bits; None if they can."""
    if any(layer.in_features % 16 or layer.out_features % 16 for layer in projections):
        return "its layers have widths that are no multiples of 16, which products in eight bits need"
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no products in eight bits, which begin with compute capability 8.9"
    return None if dtype == torch.bfloat16 else f"its weights are {dtype}, and only products into bfloat16 are built"


def round_rows(x: Tensor) -> Rounded:
    """Rows in eight bits, of a weight that is loaded."""
    largest = x.abs().amax(dim=1).float().clamp(min=448 * 2.0**-126)
    mantissa, exponent = torch.frexp(largest)  # mantissa * 2^exponent, where 448 is 0.875 * 2^9
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - 9 + (mantissa > 0.875))
    return (x / scales[:, None].to(x.dtype)).to(EIGHT), scales


def product(states: Rounded, weight: Rounded, bias: Tensor | None, dtype: torch.dtype, *, parts: int) -> Tensor:
    """states [rows, width] times weight^T [width, outputs], plus bias."""
    (left, of_rows), (right, of_outputs) = states, weight
    given = left, right.t(), of_rows[:, None], of_outputs[None, :]
    if parts == 1:
        return torch._scaled_mm(*given, bias, out_dtype=dtype, use_fast_accum=True)
    high, low = torch._scaled_mm(*given, out_dtype=torch.float32).chunk(2)
    return torch.add(high if bias is None else high + bias, low, out=torch.empty_like(high, dtype=dtype))


@triton.jit
def _nearest(x):
    """x rounded to e4m3, as float32: a sum with 1.5 * 2^23 steps has no room for parts of a step."""
    binade = tl.minimum(tl.maximum(tl.abs(x).to(tl.int32, bitcast=True) >> 23, 127 - 6), 127 + 8)
    shift = 1.5 * ((binade - 3 + 23) << 23).to(tl.float32, bitcast=True)
    return (x + shift) - shift


@triton.jit
def _store(value, largest, out, scales, row, width, column, PARTS: tl.constexpr):
    """Round these columns of a row, given in float32. `largest`: of the whole row, without signs."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    value *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high = _nearest(value)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, scale)
    tl.store(out + row * width + column, high.to(out.dtype.element_ty), mask=column < width)
    if PARTS == 2:
        low, row = _nearest((value - high) * 16.0), row + tl.num_programs(0)
        tl.store(scales + row, scale / 16.0)
        tl.store(out + row * width + column, low.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _round(x, out, scales, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    _store(value, tl.max(tl.abs(value), axis=0), out, scales, row, width, column, PARTS)


@triton.jit
def _norm(
    x, delta, gain, out, scales, width, eps, ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype = x.dtype.element_ty
    value, _ = normed(x, delta, gain, x, row, width, eps, dtype, ADD, BLOCK)
    value = value.to(dtype).to(tl.float32)
    _store(value, tl.max(tl.abs(value), axis=0), out, scales, row, width, column, PARTS)


@triton.jit
def _gate(gated, out, scales, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype = gated.dtype.element_ty
    largest = tl.full([], 0, tl.float32)
    for start in range(0, width, BLOCK):
        value = opened(gated, row, width, start + column, dtype).to(dtype).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(value), axis=0))
    for start in range(0, width, BLOCK):
        value = opened(gated, row, width, start + column, dtype).to(dtype).to(tl.float32)
        _store(value, largest, out, scales, row, width, start + column, PARTS)


def rounded(x: Tensor, *, parts: int) -> Rounded:
    """The rows of x."""
    out, scales = _room(parts * len(x), x.shape[1], x)
    block = triton.next_power_of_2(x.shape[1])
    _round[(len(x),)](x, out, scales, x.shape[1], PARTS=parts, BLOCK=block, num_warps=warps_of(block))
    return out, scales


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float, *, parts: int) -> Rounded:
    """RMS norm of x + delta, [rows, width]. The sum replaces x."""
    assert x.is_contiguous(), "rows must lie one after the other"
    out, scales = _room(parts * len(x), x.shape[1], x)
    block = triton.next_power_of_2(x.shape[1])
    _norm[(len(x),)](
        *(x, x if delta is None else delta, gain, out, scales, x.shape[1], eps),
        ADD=delta is not None, PARTS=parts, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return out, scales


def gate(gated: Tensor, *, parts: int) -> Rounded:
    """silu(first half) * second half, of rows [rows, 2 width]."""
    width = gated.shape[1] // 2
    out, scales = _room(parts * len(gated), width, gated)
    block = min(4096, triton.next_power_of_2(width))
    _gate[(len(gated),)](gated, out, scales, width, PARTS=parts, BLOCK=block, num_warps=warps_of(block))
    return out, scales


def _room(rows: int, width: int, like: Tensor) -> Rounded:
    out = torch.empty(rows, width, dtype=EIGHT, device=like.device)
    return out, torch.empty(rows, dtype=torch.float32, device=like.device)
