"""The asynchronous loop: engines sample while the learner learns, and nobody waits longer than the bound asks.

Groups are admitted in windows, one for each step. Window k opens when the updates of step k - 1 - a are done, where a =
`cluster.ahead`; windows 0 to a open at the start. The rollout of step k is whole when as many groups have come back as
were admitted in windows 0 to k, whichever come first. Then the learner takes its u updates on it, while the engines go
on with what is admitted.

    who                 waits for                                           until
    the learner         groups that have come back, and late ones          the rollout is whole
    the engines         requests                                            the next window opens
    an engine           nothing else: it takes new weights by itself, after every step, and continues what it was doing
    a finished group    its verifier                                        it is scored, in a thread of its own

The staleness bound. A token of a group of window k is sampled with the weights after step k - 1 - a, or later ones. If
the group comes back in time for rollout k, the learner has taken at most d = a u updates since when it first draws the
group, and d + u - 1 when it draws the group for the last time. A late group joins a later rollout, and every rollout
costs u more updates. With A = the updates that late groups may cost,

    S >= A + u - 1 + d

The bound S = `offpolicy.max_staleness` is given, so A = S - (u - 1) - d is what is left for late groups; the
configuration refuses A < 0. The learner keeps to it by waiting: it does not begin the updates at version v while a
group is in progress that would be too old in the next rollout, v + u + (u - 1) - oldest token > S. So nothing is
discarded and no response is cut short. The buffer checks every group again when it is drawn, whatever happened here:
that is the promise, and this is the pace.

With a = 0, each step waits for all of its groups and no engine samples during updates. This is the synchronous loop:
it gives the same result, bit for bit, if the engines draw by position and are given their requests evenly. With a > 0,
which weights sample a token depends on time, so two runs differ. What holds is that no group is lost or trained on
twice, that every token has the version that sampled it, and the bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from bapo.buffer import NoBatch
from bapo.learn.learner import Update
from bapo.rollout.engine import Sampled
from bapo.rollout.scheduler import SchedulerMetrics
from bapo.screen.view import View
from bapo.screen.watch import Learned
from bapo.train.fleet import Fleet
from bapo.train.learners import RemoteLearner
from bapo.train.loop import Parts, RunState, StepRecord, admit, load_weights
from bapo.train.scoring import Failure, Scored, response_metrics, score, unscored
from bapo.types import Group

PUMP_SECONDS = 0.1
"""How long we listen to the engines before we look at the learner again."""


@dataclass
class _Step:
    """What has come back during one step."""

    groups: list[Group] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    filtered: int = 0
    unscored: int = 0


class AsyncLoop:
    """One run of the asynchronous loop: the groups that are being scored, and the window that each step needs."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self.parts, self.state = parts, state
        assert isinstance(parts.engine, Fleet)
        assert isinstance(parts.learner, RemoteLearner)
        self._fleet, self._learner = parts.engine, parts.learner
        self._view: View | None = None
        self.ahead = parts.config.cluster.ahead
        self._scoring: list[tuple[list[Group], Future[Scored]]] = []
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._step = _Step()

    def take_step(self, view: View) -> StepRecord:
        """One rollout and the updates on it, with sampling in parallel."""
        parts, state = self.parts, self.state
        self._tell(view)
        began, before = time.perf_counter(), parts.scheduler.totals()
        self._step = step = _Step()
        admitted = self._open_windows()
        load_weights(parts)
        with view.doing("sampling") as tell:
            while not self._whole():
                if self._fleet.lacking:
                    self._publish_again()
                self.pump()
                if tell is not None:
                    tell(self._progress(before.sampled_tokens))
        parts.buffer.add([], version=parts.learner.version)
        waited = time.perf_counter()
        with view.doing("learning") as tell, self._meanwhile():
            updates = []
            for update, learned in self._learn():
                updates.append(update)
                if tell is not None:
                    tell(learned)
            self._settle_scores()
        ended = time.perf_counter()
        state.windows.pop(0)
        state.step += 1
        state.owed = step.filtered + step.dropped + step.unscored
        sampled = parts.scheduler.totals()
        tokens = sampled.sampled_tokens - before.sampled_tokens + sum(update.tokens for update in updates)
        return StepRecord(
            step=state.step,
            rollout={
                **response_metrics(step.groups, failures=len(step.failures)),
                **{f"rollout/{name}": value for name, value in _since(before, sampled).items()},
                **{f"buffer/{name}": value for name, value in asdict(parts.buffer.metrics()).items()},
                "rollout/admitted": admitted,
                "rollout/probe_gap": self._fleet.take_gap(),
            },
            updates=updates,
            samples=step.groups[:1],
            failures=step.failures,
            timing={
                "seconds": ended - began,
                "rollout_seconds": waited - began,
                "learn_seconds": ended - waited,
                "sampling_share": self._fleet.take_busy(),
                "tokens_per_second": tokens / (ended - began),
            },
        )

    def _open_windows(self) -> int:
        """Open every window that may be open during this step, and admit its groups."""
        last = min(self.parts.config.steps, self.state.step + self.ahead + 1)
        admitted = 0
        while self.state.step + len(self.state.windows) < last:
            admitted += admit(self.parts, self.state, most=2 + self.ahead)
            self.state.windows.append(self.state.groups)
            self.state.owed = 0
        return admitted

    def _whole(self) -> bool:
        """Whether the rollout of this step is whole, and no group in progress is too old to wait for the next one."""
        if self.state.returned < self.state.windows[0]:
            return False
        updates, version = self.parts.config.updates_per_step, self.parts.learner.version
        late = [*self.parts.scheduler.in_progress, *(group for groups, _ in self._scoring for group in groups)]
        oldest = min((group.oldest for group in late if group.oldest is not None), default=version)
        return version + updates + (updates - 1) - oldest <= self.parts.config.offpolicy.max_staleness

    def pump(self) -> None:
        """Keep the engines at work, and move what has come back one place further. Returns after a moment."""
        parts = self.parts
        if asked := parts.scheduler.requests(parts.engine.version):
            parts.engine.submit(asked.requests, parts.scheduler.sampling)
        came = parts.engine.collect(PUMP_SECONDS)
        if self._view is not None:
            self._view.actors([*self._fleet.lines(), *self._learner.lines()])
        for request, segment in came:
            parts.scheduler.accept(request, segment)
        rollout = parts.scheduler.take()
        self._step.dropped += len(rollout.dropped)
        self.state.returned += len(rollout.dropped)
        if rollout.groups:
            job = self._verifier.submit(score, rollout.groups, parts.task, parts.policy.decode, parts.overlong)
            self._scoring.append((rollout.groups, job))
        while self._scoring and self._scoring[0][1].done():
            self._add(*self._scoring.pop(0))

    def _publish_again(self) -> None:
        """Give the engines the present weights once more: the machine that kept them is lost."""
        with self._meanwhile():
            self._fleet.load(self._learner.weights(), version=self._learner.version)

    def _add(self, groups: list[Group], job: Future[Scored]) -> None:
        scored, step = job.result(), self._step
        for group in unscored(groups, scored):
            self.parts.ledger.record("unscored", group.id)
        added = self.parts.buffer.add(scored.groups, version=self.parts.learner.version, whole=False)
        self.state.returned += len(groups)
        step.groups += groups
        step.failures += scored.failures
        step.filtered += len(added.filtered)
        step.unscored += len(groups) - len(scored.groups)

    def _learn(self) -> Iterator[tuple[Update, Learned]]:
        """Take the updates of all passes over the rollout, and yield each one."""
        parts = self.parts
        begun, updates, tokens = parts.buffer.metrics(), 0, 0
        asked = begun.to_visit
        while not isinstance(groups := parts.buffer.draw(version=parts.learner.version), NoBatch):
            update = parts.learner.step(groups)
            updates, tokens = updates + 1, tokens + update.tokens
            yield update, Learned(updates, parts.buffer.metrics().fresh - begun.fresh, asked, tokens)

    def _settle_scores(self) -> None:
        """Wait for what is being scored, so that a checkpoint after this step has every group in its place."""
        while self._scoring:
            self._add(*self._scoring.pop(0))

    @contextmanager
    def _meanwhile(self) -> Iterator[None]:
        """Inside, the engines are kept at work while the learner is busy, if they may run ahead."""
        learner = self._learner
        idle = learner.meanwhile
        if self.ahead:
            learner.meanwhile = self.pump
        try:
            yield
        finally:
            learner.meanwhile = idle

    def _progress(self, tokens_before: int) -> Sampled:
        totals = self.parts.scheduler.totals()
        wanted, responses = self.state.windows[0], self.parts.config.rollout.responses
        return Sampled(self.state.returned * responses, wanted * responses, totals.sampled_tokens - tokens_before)

    def _tell(self, view: View) -> None:
        """Tell this view what happens to actors, and what each of them does."""
        self._view = view
        self._fleet.say = self._learner.say = view.note

    def saved(self, checkpoint: Path) -> None:
        """Remember where learner ranks begin again."""
        self._learner.saved(checkpoint)

    def export(self, path: Path, card: str) -> None:
        """Write the trained model into the directory of the run."""
        self._learner.export(path, card)

    def pause(self) -> None:
        """Take everything back from the engines, so that they can do something else."""
        parts = self.parts
        parts.engine.park()
        for request, segment in parts.engine.collect(0):
            parts.scheduler.accept(request, segment)


def _since(before: SchedulerMetrics, now: SchedulerMetrics) -> dict[str, int]:
    """What the scheduler did between two totals, and what it holds now."""
    levels = ("parked", "waiting", "held_tokens")
    return {
        field.name: getattr(now, field.name) - (0 if field.name in levels else getattr(before, field.name))
        for field in fields(SchedulerMetrics)
    }
