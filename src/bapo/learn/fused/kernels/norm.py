"""The gradient of an RMS norm over rows, n = g x / sqrt(mean(x^2) + eps) (`core/kernels/norm.py`).

dx = s (g dn - h mean(g dn h)),   dg = sum over rows of dn h,   with s = 1 / sqrt(mean(x^2) + eps), h = s x
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bapo.core.kernels.norm import warps_of

PROGRAMS = 512
"""Programs that share the rows of a backward pass. Each sums its part of dg."""


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
