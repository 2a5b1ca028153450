"""policy_loss: four tensors in, loss out.

The one call that puts the core together: check, solve the bounds (for `bapo`), compute the loss per token, reduce it,
and report. What it deliberately does not do: recompute log-probs, estimate advantages, or keep state between calls. An
update in several micro-batches solves its bounds once from the sum of their tables and hands them to each call:

    table = sum(signal_table(ratio(m), m.advantages, m.mask, settings) for m in micro_batches)
    bounds = bounds_from_table(table, settings)
    for m in micro_batches:
        policy_loss(..., bounds=bounds, denominator=tokens_in_the_update).loss.backward()
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core.bounds import ClipBounds, poison_peers, solve_bounds
from bapo.core.checks import check_mask, check_not_empty, check_sequence_ids, check_shapes, check_tokens, zero_outside
from bapo.core.entropy_rule import clip_statistics, entropy_statistics
from bapo.core.objectives import OBJECTIVES, TokenLoss, Tokens
from bapo.core.reduction import Reduction, denominator_of, reduce_tokens
from bapo.core.settings import ClipSettings, require_choice


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
    process_group: dist.ProcessGroup | None = None,
    **options: float | None,
) -> PolicyLoss:
    """The policy loss of one update, or of one micro-batch of it.

    objective      a name in OBJECTIVES; its own options follow as keywords, e.g. objective="grpo", high=1.3
    settings       where BAPO may put its bounds; ClipSettings() if not given
    bounds         bounds solved before (scope `update`); otherwise they are solved from these tokens (`microbatch`)
    reduction      token_mean, sequence_mean or fixed_length (with length=)
    denominator    of the whole update; otherwise that of these tokens. See reduction.denominator_of
    entropy        per token, of the distribution it came from: adds the Entropy-Clip Rule to the metrics
    sequence_ids   [tokens] the response of each packed token, where sequences matter (gspo, topr, sequence_mean)
    process_group  solve the bounds over these ranks, with one all-reduce

    Ratios are computed in float32 whatever the inputs' dtype (float64 stays), and never overflow. Bad values raise a
    ValueError on CPU; on an accelerator, where looking would be a host sync, they make loss and bounds NaN, and
    `bapo.core.checks.check_tokens` says which token it was.
    """
    require_choice("objective", objective, OBJECTIVES)
    require_choice("reduction", reduction, get_args(Reduction))
    _check_options(objective, settings, bounds, options)
    settings = settings or ClipSettings()
    check_shapes(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages, entropy=entropy)
    check_sequence_ids(sequence_ids, mask)
    mask = check_mask(mask)
    solves_with_peers = objective == "bapo" and bounds is None and process_group is not None
    if mask.device.type == "cpu":
        try:
            check_tokens(logprobs, behavior_logprobs, advantages, mask, entropy=entropy, sequence_ids=sequence_ids)
        except ValueError:
            if solves_with_peers and process_group is not None:
                poison_peers(settings, process_group, mask.device)
            raise
    if denominator is None:
        check_not_empty(mask, "Skip it, or pass denominator= if it is one part of a larger update.")
        denominator = denominator_of(mask, reduction, sequence_ids=sequence_ids, length=length)

    tokens = clean_tokens(logprobs, behavior_logprobs, advantages, mask, sequence_ids)
    if objective == "bapo":
        if bounds is None:
            bounds = solve_bounds(
                tokens.ratio.detach(),
                tokens.advantages,
                mask,
                settings,
                behavior_logprobs=tokens.behavior_logprobs,
                process_group=process_group,
            )
        result = OBJECTIVES["bapo"](tokens, bounds=bounds, **options)
    else:
        result = OBJECTIVES[objective](tokens, **options)
    loss = reduce_tokens(result.loss, mask, reduction, denominator=denominator, sequence_ids=sequence_ids)
    return PolicyLoss(loss, result.bounds, _metrics(tokens, result, entropy), result.retained)


def clean_tokens(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor | None = None,
) -> Tokens:
    """The tokens in working precision, with zeros where the mask is off, so that padding can hold anything."""
    dtype = torch.float64 if logprobs.dtype == torch.float64 else torch.float32
    return Tokens(
        logprobs=zero_outside(mask, logprobs.to(dtype)),
        behavior_logprobs=zero_outside(mask, behavior_logprobs.to(dtype)),
        advantages=zero_outside(mask, advantages.to(dtype)),
        mask=mask,
        sequence_ids=sequence_ids,
    )


def _metrics(tokens: Tokens, result: TokenLoss, entropy: Tensor | None) -> dict[str, Tensor]:
    metrics = clip_statistics(tokens, result.retained)
    bounds = result.bounds
    if bounds is not None:
        metrics |= {"clip_low": bounds.low, "clip_high": bounds.high, "share": bounds.share}
        if bounds.share_at_start is not None and bounds.share_at_end is not None and bounds.stop is not None:
            metrics |= {
                "share_at_start": bounds.share_at_start,
                "share_at_end": bounds.share_at_end,
                "stop": bounds.stop,
            }
    if entropy is not None:
        entropy = zero_outside(tokens.mask, entropy.detach().to(tokens.logprobs.dtype))
        metrics |= entropy_statistics(tokens, entropy, result.retained)
    return metrics


def _check_options(
    objective: str, settings: ClipSettings | None, bounds: ClipBounds | None, options: dict[str, Any]
) -> None:
    """Options belong to the objective they are given for."""
    known = [name for name in inspect.signature(OBJECTIVES[objective]).parameters if name not in ("tokens", "bounds")]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{name}={options[name]!r} is not an option of objective={objective!r}, which takes: "
                f"{', '.join(known) or 'none'}."
            )
    for name, value in (("settings", settings), ("bounds", bounds)):
        if value is not None and objective != "bapo":
            raise ValueError(
                f"{name}= is used by objective='bapo' only, not by {objective!r}. Leave it out, or use the options of "
                f"{objective!r}: {', '.join(known) or 'none'}."
            )
