"""The synchronous loop: read this first.

    new problems join the parked ones; the engine samples within its budget; finished groups are scored and enter the
    buffer; the learner takes one update per draw until the passes over this rollout are done.

Nothing runs at the same time, so nobody waits for anybody, and the weights the engine samples with are the learner's
own. A token sampled at version v is trained on at versions v .. v + max_staleness only: the buffer refuses it later.

A step is a pure function of (config, weights, state): every random number comes from a seed and a counter, so a resumed
run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bapo.buffer import Buffer
from bapo.config import Config
from bapo.learn.learner import Learner, Update
from bapo.learn.packing import pack
from bapo.rollout.engine import Engine
from bapo.rollout.scheduler import Rollout, Scheduler, new_group
from bapo.tasks.stream import ProblemStream
from bapo.tasks.task import Task
from bapo.types import Group, Status


@dataclass
class Progress:
    """Where a run stands, beyond what its parts remember themselves."""

    step: int = 0  # steps completed
    groups: int = 0  # groups admitted so far; the next one's id
    owed: int = 0  # groups of the last step that taught nothing (filtered, dropped): made up for in the next


@dataclass
class Parts:
    """Everything a run is made of."""

    config: Config
    task: Task
    tokenizer: Any
    engine: Engine
    stream: ProblemStream
    scheduler: Scheduler
    buffer: Buffer
    learner: Learner


@dataclass(frozen=True)
class StepRecord:
    """What one step has to tell."""

    step: int
    rollout: dict[str, Any]
    updates: list[Update]
    samples: list[Group]
    timing: dict[str, float]


def train(parts: Parts, progress: Progress, *, after_step: Callable[[StepRecord], bool]) -> None:
    """Steps until the configured number is done, or until `after_step` returns True."""
    for step in range(progress.step, parts.config.steps):
        record = take_step(parts, progress, step)
        progress.step = step + 1
        if after_step(record):
            return


def take_step(parts: Parts, progress: Progress, step: int) -> StepRecord:
    """One rollout and the updates on it."""
    began = time.perf_counter()
    admitted = admit(parts, progress)
    rollout = parts.scheduler.run(parts.engine, version=parts.learner.version)
    score(rollout.groups, parts)
    filtered_before = parts.buffer.metrics().filtered
    parts.buffer.add(rollout.groups, version=parts.learner.version)
    progress.owed = parts.buffer.metrics().filtered - filtered_before + len(rollout.dropped)
    sampled = time.perf_counter()

    updates = []
    while groups := parts.buffer.draw(version=parts.learner.version):
        updates.append(update_on(groups, parts))
    ended = time.perf_counter()
    tokens = rollout.metrics.sampled_tokens + sum(update.tokens for update in updates)
    return StepRecord(
        step=step + 1,
        rollout=rollout_metrics(rollout, parts) | {"rollout/admitted": admitted},
        updates=updates,
        samples=rollout.groups[:1],
        timing={
            "seconds": ended - began,
            "rollout_seconds": sampled - began,
            "learn_seconds": ended - sampled,
            "tokens_per_second": tokens / (ended - began),
        },
    )


def admit(parts: Parts, progress: Progress) -> int:
    """New problems for this step, those owed included; fewer while partial rollout still has many in progress."""
    config = parts.config.rollout
    room = 2 * config.prompts - parts.scheduler.in_progress
    count = max(0, min(config.prompts + min(progress.owed, config.prompts), room))
    for problem in parts.stream.draw(count):
        prompt_ids = parts.tokenizer.encode(problem.prompt)
        group = new_group(progress.groups, problem, prompt_ids, responses=config.responses, seed=parts.config.seed)
        parts.scheduler.admit([group])
        progress.groups += 1
    return count


def score(groups: Sequence[Group], parts: Parts) -> None:
    """Give every finished response its reward, from its text without the stop token."""
    for group in groups:
        for trajectory in group.trajectories:
            stopped = trajectory.status is Status.STOPPED
            text = parts.tokenizer.decode(trajectory.tokens[:-1] if stopped else trajectory.tokens)
            trajectory.reward = parts.task.score(group.problem, text)


def update_on(groups: Sequence[Group], parts: Parts) -> Update:
    """One update on these groups."""
    config, learner = parts.config.learn, parts.learner
    options: dict[str, Any] = {"micro_tokens": config.micro_tokens, "device": learner.device, "padded": learner.padded}
    update = learner.step(pack(groups, estimator=config.advantages, **options))
    return replace(update, metrics=update.metrics | {"groups": float(len(groups))})


def rollout_metrics(rollout: Rollout, parts: Parts) -> dict[str, Any]:
    """Rewards and lengths of the finished responses, and the counts of scheduler and buffer."""
    responses = [t for group in rollout.groups for t in group.trajectories]
    right = [len(t.tokens) for t in responses if (t.reward or 0.0) > 0.5]
    wrong = [len(t.tokens) for t in responses if (t.reward or 0.0) <= 0.5]
    means: dict[str, list[float]] = {
        "reward": [t.reward or 0.0 for t in responses],
        "length": [*right, *wrong],
        "length_correct": [*right],
        "length_wrong": [*wrong],
        "truncated": [float(t.status is Status.TRUNCATED) for t in responses],
    }
    return {
        **{name: sum(values) / len(values) for name, values in means.items() if values},
        **{f"rollout/{name}": value for name, value in asdict(rollout.metrics).items()},
        **{f"buffer/{name}": value for name, value in asdict(parts.buffer.metrics()).items()},
    }
