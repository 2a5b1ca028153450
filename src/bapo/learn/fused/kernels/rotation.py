"""Rotation of queries and keys by position, after a norm of each head where the model has one; and the gradient.

    y1 = x1 cos - x2 sin,   y2 = x2 cos + x1 sin        x1, x2: the halves of a head
    dx1 = dy1 cos + dy2 sin,   dx2 = dy2 cos - dy1 sin

Heads of queries lie before heads of keys in every row; what comes after them in the row is left alone. Values are
rounded to the model's dtype where transformers rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512
"""Programs that share the rows of a backward pass through norms. Each sums its part of the gains' gradients."""


@triton.jit
def _rotate(
    source, target, cos_table, sin_table, gains, eps, source_stride, target_stride, table_stride,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype = target.dtype.element_ty
    lane = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    here = head < HEADS
    place = head * (2 * HALF) + lane
    cos = tl.load(cos_table + row * table_stride + lane).to(tl.float32)
    sin = tl.load(sin_table + row * table_stride + lane).to(tl.float32)
    first = tl.load(source + row * source_stride + place, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source + row * source_stride + place + HALF, mask=here, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(square / (2 * HALF) + eps))[:, None]
        first = (first * scale).to(dtype).to(tl.float32)
        second = (second * scale).to(dtype).to(tl.float32)
        first = (first * tl.load(gains + place, mask=here, other=0.0)).to(dtype).to(tl.float32)
        second = (second * tl.load(gains + place + HALF, mask=here, other=0.0)).to(dtype).to(tl.float32)
    turned = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    other = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    tl.store(target + row * target_stride + place, turned.to(dtype), mask=here)
    tl.store(target + row * target_stride + place + HALF, other.to(dtype), mask=here)


def rotate(
    source: Tensor,  # [rows, heads * width], rows may lie apart
    target: Tensor,  # the same shape; may be the source
    rotation: tuple[Tensor, Tensor],  # cos and sin, [rows, width], whose halves are equal
    *,
    width: int,
    gains: Tensor | None = None,  # [heads, width] float32, of the norms of heads
    eps: float = 0.0,
) -> None:
    """Norm every head, if there are gains, and rotate it."""
    rows, columns = source.shape
    cos, sin = rotation
    heads = columns // width
    _rotate[(rows,)](
        *(source, target, cos, sin, cos if gains is None else gains, eps),
        *(source.stride(0), target.stride(0), cos.stride(0)),
        HEADS=heads, HEADS_BLOCK=triton.next_power_of_2(heads), HALF=width // 2, NORM=gains is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate_backward(
    gradient, source, cos_table, sin_table, gains, parts, eps, rows, programs,
    gradient_stride, source_stride, table_stride,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    dtype = gradient.dtype.element_ty
    lane = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    here = head < HEADS
    place = head * (2 * HALF) + lane
    first_total = tl.zeros([HEADS_BLOCK, HALF], tl.float32)
    second_total = tl.zeros([HEADS_BLOCK, HALF], tl.float32)
    row = program.to(tl.int64)
    for _ in range(program, rows, programs):
        cos = tl.load(cos_table + row * table_stride + lane).to(tl.float32)
        sin = tl.load(sin_table + row * table_stride + lane).to(tl.float32)
        pull_first = tl.load(gradient + row * gradient_stride + place, mask=here, other=0.0).to(tl.float32)
        pull_second = tl.load(gradient + row * gradient_stride + place + HALF, mask=here, other=0.0).to(tl.float32)
        first = pull_first * cos + pull_second * sin
        second = pull_second * cos - pull_first * sin
        if NORM:
            x_first = tl.load(source + row * source_stride + place, mask=here, other=0.0).to(tl.float32)
            x_second = tl.load(source + row * source_stride + place + HALF, mask=here, other=0.0).to(tl.float32)
            square = tl.sum(x_first * x_first, axis=1) + tl.sum(x_second * x_second, axis=1)
            scale = (1.0 / tl.sqrt(square / (2 * HALF) + eps))[:, None]
            x_first = x_first * scale
            x_second = x_second * scale
            first_total += first * x_first
            second_total += second * x_second
            first = first * tl.load(gains + place, mask=here, other=0.0)
            second = second * tl.load(gains + place + HALF, mask=here, other=0.0)
            mean = ((tl.sum(first * x_first, axis=1) + tl.sum(second * x_second, axis=1)) / (2 * HALF))[:, None]
            first = scale * (first - x_first * mean)
            second = scale * (second - x_second * mean)
        tl.store(gradient + row * gradient_stride + place, first.to(dtype), mask=here)
        tl.store(gradient + row * gradient_stride + place + HALF, second.to(dtype), mask=here)
        row += programs
    if NORM:
        own = parts + program * (HEADS * 2 * HALF) + place
        tl.store(own, first_total, mask=here)
        tl.store(own + HALF, second_total, mask=here)


def rotate_backward(
    gradient: Tensor,  # [rows, heads * width] of what `rotate` wrote; replaced by the gradient of its source
    rotation: tuple[Tensor, Tensor],
    *,
    width: int,
    source: Tensor | None = None,  # with gains: what `rotate` read
    gains: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor | None:  # [heads, width] float32, with gains
    """Turn the gradient of rotated heads into that of the heads, in place. Returns the gradient of the gains."""
    rows, columns = gradient.shape
    cos, sin = rotation
    heads = columns // width
    programs = rows if gains is None else min(PROGRAMS, rows)
    parts = None if gains is None else torch.empty(programs, heads, width, dtype=torch.float32, device=gradient.device)
    x = gradient if source is None else source
    _rotate_backward[(programs,)](
        *(gradient, x, cos, sin, cos if gains is None else gains, cos if parts is None else parts),
        *(eps, rows, programs, gradient.stride(0), x.stride(0), cos.stride(0)),
        HEADS=heads, HEADS_BLOCK=triton.next_power_of_2(heads), HALF=width // 2, NORM=gains is not None, num_warps=4,
    )  # fmt: skip
    return None if parts is None else parts.sum(0)
