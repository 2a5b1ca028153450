"""The synchronous loop: read this first.

    new problems join the parked ones; the engine loads the learner's weights and samples within its budget; finished
    groups are scored and enter the buffer; the learner takes one update per draw until the passes over them are done.

Nothing runs in parallel, so no part waits for another; on a cluster, `cluster/loop.py` takes the place of `Loop`.
Weights move in one place, `load_weights`, once per version that samples. A token sampled at version v is trained on
only at versions v .. v + max_staleness; then the buffer drops it.
A step is a pure function of (config, weights, state), so a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bapo.buffer import Buffer, NoBatch
from bapo.config.run import Config
from bapo.learn.learner import Learns, Update
from bapo.models import Policy
from bapo.process.stops import StopAsked
from bapo.rollout.engine import Engine
from bapo.rollout.scheduler import Scheduler, SchedulerMetrics, new_group
from bapo.runs.ledger import Ledger
from bapo.screen.view import View
from bapo.screen.watch import Learned, Tell
from bapo.tasks.task import ProblemStream, Task
from bapo.train.job import count_skipped, ends_run
from bapo.train.scoring import Failing, Scored, response_metrics, score, unscored
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


class Loop:
    """One run of this loop: its parts, and where it stands."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts, self.state = parts, state

    def take_step(self, view: View) -> StepRecord:
        """One rollout and the updates on it. If it raises StopAsked, the step was undone."""
        parts, state = self.parts, self.state
        began, undo = time.perf_counter(), bookmark(parts, state)
        admitted = admit(parts, state)
        load_weights(parts)
        with view.doing("sampling") as tell:
            rollout = parts.scheduler.run(parts.engine, tell=tell)
        try:
            with view.doing("scoring") as tell:
                scored = score(rollout.groups, parts.task, parts.policy.decode, parts.overlong, tell)
        except StopAsked:
            undo()
            raise
        added = parts.buffer.add(scored.groups, version=parts.learner.version)
        for group in unscored(rollout.groups, scored):
            parts.ledger.record("unscored", group.id)
        state.owed += len(added.filtered) + len(rollout.dropped) + len(rollout.groups) - len(scored.groups)
        sampled = time.perf_counter()
        with view.doing("learning") as tell:
            updates = list(learn(parts, state, tell))
        times = (began, sampled, time.perf_counter())
        return recorded(parts, state, rollout.groups, scored, rollout.metrics, admitted, updates, times)

    def watched(self, view: View, run: Path) -> None:
        """From now on, show there what happens elsewhere: nothing."""

    def pause(self) -> None:
        """Let the engine do something else: it is idle between steps."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside parts and state, as plain JSON data."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""

    def close(self) -> None:
        """End what the loop has started."""


def bookmark(parts: Parts, state: RunState) -> Callable[[], None]:
    """What takes a run back to where it is now, from a step whose rollout has not come to the buffer yet."""
    kept, cursor, back = replace(state, windows=list(state.windows)), parts.stream.cursor, parts.scheduler.bookmark()

    def undo() -> None:
        vars(state).update(vars(kept))
        parts.stream.cursor = cursor
        back()
        parts.ledger.take()

    return undo


def recorded(
    parts: Parts,
    state: RunState,
    groups: list[Group],
    scored: Scored,
    sampled: SchedulerMetrics,
    admitted: int,
    updates: list[Update],
    times: tuple[float, float, float],  # when the step began, its updates began and they ended
) -> StepRecord:
    """Count a step whose updates are taken, and record it."""
    began, rolled, ended = times
    state.step += 1
    return StepRecord(
        step=state.step,
        rollout={
            **response_metrics(groups, failures=len(scored.failures), judged=scored.judged),
            **{f"rollout/{name}": value for name, value in asdict(sampled).items()},
            **{f"buffer/{name}": value for name, value in asdict(parts.buffer.metrics()).items()},
            "rollout/admitted": admitted,
        },
        updates=updates,
        samples=groups[:1],
        scored=scored,
        timing={
            "seconds": ended - began,
            "rollout_seconds": rolled - began,
            "learn_seconds": ended - rolled,
            "tokens_per_second": (sampled.sampled_tokens + sum(u.tokens for u in updates)) / (ended - began),
        },
    )


def load_weights(parts: Parts) -> None:
    """Load the learner's weights into the engine unless it has them. Every caller that samples calls this first."""
    if parts.engine.version != parts.learner.version:
        parts.engine.load(parts.learner.weights(), version=parts.learner.version)


def admit(parts: Parts, state: RunState, most: int = 2) -> int:
    """Admit new problems for this step, including those owed; fewer while `most` steps' worth are in progress."""
    config, encode, seed = parts.config.rollout, parts.policy.encode, parts.config.seed
    owed = min(state.owed, config.prompts)
    count = max(0, min(config.prompts + owed, most * config.prompts - len(parts.scheduler.in_progress)))
    for problem in parts.stream.draw(count):
        group = new_group(state.groups, problem, encode(problem.prompt), responses=config.responses, seed=seed)
        parts.scheduler.admit([group])
        state.groups += 1
    state.owed = min(owed, config.prompts + owed - count)
    return count


def learn(parts: Parts, state: RunState, tell: Tell | None) -> Iterator[Update]:
    """Take the updates of all passes over the groups in the buffer, and yield each one, up to one that ends the run."""
    begun, updates, tokens = parts.buffer.metrics(), 0, 0
    while True:
        if tell is not None and begun.to_visit:
            tell(Learned(updates, parts.buffer.metrics().fresh - begun.fresh, begun.to_visit, tokens))
        if isinstance(groups := parts.buffer.draw(version=parts.learner.version), NoBatch):
            return
        update = parts.learner.step(groups)
        state.skipped = count_skipped(update, state.skipped)
        if update.skipped is not None:
            parts.buffer.skipped(groups)
        yield update
        updates, tokens = updates + 1, tokens + update.tokens
        if ends_run(update, parts.config.learn.skip_limit):
            return
