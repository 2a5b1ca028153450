"""The metrics of an update: what the clip did to its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds
from bapo.core.entropy_rule import ratio_profile, staleness_histogram, update_statistics, use_profile
from bapo.core.kl import k3
from bapo.core.loss import PolicyLoss, clean_tokens, weigh_negatives
from bapo.core.objectives import Tokens
from bapo.learn.anchor import anchor_metrics, fresh_tokens, without_nothing
from bapo.learn.settings import LearnerSettings
from bapo.types import TokenBatch

SEARCH = ("clip_low", "clip_high", "share_at_start", "share_at_end", "stop", "negative_weight")
"""Metrics of the bounds that the diagnostics do not recompute."""


@dataclass(frozen=True)
class Output:
    """The results of one micro-batch."""

    batch: TokenBatch
    logprobs: Tensor
    entropy: Tensor
    result: PolicyLoss


def update_metrics(
    outputs: Sequence[Output], settings: LearnerSettings, *, version: int, shared: dict[str, Tensor]
) -> dict[str, float | list[float]]:
    """Diagnostics over the tokens of the whole update and what ranks share, read from the device in one transfer."""
    batches = [output.batch for output in outputs]
    every = torch.ones(sum(len(batch.targets) for batch in batches), dtype=torch.bool, device=batches[0].targets.device)
    tokens = clean_tokens(
        torch.cat([output.logprobs for output in outputs]),
        torch.cat([batch.behavior_logprobs for batch in batches]),
        torch.cat([batch.advantages for batch in batches]),
        every,
        uses=torch.cat([batch.uses for batch in batches]),
    )
    retained = torch.cat([output.result.retained for output in outputs])
    entropy = torch.cat([output.entropy for output in outputs])
    bounds = outputs[0].result.bounds
    versions = torch.cat([batch.versions for batch in batches])
    ages = (version - versions).double()
    scalars: dict[str, Tensor] = {"loss": torch.stack([output.result.loss.detach() for output in outputs]).sum()}
    scalars |= _searched(outputs, settings)
    scalars |= update_statistics(
        tokens,
        retained,
        settings=settings.clip,
        bounds=bounds and replace(bounds, low=scalars["clip_low"], high=scalars["clip_high"]),
        entropy=entropy,
        trained=_trained_on(tokens, outputs, settings),
    )
    scalars |= {"staleness_mean": ages.mean(), "staleness_max": ages.max()}
    fresh = fresh_tokens(batches, version=version, kept_caches=settings.kept_caches)
    scalars |= anchor_metrics(tokens.behavior_logprobs, tokens.logprobs, fresh)
    if settings.kl:
        references = torch.cat([cast(Tensor, batch.reference_logprobs) for batch in batches])
        scalars["kl_reference"] = k3(tokens.logprobs, references).double().mean()
    vectors = {
        "staleness_histogram": staleness_histogram(versions, every, version=version, bins=settings.staleness_bins),
        **ratio_profile(tokens, entropy),
        **use_profile(tokens, retained),
    }
    numbers = without_nothing(_read(scalars | shared, vectors))
    return numbers | {"tokens": float(len(every)), "grad_norm": numbers.pop("grad_norm")}


def _read(scalars: dict[str, Tensor], vectors: dict[str, Tensor]) -> dict[str, float | list[float]]:
    """Convert all tensors to numbers with one read of the device. float64 holds every value exactly, even counts."""
    stacked = torch.stack([value.double() for value in scalars.values()])
    values = torch.cat([*(vector.double() for vector in vectors.values()), stacked]).tolist()
    numbers: dict[str, float | list[float]] = {}
    for name, vector in vectors.items():
        head, values = values[: len(vector)], values[len(vector) :]
        numbers[name] = [int(count) for count in head] if name.endswith("_histogram") else head
    return numbers | dict(zip(scalars, values, strict=True))


def _searched(outputs: Sequence[Output], settings: LearnerSettings) -> dict[str, Tensor]:
    """What the search for the bounds found: one answer for the update, or the mean over its micro-batches."""
    first = outputs[0].result.metrics
    names = SEARCH if settings.clip.depends_on_tokens else SEARCH[:2]  # a single pair is not searched for
    found = {name: first[name] for name in names if name in first}
    if settings.solves_bounds and settings.scope == "microbatch" and len(outputs) > 1:
        found.pop("stop", None)  # each micro-batch has its own reason
        return {n: torch.stack([o.result.metrics[n] for o in outputs]).double().mean() for n in found}
    return found


def _trained_on(tokens: Tokens, outputs: Sequence[Output], settings: LearnerSettings) -> Tokens | None:
    """The tokens with the advantages that the loss used; None if the loss used the advantages unchanged."""
    if not settings.solves_bounds or settings.clip.remainder == "leave":
        return None
    weights = [cast(ClipBounds, output.result.bounds).negative_weight for output in outputs]
    spread = [cast(Tensor, w).expand(len(o.batch.targets)) for w, o in zip(weights, outputs, strict=True)]
    return weigh_negatives(tokens, torch.cat(spread))
