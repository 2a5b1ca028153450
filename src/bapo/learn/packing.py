"""Groups of responses to micro-batches of tensors.

Advantages are compared within each group here, once per update, over all of its responses. Sequences are sorted by
length and cut into micro-batches of at most `micro_tokens` places, padding included, so that short ones share a forward
pass and no pass is mostly padding. The result does not depend on where the cuts fall: bounds and denominators belong to
the whole update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bapo.core.advantages import ADVANTAGES
from bapo.types import Group, TokenBatch, Trajectory


def pack(
    groups: Sequence[Group],
    *,
    estimator: str,
    micro_tokens: int,
    device: torch.device,
) -> list[TokenBatch]:
    """Micro-batches that together hold every response of the groups, longest sequences first."""
    rewards = [t.reward for group in groups for t in group.trajectories]
    if any(reward is None for reward in rewards):
        raise ValueError("a response without a reward reached the learner. Score every group before adding it.")
    owners = [i for i, group in enumerate(groups) for _ in group.trajectories]
    advantages = ADVANTAGES[estimator](torch.tensor(rewards, dtype=torch.float32), torch.tensor(owners)).advantages
    rows = list(zip((t for group in groups for t in group.trajectories), advantages.tolist(), strict=True))
    rows.sort(key=lambda row: -_length(row[0]))  # stable: equal lengths keep the order of the groups
    return [_batch(part, device) for part in _cut(rows, micro_tokens)]


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt) + len(trajectory.tokens)


Row = tuple[Trajectory, float]  # a response and its advantage


def _cut(rows: list[Row], micro_tokens: int) -> list[list[Row]]:
    """Consecutive rows while (rows x longest) stays within the budget; a row longer than the budget goes alone."""
    parts: list[list[Row]] = []
    for row in rows:
        fits = parts and (len(parts[-1]) + 1) * _length(parts[-1][0][0]) <= micro_tokens
        if fits:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _batch(rows: list[Row], device: torch.device) -> TokenBatch:
    width = max(_length(trajectory) for trajectory, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (trajectory, _) in enumerate(rows):
        start, end = len(trajectory.prompt), _length(trajectory)
        input_ids[i, :end] = torch.tensor(trajectory.prompt + trajectory.tokens)
        attention_mask[i, :end] = 1
        predicts[i, start - 1 : end - 1] = True
    lengths = torch.tensor([len(trajectory.tokens) for trajectory, _ in rows])

    def flat(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return TokenBatch(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        predicts=predicts.to(device),
        targets=flat([x for t, _ in rows for x in t.tokens], torch.int64),
        sequence_ids=torch.arange(len(rows)).repeat_interleave(lengths).to(device),
        behavior_logprobs=flat([x for t, _ in rows for x in t.behavior_logprobs], torch.float32),
        advantages=torch.tensor([advantage for _, advantage in rows]).repeat_interleave(lengths).to(device),
        versions=flat([x for t, _ in rows for x in t.versions], torch.int64),
    )
