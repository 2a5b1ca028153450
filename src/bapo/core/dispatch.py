"""Kernel or torch: the one place that decides.

Four computations exist twice, with the same numbers: in torch, which says what is computed and runs everywhere, and as
Triton kernels, which need fewer passes over memory. Callers use the functions here and do not know which of the two
runs.

    function                            torch code                    kernel, in bapo.core.kernels
    parts_of_ratios, parts_of_tokens    table.summed_signal           bounds.signal_partials
    choose_bounds                       clip_bounds.first_to_reach    bounds.choose_bounds
    reduced_loss                        reduction.reduce_tokens       clipped.clipped_loss, for one pair of bounds
    logprobs_and_entropy                chunked.chunked_logprobs      logprobs.fused_logprobs

Kernels need a GPU, and the last two of them leave float64 to torch. They are imported when they are chosen, so that a
machine without CUDA never imports Triton. Nothing here looks at a value: choosing never makes the host wait for the
device.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.core.checks import compared, working_dtype
from bapo.core.chunked import CHUNK_LOGITS, chunked_logprobs
from bapo.core.clip_bounds import ClipBounds, as_settled, first_to_reach
from bapo.core.entropy_rule import clip_statistics
from bapo.core.nan import zero_or_nan
from bapo.core.objectives import MAX_LOG_RATIO, Clipped, TokenLoss, Tokens
from bapo.core.reduction import Reduction, denominator_of, reduce_tokens, token_weights
from bapo.core.settings import ClipSettings
from bapo.core.table import check_signal, grids_of, summed_signal


def usable(tensor: Tensor) -> bool:
    """Whether kernels can run where this tensor lives: on the current CUDA device, where Triton launches."""
    return tensor.is_cuda and tensor.get_device() == torch.cuda.current_device() and _installed()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.no_grad()
def parts_of_ratios(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    uses: Tensor | None,
) -> Tensor:  # [highs + lows + 1] or [highs + lows + 1, parts] float64
    """The signal table of these tokens, or one per column: see `summed` and `choose_bounds`."""
    mask, behavior_logprobs = check_signal(ratio, advantages, mask, settings, behavior_logprobs, uses)
    if usable(mask):
        return parts_by_kernel(ratio, advantages, mask, settings, behavior_logprobs, uses)
    own_bound = None if uses is None else uses.bool() & compared(torch.lt, advantages, 0)
    return summed_signal(ratio, advantages, mask, settings, behavior_logprobs, own_bound)


def solved_by_kernel(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    uses: Tensor | None,
) -> ClipBounds:
    """The bounds of these tokens: two kernels, and as little work for the host as possible."""
    mask, behavior_logprobs = check_signal(ratio, advantages, mask, settings, behavior_logprobs, uses)
    parts = parts_by_kernel(ratio.detach(), advantages, mask, settings, behavior_logprobs, uses)
    return as_settled(bounds_by_kernel(parts, settings, working_dtype(ratio)), settings)


def parts_of_tokens(tokens: Tokens, settings: ClipSettings) -> Tensor:
    """The same from log-probs. Tokens past the ratio limit are left out."""
    if usable(tokens.mask):
        given = tokens.given_logprobs, tokens.given_advantages, tokens.mask
        return parts_by_kernel(*given, settings, tokens.given_behavior_logprobs, tokens.uses, MAX_LOG_RATIO)
    chosen, ratio = tokens.mask & tokens.within, tokens.ratio.detach()
    weights = None if settings.weight == "none" else tokens.behavior_logprobs
    own_bound = None if tokens.used is None else tokens.used & tokens.negative
    return summed_signal(ratio, tokens.advantages, chosen, settings, weights, own_bound)


def summed(parts: Tensor) -> Tensor:
    """The signal table itself."""
    return parts if parts.dim() == 1 else parts.sum(1)


def parts_by_kernel(
    ratio: Tensor,  # log-probs under the learner where log_ratio_limit is given
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    uses: Tensor | None,
    log_ratio_limit: float | None = None,
) -> Tensor:  # [highs + lows + 1, parts] float64
    """One kernel, in which each part of the tokens has its own column.

    With `log_ratio_limit` the kernel computes the ratios itself and leaves out tokens past the limit.
    """
    from bapo.core.kernels.bounds import signal_partials

    assert log_ratio_limit is None or behavior_logprobs is not None, "ratios of log-probs need both policies"
    grids = grids_of(settings, working_dtype(ratio), ratio.device)
    return signal_partials(
        ratio,
        advantages,
        mask,
        grids.low,
        grids.high,
        grids.thresholds,
        surrogate=settings.measure == "surrogate",
        weighted=settings.weight == "rollout_prob",
        behavior_logprobs=behavior_logprobs,
        uses=uses,
        used_low=grids.used_low,
        log_ratio_limit=log_ratio_limit,
    )


def choose_bounds(parts: Tensor, settings: ClipSettings, dtype: torch.dtype) -> ClipBounds:
    """The first candidate on the path that reaches the target, from a table or from one per column."""
    return bounds_by_kernel(parts, settings, dtype) if usable(parts) else first_to_reach(summed(parts), settings, dtype)


def bounds_by_kernel(parts: Tensor, settings: ClipSettings, dtype: torch.dtype) -> ClipBounds:
    """One kernel, which adds up the parts and walks the path."""
    from bapo.core.kernels.bounds import choose_bounds as choose

    grids = grids_of(settings, dtype, parts.device)
    high_first = settings.order == "high_first"
    target_share = settings.target_share
    return ClipBounds(
        *choose(parts, grids.low, grids.high, target_share=target_share, high_first=high_first, dtype=dtype)
    )


class ReducedLoss(NamedTuple):
    """An objective's result as one number, and what is reported with it."""

    loss: Tensor  # 0-d
    retained: Tensor
    bounds: ClipBounds | None
    statistics: dict[str, Tensor]  # `clip_statistics`


def reduced_loss(
    result: TokenLoss | Clipped, tokens: Tokens, reduction: Reduction, denominator: Tensor | float | None
) -> ReducedLoss:
    """Masked, weighted, summed and divided. A NaN loss gives NaN gradients to every token.

    Without a denominator, it is the number of tokens under the mask.
    """
    mask, ids = tokens.mask, tokens.sequence_ids
    if isinstance(result, Clipped) and usable(mask) and tokens.dtype == torch.float32:
        return _clipped_by_kernel(result, tokens, reduction, denominator)
    if denominator is None:
        denominator = denominator_of(mask, "token_mean")
    loss = reduce_tokens(result.loss, mask, reduction, denominator=denominator, sequence_ids=ids)
    loss = loss * (1 + zero_or_nan(loss.detach()))  # else the other tokens would keep finite gradients
    return ReducedLoss(loss, result.retained, result.bounds, clip_statistics(tokens, result.retained))


def _clipped_by_kernel(
    clipped: Clipped, tokens: Tokens, reduction: Reduction, denominator: Tensor | float | None
) -> ReducedLoss:
    from bapo.core.kernels.clipped import clipped_loss

    weights = None
    if reduction == "sequence_mean":
        weights = token_weights(tokens.mask, reduction, tokens.dtype, sequence_ids=tokens.sequence_ids)
    fused = clipped_loss(
        tokens.given_logprobs,
        tokens.given_behavior_logprobs,
        tokens.given_advantages,
        tokens.mask,
        clipped.low,
        clipped.high,
        log_ratio_limit=MAX_LOG_RATIO,
        cap=clipped.cap,
        uses=tokens.uses,
        used_low=clipped.used_low,
        weights=weights,
        denominator=denominator,
    )
    bounds = clipped.solved
    if bounds is None:
        low, high, share = fused.bounds
        bounds = ClipBounds(low, high, share, used_low=clipped.used_low)
    return ReducedLoss(fused.loss, fused.retained, bounds, fused.statistics)


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_logits: int | None,  # held at once; None: what suits the device
    float32_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both of each token, from hidden states."""
    if usable(hidden) and hidden.dtype != torch.float64 and len(targets):
        from bapo.core.kernels.logprobs import TILE_LOGITS, fused_logprobs

        return fused_logprobs(hidden, weight, bias, targets, temperature, chunk_logits or TILE_LOGITS, float32_logits)
    return chunked_logprobs(hidden, weight, bias, targets, temperature, chunk_logits or CHUNK_LOGITS, float32_logits)
