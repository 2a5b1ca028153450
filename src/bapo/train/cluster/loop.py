"""The asynchronous loop: engines sample while the learner learns, and nobody waits longer than the bound asks.

Groups are admitted in windows, one for each step. Window k opens when the updates of step k - 1 - a are done, where a =
`cluster.ahead`; windows 0 to a open at the start. The rollout of step k is whole when as many groups have come back as
were admitted in windows 0 to k. It takes them in the order in which they came, as many as its windows admitted and no
earlier rollout has taken; the others wait for the next one. Then the learner takes its u updates on it, while the
engines go on with what is admitted.

    who                 waits for                                           until
    the learner         groups that have come back, and late ones          the rollout is whole
    the engines         requests                                            the next window opens
    an engine           nothing else: it takes new weights by itself, after every step, and continues what it was doing
    a finished group    its verifier                                        it is scored, in a thread of its own: the
                                                                            groups share the verifier, and none waits
                                                                            for a slow response of another

The staleness bound. A token of a group of window k is sampled with the weights after step k - 1 - a, or later ones. If
the group comes back in time for rollout k, the learner has taken at most d = a u updates since when it first draws the
group, and d + u - 1 when it draws the group for the last time. A late group joins a later rollout, and every rollout
costs u more updates. With A = the updates that late groups may cost,

    S >= A + u - 1 + d

The bound S = `offpolicy.max_staleness` is given, so A = S - (u - 1) - d is what is left for late groups; the
configuration refuses A < 0. The learner keeps to it by waiting: a group is due at version v if it would be too old in
the next rollout, v + u + (u - 1) - oldest token > S. A rollout takes every due group that has come back, and the
learner does not begin its updates while one is still in progress. A group whose tokens have not arrived yet counts as
old as the weights of the engines at work. So nothing is discarded and no response is cut short. The buffer checks every
group again when it is drawn, whatever happened here: that is the promise, and this is the pace.

With a = 0, each step waits for all of its groups and no engine samples during updates. This is the synchronous loop:
it gives the same result, bit for bit, if the engines draw by position and are given their requests evenly. With a > 0,
which weights sample a token depends on time, so two runs differ. What holds is that no group is lost or trained on
twice, that every token has the version that sampled it, and the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bapo.config.run import Config
from bapo.models.policy import Policy
from bapo.process.stops import StopAsked
from bapo.rollout.engine import NOTHING_LOADED, Sampled
from bapo.runs import history
from bapo.screen.view import View
from bapo.tasks.task import Task
from bapo.train.cluster.fleet import Fleet
from bapo.train.cluster.hosts import LearnerHost, RolloutHost
from bapo.train.cluster.learner import RemoteLearner
from bapo.train.cluster.ray import Actor, Cluster
from bapo.train.job import RunState, StepRecord, recorded
from bapo.train.loop import Loop, Parts, admit, bookmark, learn, load_weights
from bapo.train.scoring import Scored, score, together, unscored
from bapo.types import Group, group_from_state, group_state

PUMP_SECONDS = 0.1
"""How long we listen to the engines before we look at the learner again."""
SCORED_AT_ONCE = 64
"""How many groups ask the verifier at a time, which divides its own workers and connections among them."""
PROBE_CONTEXTS = 4
"""How many prompts the probe of an engine continues."""
PROBE_TOKENS = 128
"""The longest context of a probe."""

Returned = tuple[int, Group | None]
"""A group that has come back, by its id, with its rewards; None in place of a group that cannot be trained on."""


class AsyncLoop(Loop):
    """One run of the asynchronous loop: the groups that are being scored, and those that wait for their rollout."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        assert isinstance(parts.engine, Fleet)
        assert isinstance(parts.learner, RemoteLearner)
        super().__init__(parts, state)
        self._fleet, self.learner = parts.engine, parts.learner
        self.ahead = parts.config.cluster.ahead
        self._returned: list[Returned] = []
        """Groups that have come back and belong to no rollout yet, in the order in which they came."""
        self._scoring: list[tuple[Group, Future[Scored]]] = []
        self._verifier = ThreadPoolExecutor(SCORED_AT_ONCE, thread_name_prefix="scoring")
        self._scored: dict[int, Scored] = {}
        """What was scored in this step so far, by group."""

    def take_step(self, view: View) -> StepRecord:
        """One rollout and the updates on it, with sampling in parallel."""
        parts, state = self.parts, self.state
        began, before = time.perf_counter(), parts.scheduler.totals()
        undo = self._bookmark()
        self.learner.meanwhile = self.pump if self.ahead else self._fleet.hear
        load_weights(parts)
        admitted = self._open_windows()
        with view.doing("sampling") as tell:
            while not self._whole():
                if self._fleet.lacking:
                    self._fleet.load(self.learner.weights(), version=self.learner.version)
                self.pump()
                if self._stopped:
                    undo()
                    raise StopAsked
                if tell is not None:
                    tell(self._progress(before.sampled_tokens))
        groups = self._close_rollout()
        waited = time.perf_counter()
        with view.doing("learning") as tell:
            updates = list(learn(parts, state, tell))
        times = (began, waited, time.perf_counter())
        scored, self._scored = together([self._scored[id] for id in sorted(self._scored)]), {}
        state.step += 1
        metrics = parts.scheduler.since(before), parts.buffer.metrics(), admitted
        record = recorded(state.step, groups, scored, metrics, updates, times)
        record.rollout["rollout/probe_gap"] = self._fleet.take_gap()
        record.timing["sampling_share"] = self._fleet.take_busy()
        return record

    def _bookmark(self) -> Callable[[], None]:
        """What undoes a step whose rollout is not whole yet."""
        back, waiting = bookmark(self.parts, self.state), (self._returned, self._scoring)
        self._returned, self._scoring = list(self._returned), list(self._scoring)

        def undo() -> None:
            self.learner.meanwhile = self._fleet.hear  # the engines go on with what is forgotten here
            self._verifier.shutdown(cancel_futures=True)  # after the calls that it is in
            back()
            self._returned, self._scoring = waiting

        return undo

    @property
    def _stopped(self) -> bool:
        """Whether a stop has ended the scoring. Its groups count as being scored, and are asked about again."""
        return any(job.done() and isinstance(job.exception(), StopAsked) for _, job in self._scoring)

    def _open_windows(self) -> int:
        """Open every window that may be open during this step, and admit its groups."""
        last = min(self.parts.config.steps, self.state.step + self.ahead + 1)
        admitted = 0
        while self.state.step + len(self.state.windows) < last:
            admitted += admit(self.parts, self.state, most=2 + self.ahead)
            self.state.windows.append(self.state.groups)
        return admitted

    def _whole(self) -> bool:
        """Whether enough groups have come back for the rollout of this step, and none that is due is missing."""
        if self.state.taken + len(self._returned) < self.state.windows[0]:
            return False
        missing = [*self.parts.scheduler.in_progress, *self._in_scoring]
        sampling = self._fleet.oldest
        return not (any(self._due(group.oldest) for group in missing) or self._due(sampling))

    def _due(self, oldest: int | None) -> bool:
        """Whether a group with this oldest token would be too old in the next rollout."""
        updates, version = self.parts.config.updates_per_step, self.parts.learner.version
        return oldest is not None and version + 2 * updates - 1 - oldest > self.parts.config.offpolicy.max_staleness

    def _close_rollout(self) -> list[Group]:
        """Give the groups of this rollout to the buffer, whose passes begin. Returns those with rewards, by id."""
        share = max(0, self.state.windows.pop(0) - self.state.taken)
        chosen: list[Returned] = []
        others: list[Returned] = []
        for place, (id, group) in enumerate(self._returned):
            belongs = place < share or (group is not None and self._due(group.oldest))
            (chosen if belongs else others).append((id, group))
        self._returned = others
        self.state.taken += len(chosen)
        groups = sorted((group for _, group in chosen if group is not None), key=lambda group: group.id)
        added = self.parts.buffer.add(groups, version=self.parts.learner.version)
        self.state.owed += len(added.filtered) + len(chosen) - len(groups)
        return groups

    def pump(self) -> None:
        """Keep the engines at work, and move groups that have come back one place further. Returns after a moment."""
        parts = self.parts
        if parts.engine.version != NOTHING_LOADED and (asked := parts.scheduler.requests(parts.engine.version)):
            parts.engine.submit(asked.requests, parts.scheduler.sampling)
        for request, segment in parts.engine.collect(PUMP_SECONDS):
            parts.scheduler.accept(request, segment)
        rollout = parts.scheduler.take()
        self._returned += [(group.id, None) for group in rollout.dropped]
        self._score(rollout.groups)
        if not self._stopped:
            self._take_scores()

    def _score(self, groups: list[Group]) -> None:
        """Ask the verifier for the rewards of these groups."""
        given = self.parts.task, self.parts.policy.transcript, self.parts.overlong
        self._scoring += [(group, self._verifier.submit(score, [group], *given)) for group in groups]

    def _take_scores(self) -> None:
        """Take in the groups that are scored, in the order in which they were finished."""
        done = [(group, job.result()) for group, job in self._scoring if job.done()]
        scored_ids = {group.id for group, _ in done}
        self._scoring = [(group, job) for group, job in self._scoring if group.id not in scored_ids]
        for group, scored in done:
            for id, facts in unscored([group], scored).items():
                self.parts.ledger.record("unscored", id, **facts)
            self._returned.append((group.id, scored.groups[0] if scored.groups else None))
            self._scored[group.id] = scored

    def _progress(self, tokens_before: int) -> Sampled:
        """What a person sees of the rollout of this step."""
        totals, responses = self.parts.scheduler.totals(), self.parts.config.rollout.responses
        came = min(self.state.taken + len(self._returned), self.state.windows[0]) - self.state.taken
        wanted = self.state.windows[0] - self.state.taken
        return Sampled(came * responses, wanted * responses, totals.sampled_tokens - tokens_before)

    def watched(self, view: View, run: Path) -> None:
        """From now on, show what every actor does, and note restarts there and in the history of this run."""

        def restarted(restart: history.Restart) -> None:
            view.note(restart.line())
            history.record_restart(run, restart, step=self.state.step)

        self._fleet.say = self.learner.say = view.note
        self._fleet.restarted = self.learner.restarted = restarted
        self._fleet.watch = lambda: view.actors([*self._fleet.lines(), *self.learner.lines()])
        self.learner.meanwhile = self._fleet.hear
        self._fleet.hear()

    def pause(self) -> None:
        """Take everything back from the engines, so that they can do something else."""
        self.learner.meanwhile = self._fleet.hear
        self._fleet.ready()
        self._fleet.park()
        for request, segment in self._fleet.collect(0):
            self.parts.scheduler.accept(request, segment)

    def close(self) -> None:
        """End the threads that score."""
        self._verifier.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """The groups between their last response and their rollout, as plain JSON data.

        This only looks: it neither waits for a verifier nor moves a group. What happens to a group is part of the step
        in which `pump` takes note of it, and of the ledger's lines of that step.
        """
        waiting = [{"id": id, "group": None if group is None else group_state(group)} for id, group in self._returned]
        scoring = [group_state(group) for group in self._in_scoring]
        for trajectory in (trajectory for state in scoring for trajectory in state["trajectories"]):
            trajectory |= {"reward": None, "shaping": 0.0}  # its verifier is at work; what it has found so far is lost
            trajectory.pop("rewards", None)
        return {"waiting": waiting, "scoring": scoring}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with the groups that `state_dict` returned. The verifier is asked again for the rewards to come."""
        self._returned = [
            (each["id"], None if each["group"] is None else group_from_state(each["group"]))
            for each in saved["waiting"]
        ]
        self._score([group_from_state(group) for group in saved["scoring"]])

    @property
    def _in_scoring(self) -> list[Group]:
        return [group for group, _ in self._scoring]


# The processes.


def start_cluster(config: Config, policy: Policy, task: Task) -> tuple[Fleet, RemoteLearner, Callable[[], None]]:
    """Start Ray or join it, reserve places, and start all actors. Returns what ends them as well."""
    chosen, given = config.cluster, config.model_dump(mode="json")
    cuda = 1.0 if config.device == "cuda" else 0.0
    cluster = Cluster(chosen.address, processes=chosen.rollouts + chosen.learners)
    try:
        seconds = chosen.start_seconds
        learning = cluster.places(chosen.learners, {"CPU": 1, "GPU": cuda}, seconds=seconds, what="learner ranks")
        gpus = {"CPU": 1.0, "GPU": cuda * chosen.gpus_per_rollout}
        sampling = cluster.places(chosen.rollouts, gpus, seconds=seconds, what="rollout actors")
        learner = RemoteLearner(
            lambda: [Actor(LearnerHost, f"learner {r}", place, given, r) for r, place in enumerate(learning)],
            contexts=probe_contexts(policy, task),
            start_seconds=seconds,
            update_seconds=chosen.update_seconds,
        )
        fleet = Fleet(
            lambda place: Actor(RolloutHost, f"rollout {place}", sampling[place], given),
            chosen.rollouts,
            slots=config.rollout.slots,
            even=chosen.ahead == 0,
            silence_seconds=chosen.silence_seconds,
            start_seconds=chosen.start_seconds,
        )
    except BaseException:
        cluster.close()
        raise

    ending = ExitStack()
    for part in (cluster, learner, fleet):  # the last one ends first, and all of them end
        ending.callback(part.close)
    return fleet, learner, ending.close


def probe_contexts(policy: Policy, task: Task) -> list[list[int]]:
    """What probes continue: prompts that are cut at various places, because the ends of prompts are often alike."""
    prompts = [policy.encode(problem.prompt)[:PROBE_TOKENS] for problem in task.train[:PROBE_CONTEXTS]]
    return [prompt[: max(1, len(prompt) * (place + 1) // len(prompts))] for place, prompt in enumerate(prompts)]
