"""The synchronous loop: read this first.

    new problems join the parked ones; the engine loads the learner's weights and samples within its budget; finished
    groups are scored and enter the buffer; the learner takes one update per draw until the passes over them are done.

Nothing runs in parallel, so no part waits for another; on a cluster, `cluster/loop.py` takes the place of `Loop`.
Weights move in one place, `load_weights`, once per version that samples. A token sampled at version v is trained on
only at versions v .. v + max_staleness; then the buffer drops it.
A step is a pure function of (config, weights, state), so a resumed run repeats an uninterrupted one bit for bit.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bapo.buffer import Buffer, NoBatch
from bapo.config.run import Config
from bapo.learn.learner import Learns, Update
from bapo.models.policy import Policy
from bapo.process.stops import StopAsked
from bapo.rollout.engine import Engine
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.runs.ledger import Ledger
from bapo.screen.view import View
from bapo.screen.watch import Learned, Tell
from bapo.tasks.task import ProblemStream, Task
from bapo.train.job import RunState, StepRecord, count_skipped, ends_run, recorded
from bapo.train.scoring import score, unscored, with_given_up


@dataclass
class Parts:
    """Everything a run is made of."""

    config: Config
    task: Task
    policy: Policy
    notes: list[str]  # what a person should know about how the parts were made
    overlong: Callable[[int], float]  # what the length of a response adds to its reward for learning; at most 0
    engine: Engine
    stream: ProblemStream
    scheduler: Scheduler
    buffer: Buffer
    learner: Learns
    ledger: Ledger = field(default_factory=Ledger)
    close: Callable[[], None] = lambda: None  # ends what was started for this run


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
                scored = score(rollout.groups, parts.task, parts.policy.transcript, parts.overlong, tell)
        except StopAsked:
            undo()
            raise
        added = parts.buffer.add(scored.groups, version=parts.learner.version)
        for group, facts in unscored(rollout.groups, scored).items():
            parts.ledger.record("unscored", group, **facts)
        state.owed += len(added.filtered) + len(rollout.dropped) + len(rollout.groups) - len(scored.groups)
        sampled = time.perf_counter()
        with view.doing("learning") as tell:
            updates = list(learn(parts, state, tell))
        times = (began, sampled, time.perf_counter())
        state.step += 1
        metrics = rollout.metrics, parts.buffer.metrics(), admitted
        record = recorded(state.step, rollout.groups, scored, metrics, updates, times, rollout.dropped)
        return replace(record, scored=with_given_up(scored, rollout, parts.policy.decode))

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
