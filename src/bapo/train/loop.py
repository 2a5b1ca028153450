"""The synchronous loop: read this first.

    new problems join the parked ones; the engine loads the learner's weights and samples within its budget; finished
    groups are scored and enter the buffer; the learner takes one update per draw until the passes over them are done.

Nothing runs in parallel, so no part waits for another. Weights move in one place, `load_weights`, once per version that
samples. A token sampled at version v is trained on only at versions v .. v + max_staleness; then the buffer drops it.
A step is a pure function of (config, weights, state), so a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bapo.buffer import Buffer, NoBatch
from bapo.config.run import Config
from bapo.learn.learner import Learns, Update
from bapo.models import Policy
from bapo.rollout.engine import Engine
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.runs.ledger import Ledger
from bapo.screen.watch import Learned, Tell, Watching
from bapo.tasks.task import ProblemStream, Task
from bapo.train.job import ends_run
from bapo.train.scoring import Failing, Scored, response_metrics, score, unscored, with_given_up
from bapo.types import Group


@dataclass
class RunState:
    """Where a run stands, beyond what its parts remember themselves."""

    step: int = 0  # completed steps
    groups: int = 0  # groups admitted so far; the next one's id
    owed: int = 0  # groups without a signal (filtered, dropped) that no later step has made up for yet
    taken: int = 0  # asynchronous: groups that have come back and were given to a rollout, with rewards or without
    skipped: int = 0  # updates skipped in a row, up to the last one
    failing: Failing = field(default_factory=Failing)  # groups in a row on which the verifier failed altogether
    drift: str = ""  # how far sampler and learner were apart when they were first found to be, in words
    windows: list[int] = field(default_factory=list)  # asynchronous: groups admitted up to each open window


@dataclass
class Parts:
    """Everything a run is made of."""

    config: Config
    task: Task
    policy: Policy
    notes: list[str]
    """What a person should know about how the parts were made."""
    overlong: Callable[[int], float]
    """What the length of a response adds to its reward for learning; at most 0."""
    engine: Engine
    stream: ProblemStream
    scheduler: Scheduler
    buffer: Buffer
    learner: Learns
    ledger: Ledger = field(default_factory=Ledger)
    close: Callable[[], None] = lambda: None
    """Ends what was started for this run."""


@dataclass(frozen=True)
class StepRecord:
    """What happened in one step."""

    step: int
    rollout: dict[str, Any]
    updates: list[Update]
    samples: list[Group]
    scored: Scored
    timing: dict[str, float]


def take_step(parts: Parts, state: RunState, watching: Watching) -> StepRecord:
    """One rollout and the updates on it."""
    began = time.perf_counter()
    admitted = admit(parts, state)
    load_weights(parts)
    with watching("sampling") as tell:
        rollout = parts.scheduler.run(parts.engine, tell=tell)
    with watching("scoring") as tell:
        scored = score(rollout.groups, parts.task, parts.policy.decode, parts.overlong, tell)
    added = parts.buffer.add(scored.groups, version=parts.learner.version)
    for group, facts in unscored(rollout.groups, scored).items():
        parts.ledger.record("unscored", group, **facts)
    state.owed += len(added.filtered) + len(rollout.dropped) + len(rollout.groups) - len(scored.groups)
    sampled = time.perf_counter()
    with watching("learning") as tell:
        updates = list(learn(parts, state, tell))
    ended = time.perf_counter()
    state.step += 1
    return StepRecord(
        step=state.step,
        rollout={
            **response_metrics(rollout.groups, len(scored.failures), scored.judged, rollout.dropped),
            **{f"rollout/{name}": value for name, value in asdict(rollout.metrics).items()},
            **{f"buffer/{name}": value for name, value in asdict(parts.buffer.metrics()).items()},
            "rollout/admitted": admitted,
        },
        updates=updates,
        samples=rollout.groups[:1],
        scored=with_given_up(scored, rollout, parts.policy.decode),
        timing={
            "seconds": ended - began,
            "rollout_seconds": sampled - began,
            "learn_seconds": ended - sampled,
            "tokens_per_second": (rollout.metrics.sampled_tokens + sum(u.tokens for u in updates)) / (ended - began),
        },
    )


def load_weights(parts: Parts) -> None:
    """Load the learner's weights into the engine unless it has them. Every caller that samples calls this first."""
    if parts.engine.version != parts.learner.version:
        parts.engine.load(parts.learner.weights(), version=parts.learner.version)


def admit(parts: Parts, state: RunState, most: int = 2) -> int:
    """Admit new problems for this step, including those owed; fewer while `most` steps' worth are in progress."""
    config, opened = parts.config.rollout, parts.scheduler.conversations is None
    owed = min(state.owed, config.prompts)
    count = max(0, min(config.prompts + owed, most * config.prompts - len(parts.scheduler.in_progress)))
    for problem in parts.stream.draw(count):
        given = state.groups, problem, parts.policy.encode(problem.prompt)
        parts.scheduler.admit([new_group(*given, responses=config.responses, seed=parts.config.seed, opened=opened)])
        state.groups += 1
    state.owed = min(owed, config.prompts + owed - count)
    return count


def learn(parts: Parts, state: RunState, tell: Tell | None) -> Iterator[Update]:
    """Take the updates of all passes over the groups in the buffer, and yield each one, up to one that ends the run."""
    begun, updates, tokens, in_a_row = parts.buffer.metrics(), 0, 0, state.skipped
    while True:
        if tell is not None and begun.to_visit:
            tell(Learned(updates, parts.buffer.metrics().fresh - begun.fresh, begun.to_visit, tokens))
        if isinstance(groups := parts.buffer.draw(version=parts.learner.version), NoBatch):
            return
        update = parts.learner.step(groups)
        if update.skipped is not None:
            parts.buffer.skipped(groups)
        yield update
        updates, tokens, in_a_row = updates + 1, tokens + update.tokens, in_a_row + 1 if update.skipped else 0
        if ends_run(update, in_a_row=in_a_row, limit=parts.config.learn.skip_limit):
            return
