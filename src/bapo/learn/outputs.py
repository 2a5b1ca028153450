"""The results of all ranks' micro-batches, on every rank: metrics of an update are those of all its tokens.

Every number travels as a float64, which holds log-probs, versions and counts exactly. Ranks have different numbers of
tokens, so each is filled up to the one with the most. All have equally many micro-batches (`Learner.filled_up`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bapo.core.loss import PolicyLoss
from bapo.learn.diagnostics import SEARCH, Output
from bapo.learn.packing import empty_batch
from bapo.learn.ranks import Ranks, from_all

BATCH = ("behavior_logprobs", "advantages", "versions", "uses", "targets", "sequence_ids")
"""The fields of a batch that metrics are made from."""


def of_all_ranks(outputs: Sequence[Output], ranks: Ranks) -> list[Output]:
    """One output per micro-batch of each rank, in the order of ranks. Of their batches, only what metrics need."""
    if ranks is None:
        return list(outputs)
    device = outputs[0].logprobs.device
    counts = from_all(torch.tensor([len(output.logprobs) for output in outputs], device=device), ranks)
    tokens_of = [rank.tolist() for rank in counts]
    searched = [name for name in SEARCH if name in outputs[0].result.metrics]
    scalars = from_all(torch.stack([_scalars(output, searched) for output in outputs]), ranks)
    mine = torch.cat([_columns(output) for output in outputs], dim=1)
    room = mine.new_zeros(len(mine), max(map(sum, tokens_of)))
    room[:, : mine.shape[1]] = mine
    columns = from_all(room, ranks)
    return [
        _output(outputs[0], part, numbers, searched)
        for rank, lengths in enumerate(tokens_of)
        for part, numbers in zip(
            torch.split(columns[rank][:, : sum(lengths)], lengths, dim=1), scalars[rank], strict=True
        )
    ]


def _scalars(output: Output, searched: Sequence[str]) -> Tensor:
    result = output.result
    return torch.stack([result.loss.detach().double(), *(result.metrics[name].double() for name in searched)])


def _columns(output: Output) -> Tensor:  # [columns, tokens]
    fields = [getattr(output.batch, name) for name in BATCH]
    return torch.stack([x.double() for x in (output.logprobs, output.entropy, output.result.retained, *fields)])


def _output(like: Output, columns: Tensor, scalars: Tensor, searched: Sequence[str]) -> Output:
    """What `_columns` and `_scalars` wrote, with the types of another output."""
    logprobs, entropy, retained, *fields = columns
    typed = {name: x.to(getattr(like.batch, name).dtype) for name, x in zip(BATCH, fields, strict=True)}
    loss, *found = scalars
    own = like.result.metrics
    metrics = {name: x.to(own[name].dtype) for name, x in zip(searched, found, strict=True)}
    bounds = like.result.bounds
    if bounds is not None:  # the settings in it are the same on all ranks; what was found is in the metrics
        bounds = replace(bounds, negative_weight=metrics.get("negative_weight"))
    return Output(
        batch=replace(empty_batch(columns.device), **typed),
        logprobs=logprobs.to(like.logprobs.dtype),
        entropy=entropy.to(like.entropy.dtype),
        result=PolicyLoss(loss.to(like.result.loss.dtype), bounds, metrics, retained.bool()),
    )
