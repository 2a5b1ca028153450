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

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core import kernels
from bapo.core.bounds import ClipBounds, poison_peers, solved_bounds, table_by_kernel, table_by_torch
from bapo.core.brake import DRIFT_SUMS
from bapo.core.checks import (
    MAX_LOG_RATIO,
    check_finite,
    check_mask,
    check_not_empty,
    check_sequence_ids,
    check_shapes,
    check_tokens,
    check_uses,
    zero_or_nan,
    zero_outside,
)
from bapo.core.entropy_rule import clip_statistics, entropy_statistics
from bapo.core.objectives import OBJECTIVES, Clipped, bapo
from bapo.core.reduction import Reduction, denominator_of, given_weights, reduce_tokens, token_weights
from bapo.core.settings import BRAKES, OBJECTIVE_OPTIONS, ClipSettings, require_choice, rule_of_used
from bapo.core.tokens import TokenLoss, Tokens

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
    loss_weights: Tensor | None = None,
    log_kept: Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: float | None,
) -> PolicyLoss:
    """The policy loss of one update, or of one micro-batch of it.

    objective      a name in OBJECTIVES; its own options follow as keywords, e.g. objective="grpo", high=1.3
    settings       where BAPO may put its bounds; ClipSettings() if not given
    bounds         bounds solved before (scope `update`); otherwise they are solved from these tokens (`microbatch`)
    reduction      token_mean, sequence_mean, fixed_length (with length=) or balanced (with loss_weights=)
    denominator    of the whole update; otherwise that of these tokens. See reduction.denominator_of
    entropy        per token, of the learner's own distribution at that token: adds the Entropy-Clip Rule to the metrics
    sequence_ids   [tokens] the response of each packed token, where sequences matter (gspo, sequence_mean, …)
    uses           integers, same shape: how often each token was trained on before; needed by brake, push_once and
                   wherever used_low is set
    loss_weights   same shape: reduction.balanced_weights of whole groups, for each token
    log_kept       same shape: log of the mass that top-p, top-k or min-p kept when a token was sampled, if any of them
                   was on; behavior_logprobs are those of the truncated distribution (tokens.py)
    process_group  solve the bounds over these ranks, with one all-reduce

    Ratios are computed in float32 whatever the inputs' dtype (float64 stays), and never overflow. Bad values raise a
    ValueError on CPU; on an accelerator, where looking would be a host sync, NaN and infinity make loss, gradient and
    bounds NaN, and `bapo.core.checks.check_tokens` says which token it was.
    """
    clip = settings if isinstance(settings, ClipSettings) else DEFAULT_SETTINGS
    solves = bounds is None and objective in OBJECTIVES and OBJECTIVES[objective].solves_bounds
    try:
        _check_asked(objective, settings, bounds, process_group, options)
        chosen = OBJECTIVES[objective]
        if chosen.settings is not None:
            clip, options = chosen.settings(**options), {}
        if not chosen.solves_bounds:
            rule = rule_of_used(objective, options)
        else:
            rule = clip.rule_of_used if bounds is None else _named_used_low(bounds.used_low)
        require_choice("reduction", reduction, REDUCTIONS)
        if reduction == "balanced":
            given_weights(loss_weights)
        elif loss_weights is not None:
            raise ValueError(
                f"loss_weights= are those of reduction='balanced', and {reduction!r} would ignore them. Leave them out."
            )
        given: dict[str, Any] = {"sequence_ids": sequence_ids, "loss_weights": loss_weights, "log_kept": log_kept}
        tokens = _checked(logprobs, behavior_logprobs, advantages, mask, rule, uses, entropy=entropy, **given)
        if denominator is None:
            check_not_empty(
                tokens.mask, "Skip it; as one part of a larger update, pass the update's bounds= and denominator=."
            )
            if reduction != "token_mean":  # which is counted where the tokens are added up
                denominator = denominator_of(tokens.mask, reduction, sequence_ids=sequence_ids, length=length)
        else:
            _check_denominator(denominator)
    except Exception:
        if solves and process_group is not None:
            poison_peers(clip, process_group, logprobs.device)
        raise

    if solves:
        bounds = solved_bounds(_table(tokens, clip), clip, process_group, dtype=tokens.dtype)
    if bounds is not None:
        tokens = weigh_negatives(tokens, bounds.negative_weight)
    result = chosen.compute(tokens, **({"bounds": bounds} if chosen.solves_bounds else {}), **options)
    if isinstance(result, Clipped) and kernels.usable(tokens.mask) and tokens.dtype == torch.float32:
        out = _reduced_by_kernel(result, tokens, reduction, denominator)
    else:
        out = _reduced(result, tokens, reduction, denominator)
    if entropy is not None:
        entropy = zero_outside(tokens.mask, entropy.detach().to(tokens.dtype))
        out.metrics.update(entropy_statistics(tokens, entropy, out.retained))
    return out


def _checked(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rule: str | None,
    uses: Tensor | None,
    *,
    sequence_ids: Tensor | None = None,
    entropy: Tensor | None = None,
    loss_weights: Tensor | None = None,
    log_kept: Tensor | None = None,
) -> Tokens:
    """The tokens of one call. Padding can hold anything: `Tokens` puts zeros where the mask is off."""
    check_shapes(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages, entropy=entropy)
    check_shapes(mask, loss_weights=loss_weights, log_kept=log_kept)
    check_sequence_ids(sequence_ids, mask)
    check_uses(uses, mask, rule)
    mask = check_mask(mask)
    if mask.device.type == "cpu":
        check_tokens(logprobs, behavior_logprobs, advantages, mask, entropy=entropy, sequence_ids=sequence_ids)
        if log_kept is not None:
            check_finite("log_kept", log_kept, mask, sequence_ids)
    return Tokens(logprobs, behavior_logprobs, advantages, mask, sequence_ids, uses, loss_weights, log_kept)


@torch.no_grad()
def update_table(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    *,
    uses: Tensor | None = None,
    log_kept: Tensor | None = None,
) -> Tensor:
    """The signal table of one part of an update, with ratios exactly as `policy_loss` computes them. Tables add up."""
    tokens = _checked(logprobs, behavior_logprobs, advantages, mask, settings.rule_of_used, uses, log_kept=log_kept)
    return _table(tokens, settings)


def _table(tokens: Tokens, settings: ClipSettings) -> Tensor:
    """The signal table of these tokens. One past the ratio limit has no gradient, so it does not count here either."""
    if kernels.usable(tokens.mask):
        given = tokens.given_logprobs, tokens.given_advantages, tokens.mask
        table = table_by_kernel(*given, settings, tokens.given_behavior_logprobs, tokens.uses, MAX_LOG_RATIO)
    else:
        chosen, ratio = tokens.mask & tokens.within, tokens.ratio.detach()
        weights = None if settings.weight == "none" else tokens.behavior_logprobs
        both = tokens.logprobs, tokens.behavior_logprobs
        table = table_by_torch(ratio, tokens.advantages, chosen, settings, weights, tokens.uses, both)
    if settings.brake is not None and tokens.log_kept is not None:  # the brake goes by log r - log m
        looked_at = tokens.mask & tokens.within & tokens.negative
        looked_at = looked_at if tokens.uses is None else looked_at & tokens.uses.bool()
        table[-DRIFT_SUMS] += torch.where(looked_at, tokens.log_kept, 0.0).sum(dtype=torch.float64)
    return table


def weigh_negatives(tokens: Tokens, weight: Tensor | None) -> Tokens:
    """The tokens, with the advantages of negative ones multiplied by a weight that corrects what the bounds left."""
    if weight is None:
        return tokens
    advantages = tokens.given_advantages.detach()
    return replace(tokens, given_advantages=torch.where(advantages < 0, advantages * weight, advantages))


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
    check_uses(uses, mask, _named_used_low(bounds.used_low))
    tokens = weigh_negatives(Tokens(logprobs, behavior_logprobs, advantages, mask, uses=uses), bounds.negative_weight)
    return bapo(tokens, bounds=bounds, dual_clip=dual_clip)


def _named_used_low(used_low: Tensor | float | None) -> str | None:
    """The bound of used tokens, if there is one, as errors name it."""
    if used_low is None:
        return None
    return "used_low, which the brake has set," if isinstance(used_low, Tensor) else f"used_low={used_low}"


def _reduced(
    result: TokenLoss | Clipped, tokens: Tokens, reduction: Reduction, denominator: Tensor | float | None
) -> PolicyLoss:
    """Masked, weighted, summed and divided, without a denominator by the number of tokens under the mask.

    A NaN loss gives NaN gradients to every token.
    """
    if denominator is None:
        denominator = denominator_of(tokens.mask, "token_mean")
    given: dict[str, Any] = {"sequence_ids": tokens.sequence_ids, "loss_weights": tokens.loss_weights}
    loss = reduce_tokens(result.loss, tokens.mask, reduction, denominator=denominator, **given)
    loss = loss * (1 + zero_or_nan(loss.detach()))  # else the other tokens would keep finite gradients
    bounds = result.bounds if isinstance(result, Clipped) else None
    statistics = clip_statistics(tokens, result.retained)
    return PolicyLoss(loss, bounds, statistics | (bounds.metrics() if bounds else {}), result.retained)


def _reduced_by_kernel(
    clipped: Clipped, tokens: Tokens, reduction: Reduction, denominator: Tensor | float | None
) -> PolicyLoss:
    """The same in one pass."""
    from bapo.core.kernels.clipped import clipped_loss

    weights = None
    if reduction in ("sequence_mean", "balanced"):
        given: dict[str, Any] = {"sequence_ids": tokens.sequence_ids, "loss_weights": tokens.loss_weights}
        weights = token_weights(tokens.mask, reduction, tokens.dtype, **given)
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
    return PolicyLoss(fused.loss, bounds, fused.statistics | bounds.metrics(), fused.retained)


def _check_asked(
    objective: str, settings: object, bounds: object, process_group: object, options: Mapping[str, Any]
) -> None:
    """Raise for an objective that does not exist, and for options that it does not take: none is silently ignored."""
    require_choice("objective", objective, OBJECTIVES)
    known = OBJECTIVE_OPTIONS[objective]
    taken = ", ".join(known) or "none"
    for name, value in options.items():
        if name not in known:
            hint = f" Clip settings go into settings=ClipSettings({name}=...)." if hasattr(ClipSettings, name) else ""
            raise ValueError(
                f"{name}={value!r} is not an argument of policy_loss, nor an option of objective={objective!r}, which "
                f"takes: {taken}.{hint}"
            )
    for name, value, kind, builder in (
        ("settings", settings, ClipSettings, "ClipSettings.preset('paper')"),
        ("bounds", bounds, ClipBounds, "solve_bounds or bounds_from_table"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} is not a {kind.__name__}. Build one, e.g. with {builder}.")
    solving = [name for name, each in OBJECTIVES.items() if each.solves_bounds]
    for name, value, users in (
        ("settings", settings, ["bapo"]),
        ("bounds", bounds, solving),
        ("process_group", process_group, solving),
    ):
        if value is not None and objective not in users:
            raise ValueError(
                f"{name}= is used by {' and '.join(f'objective={user!r}' for user in users)} only, not by "
                f"{objective!r}. Leave it out, or use the options of {objective!r}: {taken}."
            )
    beside: dict[str, object] = {"settings": settings, "process_group": process_group}
    beside |= options if objective in BRAKES else {}
    if bounds is not None and (ignored := next((name for name, value in beside.items() if value is not None), None)):
        raise ValueError(f"bounds= are already solved, so {ignored}= would be ignored. Leave one of them out.")


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
