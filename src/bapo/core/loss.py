"""policy_loss: four tensors in, loss out.

The one call that puts the core together: check, solve the bounds (for `bapo`), compute the loss per token, reduce it,
and report. On CUDA one kernel computes, reduces and counts an objective with one pair of bounds (`kernels/clipped.py`).
What it deliberately does not do: recompute log-probs, estimate advantages, or keep state between calls. An update in
several micro-batches solves its bounds once, from the sum of their tables, and hands them to each call:

    table = sum(update_table(logprobs, behavior_logprobs, advantages, mask, settings) for each micro-batch)   # no grad
    bounds = bounds_from_table(table, settings)
    for each micro-batch: policy_loss(..., bounds=bounds, denominator=tokens_in_the_update).loss.backward()

The first line needs every micro-batch's log-probs before the first backward pass: one more forward pass, without grad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core import kernels
from bapo.core.bounds import (
    ClipBounds,
    bounds_from_table,
    parts_by_kernel,
    poison_peers,
    solve_bounds,
    summed,
    summed_signal,
)
from bapo.core.checks import (
    check_mask,
    check_not_empty,
    check_sequence_ids,
    check_shapes,
    check_tokens,
    check_uses,
    require_uses,
    zero_or_nan,
    zero_outside,
)
from bapo.core.entropy_rule import clip_statistics, entropy_statistics
from bapo.core.objectives import MAX_LOG_RATIO, OBJECTIVES, Clipped, TokenLoss, Tokens, bapo
from bapo.core.reduction import Reduction, denominator_of, reduce_tokens, token_weights
from bapo.core.settings import ClipSettings, require_choice, used_low_of

DEFAULT_SETTINGS = ClipSettings()
REDUCTIONS = get_args(Reduction)


@dataclass(frozen=True)
class PolicyLoss:
    """What one loss call computed."""

    loss: Tensor
    """0-d; call backward on it."""
    bounds: ClipBounds | None
    """The ratio bounds in use; None for objectives without one pair of bounds."""
    metrics: dict[str, Tensor]
    """Detached 0-d tensors on the inputs' device; reading one waits for the device."""
    retained: Tensor
    """Shaped like the inputs, bool: tokens whose gradient survived."""


def policy_loss(
    logprobs: Tensor,  # [tokens] packed or [sequences, tokens] padded; under the learner now, carries grad
    behavior_logprobs: Tensor,  # same shape; under the policy that really sampled each token
    advantages: Tensor,  # same shape; one value per token
    mask: Tensor,  # same shape; which tokens to train on
    *,
    objective: str = "bapo",
    settings: ClipSettings | None = None,
    bounds: ClipBounds | None = None,
    reduction: Reduction = "token_mean",
    denominator: Tensor | float | None = None,
    length: int | None = None,
    entropy: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    uses: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: float | None,
) -> PolicyLoss:
    """The policy loss of one update, or of one micro-batch of it.

    objective      a name in OBJECTIVES; its own options follow as keywords, e.g. objective="grpo", high=1.3
    settings       where BAPO may put its bounds; ClipSettings() if not given
    bounds         bounds solved before (scope `update`); otherwise they are solved from these tokens (`microbatch`)
    reduction      token_mean, sequence_mean or fixed_length (with length=)
    denominator    of the whole update; otherwise that of these tokens. See reduction.denominator_of
    entropy        per token, of the learner's own distribution at that token: adds the Entropy-Clip Rule to the metrics
    sequence_ids   [tokens] the response of each packed token, where sequences matter (gspo, topr, sequence_mean)
    uses           integers, same shape: how often each token was trained on before; needed where used_low is set
    process_group  solve the bounds over these ranks, with one all-reduce

    Ratios are computed in float32 whatever the inputs' dtype (float64 stays), and never overflow. Bad values raise a
    ValueError on CPU; on an accelerator, where looking would be a host sync, NaN and infinity make loss, gradient and
    bounds NaN, and `bapo.core.checks.check_tokens` says which token it was.
    """
    solves = _solves_bounds(objective) and bounds is None
    settings_or_default = settings if isinstance(settings, ClipSettings) else DEFAULT_SETTINGS
    try:
        _check_options(objective, settings, bounds, process_group, options)
        require_choice("reduction", reduction, REDUCTIONS)
        check_shapes(
            mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages, entropy=entropy
        )
        check_sequence_ids(sequence_ids, mask)
        require_uses(_used_low(objective, settings_or_default, bounds, options), uses)
        check_uses(uses, mask)
        mask = check_mask(mask)
        if mask.device.type == "cpu":
            check_tokens(logprobs, behavior_logprobs, advantages, mask, entropy=entropy, sequence_ids=sequence_ids)
        if denominator is None:
            check_not_empty(
                mask, "Skip it; as one part of a larger update, pass the update's bounds= and denominator=."
            )
            if reduction != "token_mean":  # which is counted where the tokens are added up
                denominator = denominator_of(mask, reduction, sequence_ids=sequence_ids, length=length)
        else:
            _check_denominator(denominator)
        tokens = clean_tokens(logprobs, behavior_logprobs, advantages, mask, sequence_ids, uses)
    except Exception:
        if solves and process_group is not None:
            poison_peers(settings_or_default, process_group, logprobs.device)
        raise

    if solves:
        bounds = _solve(tokens, settings_or_default, process_group)
    tokens = _weighed(tokens, bounds)
    solved = {"bounds": bounds} if OBJECTIVES[objective].solves_bounds else {}
    result = OBJECTIVES[objective](tokens, **solved, **options)
    reduced = reduced_loss(result, tokens, reduction, denominator)
    return PolicyLoss(reduced.loss, reduced.bounds, _metrics(tokens, reduced, entropy), reduced.retained)


@torch.no_grad()
def update_table(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    *,
    uses: Tensor | None = None,
) -> Tensor:
    """The signal table of one part of an update, with ratios exactly as `policy_loss` computes them. Tables add up."""
    check_shapes(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages)
    require_uses(settings.used_low, uses)
    check_uses(uses, mask)
    mask = check_mask(mask)
    if mask.device.type == "cpu":
        check_tokens(logprobs, behavior_logprobs, advantages, mask)
    tokens = clean_tokens(logprobs, behavior_logprobs, advantages, mask, uses=uses)
    return summed(_table_parts(tokens, settings))


def _solve(tokens: Tokens, settings: ClipSettings, process_group: dist.ProcessGroup | None) -> ClipBounds:
    """Bounds from these tokens. A token past the ratio limit has no gradient, so it does not count here either."""
    if process_group is None:
        return bounds_from_table(_table_parts(tokens, settings), settings, dtype=tokens.dtype)
    return solve_bounds(
        tokens.ratio.detach(),
        tokens.advantages,
        tokens.mask & tokens.within,
        settings,
        behavior_logprobs=tokens.behavior_logprobs,
        uses=tokens.uses,
        process_group=process_group,
    )


def _table_parts(tokens: Tokens, settings: ClipSettings) -> Tensor:
    """The signal table of these tokens, or one per column. Tokens past the ratio limit are left out."""
    if kernels.usable(tokens.mask):
        given = tokens.given_logprobs, tokens.given_advantages, tokens.mask
        return parts_by_kernel(*given, settings, tokens.given_behavior_logprobs, tokens.uses, MAX_LOG_RATIO)
    chosen, ratio = tokens.mask & tokens.within, tokens.ratio.detach()
    weights = None if settings.weight == "none" else tokens.behavior_logprobs
    return summed_signal(ratio, tokens.advantages, chosen, settings, weights, tokens.uses)


def clean_tokens(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor | None = None,
    uses: Tensor | None = None,
) -> Tokens:
    """The tokens of one call. Padding can hold anything: `Tokens` puts zeros where the mask is off."""
    if behavior_logprobs.requires_grad and not logprobs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "behavior_logprobs requires grad and logprobs does not: the two are swapped. The first argument is the "
            "policy being trained; the second, the one that sampled, is a constant."
        )
    return Tokens(logprobs, behavior_logprobs, advantages, mask, sequence_ids, uses)


def weigh_negatives(tokens: Tokens, weight: Tensor) -> Tokens:
    """The tokens, with the advantages of negative ones multiplied by a weight that corrects what the bounds left."""
    advantages = tokens.given_advantages.detach()
    return replace(tokens, given_advantages=torch.where(advantages < 0, advantages * weight, advantages))


def _weighed(tokens: Tokens, bounds: ClipBounds | None) -> Tokens:
    """The tokens as the loss takes them: weighed where the bounds say so."""
    weight = None if bounds is None else bounds.negative_weight
    return tokens if weight is None else weigh_negatives(tokens, weight)


def clipped_at(
    bounds: ClipBounds,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    uses: Tensor | None = None,
    dual_clip: float | None = None,
) -> Clipped:
    """The loss of each token at solved bounds, for trainers that average losses themselves; `policy_loss` does both."""
    check_uses(uses, mask)
    tokens = _weighed(clean_tokens(logprobs, behavior_logprobs, advantages, mask, uses=uses), bounds)
    return bapo(tokens, bounds=bounds, dual_clip=dual_clip)


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
    if isinstance(result, Clipped) and kernels.usable(mask) and tokens.dtype == torch.float32:
        return _clipped_by_kernel(result, tokens, reduction, denominator)
    if denominator is None:
        denominator = denominator_of(mask, "token_mean")
    loss = reduce_tokens(result.loss, mask, reduction, denominator=denominator, sequence_ids=ids)
    loss = loss * (1 + zero_or_nan(loss.detach()))  # else the other tokens would keep finite gradients
    bounds = result.bounds if isinstance(result, Clipped) else None
    return ReducedLoss(loss, result.retained, bounds, clip_statistics(tokens, result.retained))


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


def _metrics(tokens: Tokens, reduced: ReducedLoss, entropy: Tensor | None) -> dict[str, Tensor]:
    metrics = dict(reduced.statistics)
    if reduced.bounds is not None:
        metrics |= reduced.bounds.metrics()
    if entropy is not None:
        entropy = zero_outside(tokens.mask, entropy.detach().to(tokens.dtype))
        metrics |= entropy_statistics(tokens, entropy, reduced.retained)
    return metrics


def _check_options(
    objective: str, settings: object, bounds: object, process_group: object, options: dict[str, Any]
) -> None:
    """Raise for options that the objective does not take: none is silently ignored."""
    require_choice("objective", objective, OBJECTIVES)
    known = OBJECTIVES[objective].options
    for name in options:
        if name not in known:
            hint = f" Clip settings go into settings=ClipSettings({name}=...)." if hasattr(ClipSettings, name) else ""
            raise ValueError(
                f"{name}={options[name]!r} is not an argument of policy_loss, nor an option of "
                f"objective={objective!r}, which takes: {', '.join(known) or 'none'}.{hint}"
            )
    for name, value, kind, builder in (
        ("settings", settings, ClipSettings, "ClipSettings.preset('paper')"),
        ("bounds", bounds, ClipBounds, "solve_bounds or bounds_from_table"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} is not a {kind.__name__}. Build one, e.g. with {builder}.")
    given = [
        n for n, v in (("settings", settings), ("bounds", bounds), ("process_group", process_group)) if v is not None
    ]
    if given and not OBJECTIVES[objective].solves_bounds:
        users = " and ".join(f"objective={name!r}" for name in OBJECTIVES if OBJECTIVES[name].solves_bounds)
        raise ValueError(
            f"{given[0]}= is used by {users} only, not by {objective!r}. Leave it out, or use the options of "
            f"{objective!r}: {', '.join(known) or 'none'}."
        )
    if bounds is not None and len(given) > 1:
        other = next(name for name in given if name != "bounds")
        raise ValueError(f"bounds= are already solved, so {other}= would be ignored. Leave one of them out.")


def _used_low(
    objective: str, settings: ClipSettings, bounds: ClipBounds | None, options: dict[str, Any]
) -> float | None:
    """The bound of used tokens that this call asks for, wherever the objective takes it from."""
    if not OBJECTIVES[objective].solves_bounds:
        return used_low_of(objective, options)
    return settings.used_low if bounds is None else bounds.used_low


def _solves_bounds(objective: str) -> bool:
    """False for a name that is not known: `_check_options` refuses it."""
    return objective in OBJECTIVES and OBJECTIVES[objective].solves_bounds


def _check_denominator(denominator: Tensor | float) -> None:
    """A positive number; a tensor's value is looked at on CPU only."""
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise ValueError(f"denominator has shape {tuple(denominator.shape)}; pass one number for the whole update.")
        if denominator.device.type != "cpu":
            return
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(
            f"denominator={float(denominator)} must be finite and positive: it is the number of tokens (or sequences) "
            "of the whole update. See bapo.core.reduction.denominator_of."
        )
