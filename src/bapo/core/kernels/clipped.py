"""The clipped surrogate in one pass: masked, weighed, added up and counted, with its derivative on the way.

    L = sum_t w_t L_t / denominator,   L_t = -min(r_t A_t, clip(r_t, low, high) A_t)
    dL_t / dlog pi_t = -r_t A_t where retained, else 0

The derivative is a by-product of the forward pass, so w_t dL_t is stored there and the backward pass is one product
with the incoming gradient over the denominator. The losses of single tokens are not stored at all. Each program leaves
its sums of them and of the numbers every loss call reports: of these, the loss, clip statistics and the positive share
of given bounds are made. All sums are in float64 and in a fixed order.

Inputs are taken as they are: in any floating dtype, with anything where the mask is off. A value that is not finite
under the mask makes the loss NaN, and the gradient of every token with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo.core.bounds import share_of_sums
from bapo.core.checks import zero_or_nan
from bapo.core.entropy_rule import clip_fractions
from bapo.core.kernels import blocks_of
from bapo.core.kernels.bounds import limited_ratio

BLOCK_TOKENS = 1024
SUMS = 8
"""Tokens, positive and negative ones, blocked ones of each sign, P, N, and the loss."""


class ClippedLoss(NamedTuple):
    """What the kernels found: 0-d, except for the tokens' fate."""

    loss: Tensor  # float32, carries grad
    retained: Tensor  # bool, shaped like the tokens
    statistics: dict[str, Tensor]  # as `bapo.core.entropy_rule.clip_statistics` has them
    bounds: tuple[Tensor, ...]  # low, high and their positive share by the gradient measure; () for bounds in tensors


def clipped_loss(
    logprobs: Tensor,  # [tokens] or [sequences, tokens]; carries grad
    behavior_logprobs: Tensor,  # same shape
    advantages: Tensor,  # same shape
    mask: Tensor,  # same shape, bool
    low: Tensor | float,
    high: Tensor | float,
    *,
    log_ratio_limit: float,
    cap: float | None = None,  # on ratios of negative tokens: the dual clip
    uses: Tensor | None = None,  # same shape, integers
    used_low: Tensor | float | None = None,  # in place of low, for tokens with uses
    weights: Tensor | None = None,  # same shape: w_t, else 1
    denominator: Tensor | float | None = None,  # else the number of tokens under the mask
) -> ClippedLoss:
    """The loss of `bapo.core.objectives.Clipped`, reduced as in `bapo.core.reduction`, in float32."""
    device, tokens = logprobs.device, logprobs.numel()
    solved = False
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        low, high, solved = _on(device, low), _on(device, high), True
    else:
        low, high = float(low), float(high)  # an integer would be a constant of another kernel
    programs = max(1, blocks_of(tokens, BLOCK_TOKENS))
    derivative = torch.empty(logprobs.shape, dtype=torch.float32, device=device)
    retained = torch.empty(logprobs.shape, dtype=torch.bool, device=device)
    partials = torch.empty((SUMS, programs), dtype=torch.float64, device=device)
    _clipped_kernel[(programs,)](
        logprobs.contiguous(),
        behavior_logprobs.contiguous(),
        advantages.contiguous(),
        mask.contiguous(),
        mask if weights is None else weights.contiguous(),
        mask if uses is None else uses.contiguous(),
        low,
        high,
        0.0 if cap is None else float(cap),
        _on(device, used_low) if isinstance(used_low, Tensor) else 0.0 if used_low is None else float(used_low),
        derivative,
        retained,
        partials,
        tokens,
        solved,
        cap is not None,
        "never" if used_low is None else "pointer" if isinstance(used_low, Tensor) else "number",
        weights is not None,
        log_ratio_limit,
        BLOCK_TOKENS,
    )
    tokens_chosen, *counts, positive, negative, total = partials.sum(1).unbind()
    bad = zero_or_nan(total)
    if isinstance(denominator, Tensor):
        denominator = _on(device, denominator).double().squeeze()
    divisor = tokens_chosen if denominator is None else denominator
    loss, scale = ((each / divisor + bad).float() for each in (total, torch.ones_like(total)))
    given: tuple[Tensor, ...] = ()
    if not solved:
        share = share_of_sums(positive, negative, counts[0] + counts[1]) + bad
        given = torch.full_like(loss, float(low)), torch.full_like(loss, float(high)), share.float()
    tied = _WithDerivative.apply(logprobs, loss, derivative, scale)
    return ClippedLoss(tied, retained, clip_fractions(tokens_chosen, *counts), given)


def _on(device: torch.device, number: Tensor) -> Tensor:
    return number if number.device == device else number.to(device)


class _WithDerivative(torch.autograd.Function):
    """The loss, tied to the log-probs: their gradient is the stored derivative times (incoming * scale)."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, derivative: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(derivative, scale)
        ctx.dtype = logprobs.dtype
        ctx.mark_dirty(loss)  # returned as it is, and not as a view, which could not be changed in place
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        derivative, scale = ctx.saved_tensors
        return (derivative * (grad * scale)).to(ctx.dtype), None, None, None


@triton.jit(do_not_specialize=["tokens"])
def _clipped_kernel(
    logprobs_ptr,
    behavior_ptr,
    advantages_ptr,
    mask_ptr,
    weights_ptr,
    uses_ptr,
    low,
    high,
    cap,
    used_low,
    derivative_ptr,
    retained_ptr,
    partials_ptr,
    tokens,
    SOLVED: tl.constexpr,
    CAPPED: tl.constexpr,
    USED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LOG_RATIO_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of tokens. Bounds are numbers, or pointers to them where they were SOLVED on the device."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if SOLVED:
        low = tl.load(low).to(tl.float32)
        high = tl.load(high).to(tl.float32)
    token = program * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    chosen = tl.load(mask_ptr + token, mask=inside, other=0) != 0
    logprobs = tl.load(logprobs_ptr + token, mask=inside, other=0.0).to(tl.float32)
    behavior = tl.load(behavior_ptr + token, mask=inside, other=0.0).to(tl.float32)
    advantage = tl.load(advantages_ptr + token, mask=inside, other=0.0).to(tl.float32)
    difference = tl.where(chosen, logprobs, 0.0) - tl.where(chosen, behavior, 0.0)
    advantage = tl.where(chosen, advantage, 0.0)
    ratio = limited_ratio(difference, LOG_RATIO_LIMIT)

    if USED != "never":
        if USED == "pointer":
            used_low = tl.load(used_low).to(tl.float32)
            high += used_low - used_low  # one that is NaN makes all losses NaN, as another bound does
        used = tl.load(uses_ptr + token, mask=inside, other=0) != 0
        lower = tl.where(used, used_low, low)
    else:
        lower = low
    positive = advantage > 0
    negative = advantage < 0
    unclipped = (positive & (ratio < high)) | (~positive & ((ratio > lower) | (advantage == 0)))
    clipped = tl.where(ratio < lower, lower, ratio)
    clipped = tl.where(clipped > high, high, clipped)
    if SOLVED:
        clipped = tl.where((low == low) & (high == high), clipped, float("nan"))
    loss = -tl.where(unclipped, ratio, clipped) * advantage
    keeps = unclipped
    if CAPPED:
        capped = negative & (ratio >= cap)
        loss = tl.where(capped, -cap * advantage, loss)
        keeps = keeps & ~capped
    within = ~(tl.abs(difference) >= LOG_RATIO_LIMIT)
    retained = keeps & within
    moves = keeps & ~(tl.abs(difference) > LOG_RATIO_LIMIT)
    signal = ratio * advantage
    derivative = tl.where(moves, -signal, 0.0)
    if WEIGHTED:
        weight = tl.load(weights_ptr + token, mask=inside, other=0.0).to(tl.float32)
        loss = loss * weight
        derivative = derivative * weight
    tl.store(derivative_ptr + token, derivative, mask=inside)
    tl.store(retained_ptr + token, retained, mask=inside)

    signal = signal.to(tl.float64)
    blocked = ~retained
    counted = unclipped & within  # in the share, of which the cap is no bound
    out = partials_ptr + program
    tl.store(out, tl.sum(chosen.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + programs, tl.sum(positive.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 2 * programs, tl.sum(negative.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 3 * programs, tl.sum((positive & blocked).to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 4 * programs, tl.sum((negative & blocked).to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 5 * programs, tl.sum(tl.where(counted & positive, signal, 0.0), axis=0))
    tl.store(out + 6 * programs, -tl.sum(tl.where(counted & negative, signal, 0.0), axis=0))
    tl.store(out + 7 * programs, tl.sum(loss.to(tl.float64), axis=0))
