"""The metrics of an update: what the clip did to its tokens.

They are those of all its tokens, so every rank first gets the results of all ranks' micro-batches. Every number travels
as a float64, which holds log-probs, versions and counts exactly. All ranks have equally many micro-batches
(`Learner.filled_up`), but different numbers of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds
from bapo.core.brake import drift_of, drift_sums
from bapo.core.entropy_rule import ratio_profile, staleness_histogram, update_statistics, use_profile
from bapo.core.loss import PolicyLoss, weigh_negatives
from bapo.core.reduction import sequence_lengths, sequence_sums
from bapo.core.tokens import Tokens
from bapo.learn.health import anchor_metrics, fresh_tokens
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import empty_batch
from bapo.learn.ranks import Ranks, columns_of_all, from_all, highest, summed
from bapo.learn.terms import k3
from bapo.types import Metrics, TokenBatch

SEARCH = ("clip_low", "clip_high", "share_at_start", "share_at_end", "stop", "negative_weight", "used_low")
"""Metrics of the bounds that the diagnostics do not recompute."""
STALENESS_BINS = 16
"""How many ages have their own bin in the staleness histogram. Older tokens share the last bin."""
BATCH = ("behavior_logprobs", "advantages", "versions", "uses", "targets", "sequence_ids")
"""The fields of a batch that metrics are made from."""


@dataclass(frozen=True)
class Output:
    """The results of one micro-batch."""

    batch: TokenBatch
    logprobs: Tensor
    entropy: Tensor
    result: PolicyLoss


def update_metrics(
    outputs: Sequence[Output],
    settings: LearnerSettings,  # of this update
    asked: LearnerSettings,  # of the learner: with a brake, these can be others
    *,
    version: int,
    shared: dict[str, Tensor],
) -> Metrics:
    """Diagnostics over the tokens of the whole update and what ranks share, read from the device in one transfer."""
    batches = [output.batch for output in outputs]
    every = torch.ones(sum(len(batch.targets) for batch in batches), dtype=torch.bool, device=batches[0].targets.device)
    tokens = Tokens(
        torch.cat([output.logprobs for output in outputs]),
        torch.cat([batch.behavior_logprobs for batch in batches]),
        torch.cat([batch.advantages for batch in batches]),
        every,
        uses=torch.cat([batch.uses for batch in batches]),
    )
    sampler_logprobs = torch.cat([batch.sampler_logprobs for batch in batches])
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
        bounds=bounds and _named(bounds, scalars),
        entropy=entropy,
        trained=_trained_on(tokens, outputs, settings),
    )
    if asked.has_brake:
        looked_at = tokens.negative & tokens.within
        if asked.clip.brake_on == "used":
            looked_at &= cast(Tensor, tokens.uses).bool()
        scalars["drift"] = drift_of(drift_sums(tokens.logprobs, sampler_logprobs, looked_at))
        scalars["looked_at"] = looked_at.sum()
        if "used_low" in settings.options:
            scalars["used_low"] = torch.tensor(settings.options["used_low"], dtype=torch.float64, device=every.device)
    scalars |= {"staleness_mean": ages.mean(), "staleness_max": ages.max()}
    fresh = fresh_tokens(batches, version=version, kept_caches=settings.kept_caches)
    scalars |= anchor_metrics(sampler_logprobs, tokens.logprobs, fresh)
    if settings.refers:
        references = torch.cat([cast(Tensor, batch.reference_logprobs) for batch in batches])
        scalars["kl_reference"] = k3(tokens.logprobs, references).double().mean()
    vectors = {
        "staleness_histogram": staleness_histogram(versions, every, version=version, bins=STALENESS_BINS),
        **ratio_profile(tokens, entropy),
        **use_profile(tokens, retained),
    }
    numbers = _read(scalars | shared, vectors)
    if not numbers.pop("looked_at", 1.0):  # nothing to measure, and no token that the bound acts on
        numbers = {name: value for name, value in numbers.items() if name not in ("drift", "used_low")}
    if not numbers["anchor_tokens"]:
        numbers = {name: value for name, value in numbers.items() if not name.startswith("anchor_")}
    return numbers | {"tokens": float(len(every)), "grad_norm": numbers.pop("grad_norm")}


def _named(bounds: ClipBounds, found: dict[str, Tensor]) -> ClipBounds:
    """The bounds as metrics name them: with several pairs in an update, their means."""
    used_low = found.get("used_low", bounds.used_low)
    return replace(bounds, low=found["clip_low"], high=found["clip_high"], used_low=used_low)


def _read(scalars: dict[str, Tensor], vectors: dict[str, Tensor]) -> Metrics:
    """Convert all tensors to numbers with one read of the device. float64 holds every value exactly, even counts."""
    stacked = torch.stack([value.double() for value in scalars.values()])
    values = torch.cat([*(vector.double() for vector in vectors.values()), stacked]).tolist()
    numbers: Metrics = {}
    for name, vector in vectors.items():
        head, values = values[: len(vector)], values[len(vector) :]
        numbers[name] = [int(count) for count in head] if name.endswith("_histogram") else head
    return numbers | dict(zip(scalars, values, strict=True))


def _searched(outputs: Sequence[Output], settings: LearnerSettings) -> dict[str, Tensor]:
    """What the search for the bounds found: one answer for the update, or the mean over its micro-batches."""
    first = outputs[0].result.metrics
    names = SEARCH if settings.solves_bounds and settings.clip.depends_on_tokens else SEARCH[:2]  # one pair: no search
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


def of_all_ranks(outputs: Sequence[Output], ranks: Ranks) -> list[Output]:
    """One output per micro-batch of each rank, in the order of ranks. Of their batches, only what metrics need."""
    if ranks is None:
        return list(outputs)
    device = outputs[0].logprobs.device
    counts = from_all(torch.tensor([len(output.logprobs) for output in outputs], device=device), ranks)
    tokens_of = [rank.tolist() for rank in counts]
    searched = [name for name in SEARCH if name in outputs[0].result.metrics]
    losses_and_found = [
        torch.stack([x.detach().double() for x in (o.result.loss, *(o.result.metrics[name] for name in searched))])
        for o in outputs
    ]
    scalars = from_all(torch.stack(losses_and_found), ranks)
    mine = torch.cat([_columns(output) for output in outputs], dim=1)
    columns = columns_of_all(mine, ranks, [sum(lengths) for lengths in tokens_of])
    return [
        _output(outputs[0], part, numbers, searched)
        for rank, lengths in enumerate(tokens_of)
        for part, numbers in zip(torch.split(columns[rank], lengths, dim=1), scalars[rank], strict=True)
    ]


def _columns(output: Output) -> Tensor:  # [columns, tokens]
    fields = [*(getattr(output.batch, name) for name in BATCH), output.batch.log_masses]
    return torch.stack([x.double() for x in (output.logprobs, output.entropy, output.result.retained, *fields)])


def _output(like: Output, columns: Tensor, scalars: Tensor, searched: Sequence[str]) -> Output:
    """An output made of what travelled, with the types of another one."""
    logprobs, entropy, retained, *fields, log_kept = columns
    typed = {name: x.to(getattr(like.batch, name).dtype) for name, x in zip(BATCH, fields, strict=True)}
    loss, *found = scalars
    own = like.result.metrics
    metrics = {name: x.to(own[name].dtype) for name, x in zip(searched, found, strict=True)}
    bounds = like.result.bounds
    if bounds is not None:  # the settings in it are the same on all ranks; what was found is in the metrics
        bounds = replace(bounds, negative_weight=metrics.get("negative_weight"))
    return Output(
        batch=replace(empty_batch(columns.device), **typed, log_kept=log_kept.float()),
        logprobs=logprobs.to(like.logprobs.dtype),
        entropy=entropy.to(like.entropy.dtype),
        result=PolicyLoss(loss.to(like.result.loss.dtype), bounds, metrics, retained.bool()),
    )


def response_ess(outputs: Sequence[Output], ranks: Ranks) -> Tensor:  # 0-d float64
    """The effective sample size of an update's responses as a share of their number, the same on all ranks.

        w_i = prod_t r_it,   ESS / n = (sum_i w_i)^2 / (n sum_i w_i^2)   over the n responses of the update

    It is 1 where the data are fresh, and near 1 / n where one response outweighs all others. VCPO (arXiv:2602.17616)
    takes it as a sign that the gradient is noise and makes the step smaller (`ess_factor`). The metric `ess` is
    another number: it is over tokens.

    A common factor of the weights cancels. Divided by the largest of them, no long response overflows or vanishes.
    """
    log_weights = torch.cat([_log_weights(output) for output in outputs])
    weights = (log_weights - highest(log_weights, ranks)).exp()
    present = (log_weights > -torch.inf).double()
    sums = summed(torch.stack([weights.sum(), (weights**2).sum(), present.sum()]), ranks)
    return sums[0] ** 2 / (sums[1] * sums[2])


def _log_weights(output: Output) -> Tensor:  # [places for sequences] float64
    """log w of each response; minus infinity where there is none."""
    batch = output.batch
    every = torch.ones_like(batch.targets, dtype=torch.bool)
    log_ratio = output.logprobs.double() - batch.behavior_logprobs.double()
    present = sequence_lengths(every, batch.sequence_ids) > 0
    return torch.where(present, sequence_sums(log_ratio, every, batch.sequence_ids), -torch.inf)
