"""The anchor check: on fresh tokens, the learner's log-probs must be those that the sampler recorded.

A token is fresh in an update if its version is the learner's: no update has been taken since it was sampled. The pass
of the update computes its log-prob anyway, so the comparison costs no pass. Every update with fresh tokens logs how far
the two are apart (`core/anchor.py` defines the gap). What follows depends on the mean over its fresh tokens:

    at most what rounding explains      nothing, unless the gaps have a signature that rounding never has
    above it                            the run says so, once, with the likely cause
    above `learn.anchor_limit`          the update is not taken and the run ends: its ratios mean nothing

Responses that go on with keys and values of older weights (`offpolicy.partial_cache = "keep"`) were not sampled from
any one version, so only those count that this version sampled from their first token on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from bapo.core.anchor import FEWEST, MANY, SHARP, Pairs, likely_cause, positions_of
from bapo.types import TokenBatch

EXPLAINED = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The mean gap that rounding explains, in nats.

Measured between engines and learner: float32 up to 9e-5 at a single token; bfloat16 in the mean up to 0.09 for 1.5B
large random weights, and about 0.01 for trained ones. float16 has three more bits."""
LOOK = 0.1
"""From this part of what rounding explains on, gaps are looked at for a signature that rounding never has."""


@dataclass(frozen=True)
class Drift:
    """Sampler and learner do not mean the same policy."""

    words: str
    """How far they are apart, and the likely cause, as sentences."""
    refused: bool
    """Whether the update must not be taken."""
    tokens: dict[str, Tensor]
    """The update's tokens on all ranks, as the columns of a dump that `bapo diagnose` reads."""


def fresh_tokens(batches: Sequence[TokenBatch], *, version: int, kept_caches: bool) -> Tensor:  # [tokens] bool
    """Which tokens of these micro-batches the learner's present weights sampled."""
    return torch.cat([_fresh(b.versions, b.sequence_ids, version=version, kept_caches=kept_caches) for b in batches])


def _fresh(versions: Tensor, sequence_ids: Tensor, *, version: int, kept_caches: bool) -> Tensor:
    fresh = versions == version
    if kept_caches and len(versions):
        oldest = torch.full_like(versions, version).scatter_reduce(0, sequence_ids, versions, "amin")
        fresh &= oldest[sequence_ids] == version
    return fresh


def anchor_metrics(behavior_logprobs: Tensor, logprobs: Tensor, fresh: Tensor) -> dict[str, Tensor]:
    """0-d metrics over the fresh tokens. Without any they are NaN, and `without_nothing` leaves them out."""
    gaps = torch.where(fresh, behavior_logprobs.double() - logprobs.double(), 0.0)
    count = fresh.sum()
    return {
        "anchor_tokens": count,
        "anchor_gap": gaps.abs().sum() / count,
        "anchor_gap_max": gaps.abs().max(),
        "anchor_bias": gaps.sum() / count,
    }


def without_nothing(metrics: dict[str, float | list[float]]) -> dict[str, float | list[float]]:
    """The same metrics, without those of fresh tokens if there were none."""
    if metrics["anchor_tokens"]:
        return metrics
    return {name: value for name, value in metrics.items() if not name.startswith("anchor_")}


def worth_a_look(metrics: Mapping[str, float | list[float]], dtype: torch.dtype, limit: float) -> bool:
    """Whether the gaps of an update are so large that they may have a cause."""
    if cast(float, metrics.get("anchor_tokens", 0)) < FEWEST:
        return False
    return cast(float, metrics["anchor_gap"]) > min(LOOK * EXPLAINED[dtype], limit)


def drift(
    tokens: dict[str, Tensor],  # all tokens of the update, as `finite.logged_tokens` gives them
    metrics: Mapping[str, float | list[float]],
    *,
    version: int,
    dtype: torch.dtype,
    kept_caches: bool,
    limit: float,
    before: float | None,
) -> Drift | None:
    """What to say about an update whose gaps are worth a look. `before`: the gap of the run's first comparison."""
    fresh = _fresh(tokens["versions"], tokens["sequence_ids"], version=version, kept_caches=kept_caches)
    pairs = Pairs(
        tokens["behavior_logprobs"][fresh],
        tokens["logprobs"][fresh],
        tokens["entropy"][fresh],
        positions_of(tokens["sequence_ids"])[fresh],
        tokens["targets"][fresh],
    )
    noise = EXPLAINED[dtype]
    cause = likely_cause(pairs, noise=noise, before=before)
    gap, most = cast(float, metrics["anchor_gap"]), cast(float, metrics["anchor_gap_max"])
    if gap <= min(noise, limit) and (cause.name not in SHARP or len(pairs.gaps) < MANY):
        return None
    words = (
        f"on {len(pairs.gaps)} fresh tokens, the sampler's log-probs and the learner's are {gap:.2g} nats apart in the "
        f"mean ({most:.2g} at most, {cast(float, metrics['anchor_bias']):+.2g} with signs), where rounding in "
        f"{str(dtype).removeprefix('torch.')} explains {noise:g}. Likely cause: {cause.name}; {cause.words}"
    )
    return Drift(words, gap > limit, tokens)
