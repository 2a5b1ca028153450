"""The clipped surrogate in one pass: loss, derivative, fate and the counts that come for free.

    L_t = -min(r_t A_t, clip(r_t, low, high) A_t),   dL_t / dlog pi_t = -r_t A_t where retained, else 0

The derivative is a by-product of the forward pass, so it is stored there and the backward pass is one product. Each
program also leaves its sums of the numbers every loss call reports; a second, single program turns them into clip
statistics and, for bounds that were given, into their positive share. Masking, weighing and averaging of the losses
stay where they are for every objective: in `bapo.core.reduction`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo.core.kernels.ratio import limited_ratio

BLOCK_TOKENS = 1024
SUMS = 8
"""Tokens, positive and negative ones, blocked ones of each sign, P, N, and r A of all (for NaN alone)."""
STATISTICS = (
    "positive_tokens",
    "negative_tokens",
    "clip_fraction",
    "clip_fraction_positive",
    "clip_fraction_negative",
)


class ClippedLoss(NamedTuple):
    """What the kernels found, shaped like the tokens or 0-d."""

    loss: Tensor  # float32, carries grad
    retained: Tensor  # bool
    statistics: dict[str, Tensor]  # as `bapo.core.entropy_rule.clip_statistics` has them
    bounds: tuple[Tensor, Tensor, Tensor]  # low, high and their positive share by the gradient measure


def clipped_loss(
    logprobs: Tensor,  # [tokens] or [sequences, tokens], up to float32; carries grad
    behavior_logprobs: Tensor,  # same shape
    advantages: Tensor,  # same shape
    mask: Tensor,  # same shape, bool
    low: Tensor | float,
    high: Tensor | float,
    *,
    log_ratio_limit: float,
    cap: float | None = None,  # on ratios of negative tokens: the dual clip
) -> ClippedLoss:
    """The loss of `bapo.core.objectives` with one pair of bounds; values that the mask leaves out count as 0."""
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        low, high = low.to(logprobs.device), high.to(logprobs.device)
    else:
        low, high = float(low), float(high)  # an integer would be a constant of another kernel
    loss, retained, partials = _Clipped.apply(
        logprobs, behavior_logprobs, advantages, mask, low, high, log_ratio_limit, cap
    )
    summary = torch.empty(SUMS, dtype=torch.float64, device=partials.device)
    single = summary.view(torch.float32)
    _summary_kernel[(1,)](partials, summary, single, low, high, partials.shape[1], isinstance(low, Tensor), SUMS, 256)
    statistics = dict(zip(STATISTICS, summary.unbind(), strict=False))
    used_low, used_high, share = single[-3:].unbind()
    return ClippedLoss(loss, retained, statistics, (used_low, used_high, share))


class _Clipped(torch.autograd.Function):
    """Loss per token, retained and partial sums; the gradient is the stored derivative times the incoming one."""

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        low: Tensor | float,
        high: Tensor | float,
        log_ratio_limit: float,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = logprobs.numel()
        programs = max(1, triton.cdiv(tokens, BLOCK_TOKENS))
        loss = torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)
        derivative = torch.empty_like(loss)
        retained = torch.empty(logprobs.shape, dtype=torch.bool, device=logprobs.device)
        partials = torch.empty((SUMS, programs), dtype=torch.float64, device=logprobs.device)
        _clipped_kernel[(programs,)](
            logprobs.contiguous(),
            behavior_logprobs.contiguous(),
            advantages.contiguous(),
            mask.contiguous(),
            low,
            high,
            0.0 if cap is None else float(cap),
            loss,
            derivative,
            retained,
            partials,
            tokens,
            isinstance(low, Tensor),
            cap is not None,
            log_ratio_limit,
            BLOCK_TOKENS,
        )
        ctx.save_for_backward(derivative)
        ctx.dtype = logprobs.dtype
        ctx.mark_non_differentiable(retained, partials)
        return loss, retained, partials

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (derivative,) = ctx.saved_tensors
        return (grad * derivative).to(ctx.dtype), None, None, None, None, None, None, None


@triton.jit(do_not_specialize=["tokens"])
def _clipped_kernel(
    logprobs_ptr,
    behavior_ptr,
    advantages_ptr,
    mask_ptr,
    low,
    high,
    cap,
    loss_ptr,
    derivative_ptr,
    retained_ptr,
    partials_ptr,
    tokens,
    SOLVED: tl.constexpr,
    CAPPED: tl.constexpr,
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
    difference = tl.where(chosen, logprobs - behavior, 0.0)
    advantage = tl.where(chosen, advantage, 0.0)
    ratio = limited_ratio(difference, LOG_RATIO_LIMIT)

    positive = advantage > 0
    negative = advantage < 0
    unclipped = (positive & (ratio < high)) | (~positive & ((ratio > low) | (advantage == 0)))
    clipped = tl.where(ratio > high, high, tl.where(ratio < low, low, ratio))
    if SOLVED:
        clipped = tl.where((low == low) & (high == high), clipped, float("nan"))
    loss = -tl.where(unclipped, ratio, clipped) * advantage
    keeps = unclipped
    if CAPPED:
        capped = negative & (ratio >= cap)
        loss = tl.where(capped, -cap * advantage, loss)
        keeps = keeps & ~capped
    retained = keeps & ~(tl.abs(difference) >= LOG_RATIO_LIMIT)
    moves = keeps & ~(tl.abs(difference) > LOG_RATIO_LIMIT)
    tl.store(loss_ptr + token, loss, mask=inside)
    tl.store(derivative_ptr + token, tl.where(moves, -ratio * advantage, 0.0), mask=inside)
    tl.store(retained_ptr + token, retained, mask=inside)

    signal = (ratio * advantage).to(tl.float64)
    blocked = ~retained
    out = partials_ptr + program
    tl.store(out, tl.sum(chosen.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + programs, tl.sum(positive.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 2 * programs, tl.sum(negative.to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 3 * programs, tl.sum((positive & blocked).to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 4 * programs, tl.sum((negative & blocked).to(tl.int32), axis=0).to(tl.float64))
    tl.store(out + 5 * programs, tl.sum(tl.where(unclipped & positive, signal, 0.0), axis=0))
    tl.store(out + 6 * programs, -tl.sum(tl.where(unclipped & negative, signal, 0.0), axis=0))
    tl.store(out + 7 * programs, tl.sum(signal, axis=0))


@triton.jit(do_not_specialize=["programs"])
def _summary_kernel(
    partials_ptr,
    summary_ptr,
    single_ptr,
    low,
    high,
    programs,
    SOLVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over programs -> five fractions in float64; low, high and share in float32 behind them."""
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float64)
    for start in range(0, programs, BLOCK):
        program = start + tl.arange(0, BLOCK)
        here = (program < programs)[None, :] & (row >= 0)[:, None]
        sums += tl.load(partials_ptr + row[:, None] * programs + program[None, :], mask=here, other=0.0)
    totals = tl.sum(sums, axis=1)
    tokens = tl.sum(tl.where(row == 0, totals, 0.0), axis=0)
    positive_tokens = tl.sum(tl.where(row == 1, totals, 0.0), axis=0)
    negative_tokens = tl.sum(tl.where(row == 2, totals, 0.0), axis=0)
    blocked_positive = tl.sum(tl.where(row == 3, totals, 0.0), axis=0)
    blocked_negative = tl.sum(tl.where(row == 4, totals, 0.0), axis=0)
    positive = tl.sum(tl.where(row == 5, totals, 0.0), axis=0)
    negative = tl.sum(tl.where(row == 6, totals, 0.0), axis=0)
    everything = tl.sum(tl.where(row == 7, totals, 0.0), axis=0)

    signed_tokens = positive_tokens + negative_tokens
    tl.store(summary_ptr, positive_tokens / tl.where(tokens > 0, tokens, 1.0))
    tl.store(summary_ptr + 1, negative_tokens / tl.where(tokens > 0, tokens, 1.0))
    tl.store(summary_ptr + 2, (blocked_positive + blocked_negative) / tl.where(signed_tokens > 0, signed_tokens, 1.0))
    tl.store(summary_ptr + 3, blocked_positive / tl.where(positive_tokens > 0, positive_tokens, 1.0))
    tl.store(summary_ptr + 4, blocked_negative / tl.where(negative_tokens > 0, negative_tokens, 1.0))

    total = positive + negative
    nothing = tl.where(signed_tokens == 0, 1.0, 0.0)
    share = tl.where(total == 0, nothing, positive / tl.where(total == 0, 1.0, total))
    poison = tl.where(tl.abs(everything) < float("inf"), 0.0, float("nan"))
    if SOLVED:
        low = tl.load(low)
        high = tl.load(high)
    tl.store(single_ptr + 13, low)
    tl.store(single_ptr + 14, high)
    tl.store(single_ptr + 15, share + poison)
