"""AdamW over one long vector: one pass that reads gradients and moments, and writes masters, moments and weights.

    m += (1 - b1) (g - m),   v += (1 - b2) (g^2 - v)
    w -= lr decay w,   w -= lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

with g the gradient times `shrink`, which clips its norm. Gradients are set to zero on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _adamw(
    masters, gradients, means, squares, weights, shrink, lr, decay, beta_mean, beta_square, correction_mean,
    correction_square, eps, decayed, total, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    gradient = tl.load(gradients + index, mask=inside, other=0.0) * tl.load(shrink)
    master = tl.load(masters + index, mask=inside, other=0.0)
    mean = tl.load(means + index, mask=inside, other=0.0)
    square = tl.load(squares + index, mask=inside, other=0.0)
    master -= tl.where(index < decayed, lr * decay, 0.0) * master
    mean += (1.0 - beta_mean) * (gradient - mean)
    square += (1.0 - beta_square) * (gradient * gradient - square)
    master -= (lr / correction_mean) * mean / (tl.sqrt(square) / correction_square + eps)
    tl.store(masters + index, master, mask=inside)
    tl.store(means + index, mean, mask=inside)
    tl.store(squares + index, square, mask=inside)
    tl.store(weights + index, master.to(weights.dtype.element_ty), mask=inside)
    tl.store(gradients + index, tl.zeros([BLOCK], tl.float32), mask=inside)


def adamw(
    masters: Tensor,  # [total] float32, as are the next three
    gradients: Tensor,
    means: Tensor,
    squares: Tensor,
    weights: Tensor,  # [total] 16 bit: becomes the rounded masters
    shrink: Tensor,  # float32, one number on the device
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    decayed: int,  # how many of the numbers, from the first on, decay
    step: int,  # from 1
) -> None:
    """Take one step, and set the gradients to zero."""
    total = masters.numel()
    _adamw[(triton.cdiv(total, BLOCK),)](
        *(masters, gradients, means, squares, weights, shrink, lr, decay, *betas),
        *(1.0 - betas[0] ** step, (1.0 - betas[1] ** step) ** 0.5, eps, decayed, total),
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
