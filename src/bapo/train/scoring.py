"""Rewards for finished responses, and the metrics of a rollout.

A verifier may fail: it may run out of time or memory, crash, or raise. Then the response has no reward, which is
different from a reward of 0: it leaves its group, is logged with the cause and is never trained on. A group with fewer
than two responses left has nothing to compare and is left out as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bapo.tasks.task import Task
from bapo.types import Group, Status, Trajectory


@dataclass(frozen=True)
class Failure:
    """A response without a reward."""

    group: int
    problem: str
    response: str
    cause: str


@dataclass(frozen=True)
class Scored:
    """Groups with rewards, and the responses without one."""

    groups: list[Group]
    failures: list[Failure]


def score(
    groups: Sequence[Group],  # finished
    task: Task,
    decode: Callable[[list[int]], str],
    overlong: Callable[[int], float],  # length in tokens -> what it adds to the reward for learning; at most 0
) -> Scored:
    """Score every response by its text without the stop token."""
    asked = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    texts = [decode(_without_stop(trajectory)) for _, trajectory in asked]
    scores = task.scores([(group.problem, text) for (group, _), text in zip(asked, texts, strict=True)])
    failures = []
    for (group, trajectory), text, result in zip(asked, texts, scores, strict=True):
        trajectory.reward = result.reward
        trajectory.shaping = overlong(len(trajectory.tokens))
        if result.reward is None:
            failures.append(Failure(group.id, group.problem.id, text, result.failure))
    return Scored([whole for group in groups if (whole := _rewarded(group))], failures)


def unscored(groups: Sequence[Group], scored: Scored) -> list[Group]:
    """The groups that were left out because too few of their responses have a reward."""
    kept = {group.id for group in scored.groups}
    return [group for group in groups if group.id not in kept]


def _without_stop(trajectory: Trajectory) -> list[int]:
    return trajectory.tokens[:-1] if trajectory.status is Status.STOPPED else trajectory.tokens


def _rewarded(group: Group) -> Group | None:
    """The group with only those responses that have a reward; None if they are too few to compare."""
    left = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
    if len(left) == len(group.trajectories):
        return group
    return replace(group, trajectories=left) if len(left) > 1 else None


def response_metrics(groups: Sequence[Group], failures: int) -> dict[str, Any]:
    """Rewards and lengths of the finished responses. A mean over no responses has no key."""
    responses = [t for group in groups for t in group.trajectories if t.reward is not None]
    right = [len(t.tokens) for t in responses if t.reward is not None and t.reward > 0.5]
    wrong = [len(t.tokens) for t in responses if t.reward is not None and t.reward <= 0.5]
    means: dict[str, list[float]] = {
        "reward": [t.reward for t in responses if t.reward is not None],
        "length": [*right, *wrong],
        "length_correct": [*right],
        "length_wrong": [*wrong],
        "truncated": [float(t.status is Status.TRUNCATED) for t in responses],
    }
    return {name: sum(values) / len(values) for name, values in means.items() if values} | {"reward_failures": failures}
