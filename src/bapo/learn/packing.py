"""Turns groups of responses, or demonstrations, into micro-batches of tensors.

Advantages, and the weights of a balanced loss, are computed here, once per update, within each group and over all of
its responses. Sequences are sorted by length, laid end to end and cut into micro-batches of at most `micro_tokens`
places: rows x longest for a forward pass that pads, the sum of the lengths for one that does not (see forward.py). The
result does not depend on where the cuts fall: bounds and denominators belong to the whole update.

Responses that the length limit cut off may be left out (`Truncated`). With mask, their rewards count in the advantages
of their group, and their tokens are not passed: there is no loss on them, and no denominator counts them. TRL's
mask_truncated_completions does the same where its mean is over tokens; a mean over responses still counts them there.
With drop, their rewards do not count either.

What an environment said is context: its tokens are passed, but they are not targets, and no denominator counts them. A
response with several contexts has a row for each; it counts as one response, with its sampled tokens together, in
advantages, weights and means, and its rows go to one micro-batch.

Several ranks are given the same groups and each takes a part of the sequences, longest first, so that all have about
equally many tokens. Every rank computes the same division.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from math import nan
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.core.advantages import ADVANTAGES, gdpo
from bapo.core.reduction import balanced_weights
from bapo.types import Group, Row, TokenBatch, Trajectory, Truncated

Demonstrated = tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[bool]]
"""Token ids of a prompt and of what follows it, and which of the latter to learn if not all."""
Part = tuple[int, int]
"""Which part of the sequences to take, of how many."""
ALL: Part = (0, 1)

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple, as separately allocated ones do, so kernels load them at full width."""


def pack(
    groups: Sequence[Group],
    *,
    estimator: str,
    weights: Sequence[float] = (),
    micro_tokens: int,
    device: torch.device,
    truncated: Truncated = "keep",
    kl_in_reward: float = 0.0,
    padded: bool = True,
    part: Part = ALL,
) -> list[TokenBatch]:
    """Micro-batches that together hold every response of the groups, or this part of them, longest sequences first.

    `weights`: of several rewards, for an estimator that adds them itself. `truncated`: what happens to responses that
    were cut off. `kl_in_reward`: what a reward loses for each nat that its response is likelier than under the
    reference. `padded`: whether the forward pass will pad, so that `micro_tokens` counts padding.
    """
    if not groups:
        return []
    compared = [(i, t) for i, group in enumerate(groups) for t in group.compared(truncated)]
    rewards = [t.learning_reward for _, t in compared]
    if any(reward is None for reward in rewards):
        raise ValueError("a response without a reward reached the learner. Score every group before you add it.")
    owners = torch.tensor([i for i, _ in compared])
    if estimator == "gdpo" and compared and compared[0][1].rewards:
        parts = [[nan if part is None else part for part in t.rewards.values()] for _, t in compared]
        advantages = gdpo(torch.tensor(parts, dtype=torch.float32), owners, weights=weights).advantages
    else:
        if kl_in_reward:
            rewards = [
                cast(float, reward) - kl_in_reward * t.reference_gap
                for reward, (_, t) in zip(rewards, compared, strict=True)
            ]
        advantages = ADVANTAGES[estimator](torch.tensor(rewards, dtype=torch.float32), owners).advantages
    trained = {id(t) for group in groups for t in group.trained(truncated)}
    lengths = torch.tensor([len(t.versions) if id(t) in trained else 0 for _, t in compared])
    balance = balanced_weights(advantages, lengths, owners)
    every = zip(compared, advantages.tolist(), balance.tolist(), strict=True)
    chosen = [(t, advantage, weight, groups[i].uses) for (i, t), advantage, weight in every if id(t) in trained]
    return [_batch(cut, device) for cut in _cut(_taken(chosen, part), micro_tokens, padded=padded)]


def pack_demonstrations(
    demonstrations: Iterable[Demonstrated],
    *,
    micro_tokens: int,
    device: torch.device,
    padded: bool = True,
    part: Part = ALL,
) -> list[TokenBatch]:
    """The same for responses that no policy sampled. All else about their tokens is zeros."""
    unsampled = [_unsampled(*demonstration) for demonstration in demonstrations]
    return pack_alone(unsampled, micro_tokens=micro_tokens, device=device, padded=padded, part=part)


def pack_alone(
    responses: Iterable[Trajectory], *, micro_tokens: int, device: torch.device, padded: bool = True, part: Part = ALL
) -> list[TokenBatch]:
    """The same for responses without advantages, which nothing is compared with."""
    chosen: list[Weighed] = [(response, 0.0, 0.0, 0) for response in responses]
    return [_batch(cut, device) for cut in _cut(_taken(chosen, part), micro_tokens, padded=padded)]


def pack_contexts(contexts: Sequence[Sequence[int]], *, device: torch.device) -> TokenBatch:
    """One micro-batch whose `predicts` are the last places of the contexts, in order. Its targets mean nothing."""
    return _batch([(_unsampled(context, [0]), 0.0, 0.0, 0) for context in contexts], device)


def empty_batch(device: torch.device) -> TokenBatch:
    """A micro-batch without response tokens, for a rank that has fewer than others. A pass needs at least one place."""
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return TokenBatch(
        input_ids=nothing.new_zeros(1),
        position_ids=nothing.new_zeros(1),
        offsets=torch.tensor([0, 1], dtype=torch.int32, device=device),
        longest=1,
        predicts=nothing,
        targets=nothing,
        sequence_ids=nothing,
        behavior_logprobs=nothing.float(),
        advantages=nothing.float(),
        versions=nothing,
        uses=nothing,
        loss_weights=nothing.float(),
    )


Weighed = tuple[Trajectory, float, float, int]  # a response, its advantage, the weight of its tokens and its uses


def _length(trajectory: Trajectory) -> int:
    return sum(map(len, trajectory.rows))


def _unsampled(prompt: Sequence[int], response: Sequence[int], own: Sequence[bool] = ()) -> Trajectory:
    count = sum(own) if own else len(response)
    nothing, version = [0.0] * count, [0] * count
    return Trajectory(list(prompt), 0, list(response), nothing, nothing, version, sampled=list(own))


def _taken(responses: list[Weighed], part: Part) -> list[Weighed]:
    """The responses of one part, longest first. Each goes to the part with the fewest tokens so far."""
    index, parts = part
    taken: list[list[Weighed]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for one in sorted(responses, key=lambda one: -_length(one[0])):  # stable: equal lengths keep the order of groups
        least = tokens.index(min(tokens))
        taken[least].append(one)
        tokens[least] += _length(one[0])
    return taken[index]


def _cut(responses: list[Weighed], micro_tokens: int, *, padded: bool) -> list[list[Weighed]]:
    """Cut them into consecutive parts whose places stay within the budget. A response above the budget goes alone."""
    parts: list[list[Weighed]] = []
    rows = longest = places = 0  # of the last part
    for one in responses:
        lengths = [len(row) for row in one[0].rows]
        rows, longest, places = rows + len(lengths), max(longest, *lengths), places + sum(lengths)
        if parts and (rows * longest if padded else places) <= micro_tokens:
            parts[-1].append(one)
        else:
            parts.append([one])
            rows, longest, places = len(lengths), max(lengths), sum(lengths)
    return parts


def _batch(responses: list[Weighed], device: torch.device) -> TokenBatch:
    trajectories = [trajectory for trajectory, *_ in responses]
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    lengths = np.array([len(row) for row in rows])
    counts = np.array([len(t.versions) for t in trajectories])  # sampled tokens of each
    ends = lengths.cumsum()
    starts = ends - lengths
    ids = chain.from_iterable(chain(row.context, row.tokens) for row in rows)
    integers = _ship(
        [
            np.fromiter(ids, np.int64, int(ends[-1])),
            _runs(np.zeros_like(starts), lengths),
            np.concatenate([[0], ends]),
            _predicting(rows, ends),
            np.fromiter(chain.from_iterable(t.own for t in trajectories), np.int64, int(counts.sum())),
            np.repeat((counts > 0).cumsum() - 1, counts),
            np.fromiter(chain.from_iterable(t.versions for t in trajectories), np.int64, int(counts.sum())),
            np.repeat(np.array([uses for *_, uses in responses], dtype=np.int64), counts),
        ],
        device,
    )
    input_ids, position_ids, offsets, predicts, targets, sequence_ids, versions, uses = integers
    referred = all(len(t.reference_logprobs) == len(t.versions) for t in trajectories)
    known = [t.reference_logprobs for t in trajectories] if referred else []
    truncated = any(t.log_kept for t in trajectories)
    kept = [t.log_kept or [0.0] * len(t.versions) for t in trajectories] if truncated else []
    behavior_logprobs, advantages, loss_weights, reference_logprobs, log_kept = _ship(
        [
            np.fromiter(chain.from_iterable(t.behavior_logprobs for t in trajectories), np.float32, int(counts.sum())),
            np.repeat(np.array([advantage for _, advantage, *_ in responses], dtype=np.float32), counts),
            np.repeat(np.array([weight for *_, weight, _ in responses], dtype=np.float32), counts),
            np.fromiter(chain.from_iterable(known), np.float32, int(counts.sum()) if referred else 0),
            np.fromiter(chain.from_iterable(kept), np.float32, int(counts.sum()) if truncated else 0),
        ],
        device,
    )
    return TokenBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        offsets=offsets.to(torch.int32),
        longest=int(lengths.max()),
        predicts=predicts,
        targets=targets,
        sequence_ids=sequence_ids,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        versions=versions,
        uses=uses,
        reference_logprobs=reference_logprobs if referred else None,
        loss_weights=loss_weights,
        log_kept=log_kept if truncated else None,
    )


def _predicting(rows: Sequence[Row], ends: NDArray[Any]) -> NDArray[Any]:
    """The places that predict sampled tokens. Token j of a row is predicted by start + context + j - 1."""
    counts = np.array([len(row.tokens) for row in rows])
    places = _runs(ends - counts - 1, counts)
    if not any(row.sampled for row in rows):
        return places
    sampled = chain.from_iterable(row.sampled or [True] * len(row.tokens) for row in rows)
    found: NDArray[Any] = places[np.fromiter(sampled, bool, len(places))]
    return found


def _runs(firsts: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    """first, first + 1, …: `count` numbers for each run, with the runs laid end to end."""
    before = counts.cumsum() - counts
    numbers: NDArray[Any] = np.arange(counts.sum()) + np.repeat(firsts - before, counts)
    return numbers


def _ship(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Move arrays of one type to the device, in one copy that the host does not wait for."""
    step = ALIGNMENT // arrays[0].itemsize
    rooms = [-(-len(array) // step) * step for array in arrays]
    begins = [sum(rooms[:i]) for i in range(len(rooms))]
    staging = torch.zeros(sum(rooms), dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for array, begin in zip(arrays, begins, strict=True):
        host[begin : begin + len(array)] = array
    shipped = staging.to(device, non_blocking=True)
    return [shipped[begin : begin + len(array)] for array, begin in zip(arrays, begins, strict=True)]
