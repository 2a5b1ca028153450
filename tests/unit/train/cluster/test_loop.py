"""The asynchronous loop against its own promises: even rollouts, nothing lost, nothing too old, in turns if not ahead.

Engines and learner are stand-ins that need no model, so that many schedules can be tried: a response has a given
length, an engine gives every response a token at each call, and an update takes a given number of calls.
"""

import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from bapo.buffer import Buffer
from bapo.config.errors import CheckpointError
from bapo.learn.health import Skipped
from bapo.learn.learner import Update
from bapo.process import stops
from bapo.rollout.engine import NOTHING_LOADED, Sampling, Segment
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.runs import history
from bapo.runs.ledger import Ledger, balance
from bapo.screen.view import View
from bapo.tasks.task import ProblemStream, followed
from bapo.train.cluster import loop as async_loop
from bapo.train.cluster.loop import AsyncLoop
from bapo.train.continuing import check_ledger
from bapo.train.job import RunState
from bapo.train.loop import admit
from bapo.train.scoring import Failing
from bapo.types import Problem, Score, Status

PROMPTS, RESPONSES = 4, 2


class Engine:
    """Gives every response under way a token at each call, up to a length that its group decides."""

    resting = None

    def __init__(self, length, *, lag=lambda call: False):
        self.length, self.lag = length, lag
        self.version, self.at_work = NOTHING_LOADED, NOTHING_LOADED
        self.under_way, self.calls, self.lacking = {}, 0, False

    def load(self, weights, *, version):
        self.version = version

    def submit(self, requests, sampling, *, token_budget=None, turns=False):
        self.under_way |= {request.id: request for request in requests}

    def collect(self, timeout=None):
        self.calls += 1
        if self.lag(self.calls):  # it samples on with the weights it has, and says nothing
            return []
        self.at_work = self.version
        found = []
        for id, request in list(self.under_way.items()):
            last = request.position + 1 >= self.length(request.context[0])
            self.under_way[id] = SimpleNamespace(**vars(request) | {"position": request.position + 1})
            if last:
                del self.under_way[id]
            found.append((id, Segment([7], [-1.0], [0.5], [self.at_work], Status.STOPPED if last else None)))
        return found

    def park(self):
        self.under_way = {}

    def ready(self):
        pass

    def hear(self):
        pass

    def lines(self):
        return []

    def take_gap(self):
        return 0.0

    def take_busy(self):
        return 1.0

    @property
    def oldest(self):
        return self.at_work if self.under_way else None


class Learner:
    """Counts updates; while one runs, somebody else works so many times."""

    def __init__(self, turns=3, skips=()):
        self.version, self.turns, self.meanwhile = 0, turns, lambda: None
        self.batches, self.skips = [], skips

    def step(self, groups):
        for _ in range(self.turns):
            self.meanwhile()
        self.batches.append(sorted(group.id for group in groups))
        self.version += 1
        return Update(self.version, 1, {}, Skipped("nan", {}) if self.version - 1 in self.skips else None)

    def weights(self):
        return []

    def lines(self):
        return []


def made(
    monkeypatch, *, ahead, staleness, length, steps=12, updates=2, lag=lambda call: False, turns=3, reuse=1, skips=()
):
    monkeypatch.setattr(async_loop, "Fleet", Engine)
    monkeypatch.setattr(async_loop, "RemoteLearner", Learner)
    problems = [Problem(str(number), str(number), 0) for number in range(500)]
    ledger = Ledger()
    config = SimpleNamespace(
        steps=steps,
        seed=0,
        updates_per_step=updates,
        cluster=SimpleNamespace(ahead=ahead),
        offpolicy=SimpleNamespace(max_staleness=staleness),
        rollout=SimpleNamespace(prompts=PROMPTS, responses=RESPONSES),
        learn=SimpleNamespace(skip_limit=3),
    )
    task = SimpleNamespace(scores=lambda asked: [Score(float(place % 2)) for place in range(len(asked))])
    parts = SimpleNamespace(
        config=config,
        task=task,
        ledger=ledger,
        overlong=lambda length: 0.0,
        policy=SimpleNamespace(decode=str, encode=lambda prompt: [int(prompt), 1]),
        engine=Engine(length, lag=lag),
        learner=Learner(turns, skips),
        stream=ProblemStream(problems, seed=0),
        scheduler=Scheduler(Sampling(), max_response_tokens=999, record=ledger.record),
        buffer=Buffer(
            batch_groups=PROMPTS // 2, max_batches=2, reuse=reuse, max_staleness=staleness, record=ledger.record
        ),
    )
    return parts, AsyncLoop(parts, RunState())


def worked(parts, loop):
    """All steps; the balance at the end, and the groups of every update."""
    lines = []
    for _ in range(parts.config.steps):
        loop.take_step(View(1, title="", clock=lambda: 0.0))
        lines += parts.ledger.take()
    loop.close()
    return balance(lines, max_staleness=parts.buffer.max_staleness, ended=True, all_used=True)


def uneven(seed):
    chance = random.Random(seed)
    lengths = {}
    return lambda prompt: lengths.setdefault(prompt, chance.choice([1, 2, 3, 5, 40]))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_equal_lengths_give_even_rollouts(monkeypatch, ahead):
    parts, loop = made(monkeypatch, ahead=ahead, staleness=2 * (ahead + 1) - 1, length=lambda prompt: 5)
    found = worked(parts, loop)
    assert found.wrong == []
    assert found.states == {"retired": 12 * PROMPTS}
    assert [len(batch) for batch in parts.learner.batches] == [PROMPTS // 2] * 24
    assert found.stalest <= 2 * (ahead + 1) - 1


@pytest.mark.parametrize("turns", [0, 1, 10])
@pytest.mark.parametrize("slack", [0, 2, 7])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_long_tails_lose_nothing_and_keep_the_bound(monkeypatch, ahead, slack, turns):
    staleness = 2 * (ahead + 1) - 1 + slack
    parts, loop = made(
        monkeypatch, ahead=ahead, staleness=staleness, length=uneven(ahead + 10 * slack), steps=20, turns=turns
    )
    found = worked(parts, loop)
    assert found.wrong == []
    assert found.states == {"retired": 20 * PROMPTS}, "a group was lost, or grew too old"
    assert found.stalest <= staleness
    assert parts.buffer.metrics().lost_fresh == 0


def test_on_policy_without_slack_ends(monkeypatch):
    parts, loop = made(monkeypatch, ahead=0, staleness=1, length=uneven(3))
    assert worked(parts, loop).states == {"retired": 12 * PROMPTS}


def test_the_learner_waits_for_an_engine_that_lags(monkeypatch):
    """Tokens that were sampled and not sent yet are as old as the weights of their engine."""
    parts, loop = made(monkeypatch, ahead=1, staleness=3, length=uneven(1), lag=lambda call: 20 < call < 120)
    found = worked(parts, loop)
    assert found.wrong == []
    assert parts.buffer.metrics().lost_fresh == 0
    assert found.stalest <= 3


def test_not_ahead_nobody_samples_during_updates(monkeypatch):
    parts, loop = made(monkeypatch, ahead=0, staleness=9, length=uneven(2))
    during = []
    step = parts.learner.step

    def watched(groups):
        during.append(dict(parts.engine.under_way))
        return step(groups)

    parts.learner.step = watched
    worked(parts, loop)
    assert during
    assert not any(during)
    assert all(group // PROMPTS == place // 2 for place, batch in enumerate(parts.learner.batches) for group in batch)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_skipped_update_uses_none_of_its_groups(monkeypatch, ahead):
    skips = {0, 5, 6, 7, 20}
    parts, loop = made(
        monkeypatch, ahead=ahead, staleness=40, length=uneven(7), updates=4, steps=8, reuse=2, skips=skips
    )
    uses, step = [], parts.learner.step

    def watched(groups):
        uses.append({group.id: group.uses for group in groups})
        return step(groups)

    parts.learner.step = watched
    found = worked(parts, loop)
    assert found.wrong == []
    assert found.states == {"retired": 8 * PROMPTS}, "a skipped update took a visit away, or gave one"
    assert len(uses) == parts.learner.version == 8 * 4
    assert found.uses == sum(len(drawn) for version, drawn in enumerate(uses) if version not in skips)
    for version, drawn in enumerate(uses):
        before = [uses[v] for v in range(version) if v not in skips]
        assert drawn == {id: sum(id in earlier for earlier in before) for id in drawn}


def test_restarts_are_shown_and_written_into_the_history(monkeypatch, tmp_path):
    parts, loop = made(monkeypatch, ahead=1, staleness=9, length=uneven(4))
    view = View(1, title="", clock=lambda: 0.0)
    notes = []
    view.note = notes.append
    loop.watched(view, tmp_path)
    for _ in range(2):
        loop.take_step(view)
    parts.engine.restarted(history.Restart("rollout 0", "it died", responses=2, tokens=9))
    parts.learner.restarted(history.Restart(history.LEARNER, "it died", updates=4))
    loop.close()
    assert history.restarts(tmp_path) == {"learner": 1, "rollout 0": 1}
    assert [(line["who"], line["step"]) for line in history.read(tmp_path)] == [("rollout 0", 2), ("learner", 2)]
    assert len(notes) == 2


def state_of(parts, loop):
    """What a checkpoint keeps of them, as `Training.state` does, through JSON."""
    state = {"scheduler": parts.scheduler.state_dict(), "buffer": parts.buffer.state_dict(), **loop.state_dict()}
    return json.loads(json.dumps(state | {"progress": asdict(loop.state)}))


def waiting(loop):
    """The ids of the groups between their last response and their rollout."""
    saved = loop.state_dict()
    return {group["id"] for group in saved["scoring"]} | {each["id"] for each in saved["waiting"] if each["group"]}


def test_groups_that_wait_survive_a_checkpoint(monkeypatch):
    parts, loop = made(monkeypatch, ahead=2, staleness=15, length=uneven(5), turns=10)
    view = View(1, title="", clock=lambda: 0.0)
    while not waiting(loop):
        loop.take_step(view)
    saved, there = loop.state_dict(), waiting(loop)
    other = AsyncLoop(parts, loop.state)
    other.load_state_dict(saved)
    assert waiting(other) == there
    assert other.state_dict() == saved
    found = [line for line in parts.ledger.take() if line["event"] != "trained"]
    state = {group: line["event"] for line in found for group in line["groups"]}
    assert {group for group, last in state.items() if last == "finished"} == there
    loop.close()
    other.close()


def test_a_checkpoint_while_groups_are_scored_fits_the_ledger_and_goes_on(monkeypatch, tmp_path):
    """The verifier is slow and fails on a part, so steps end while it is asked. The state waits for nothing."""

    def scores(asked):
        if late and {problem.id for problem, _ in asked} <= late[max(late)]:  # the step needs the others of a batch
            gate.wait(10)
        return [Score(None, "broken") if int(p.id) % 4 == 0 else Score(float(i % 2)) for i, (p, _) in enumerate(asked)]

    def admits(groups):
        if loop.state.step >= steps:  # the rollout of this step does not need them
            late.setdefault(loop.state.step, set()).update(group.problem.id for group in groups)
        admit(groups)

    def fails_later():
        return any(problem_of(group) % 4 == 0 for group in state_of(parts, loop)["scoring"])

    gate, late = threading.Event(), {}
    view, lines, steps = View(1, title="", clock=lambda: 0.0), [], 6
    parts, loop = made(monkeypatch, ahead=1, staleness=40, length=lambda prompt: 5, turns=30, steps=2 * steps)
    parts.task.scores, admit, parts.scheduler.admit = scores, parts.scheduler.admit, admits
    while loop.state.step <= steps or (loop.state.step < 2 * steps - 2 and not fails_later()):
        loop.take_step(view)
        lines += parts.ledger.take()
    threading.Timer(0.5, gate.set).start()
    saved = state_of(parts, loop)
    assert not gate.is_set(), "the state waited for the verifier"
    assert parts.ledger.take() == [], "a group moved while the state was read"
    assert any(problem_of(group) % 4 == 0 for group in saved["scoring"]), "nothing was being scored"

    data = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "ledger.jsonl").write_text(data + '{"event": "finished", "groups": [0]}\n')  # after the checkpoint
    saved["logs"] = {"ledger.jsonl": len(data)}
    check_ledger(tmp_path, saved, max_staleness=40)
    with pytest.raises(CheckpointError, match="is finished in one and not in the other"):
        check_ledger(tmp_path, saved | {"scoring": saved["scoring"][1:]}, max_staleness=40)

    gate.set()
    loop.close()
    again, resumed = made(monkeypatch, ahead=1, staleness=40, length=lambda prompt: 5, turns=30, steps=2 * steps)
    again.task.scores, again.stream.cursor = scores, parts.stream.cursor
    again.scheduler.load_state_dict(saved["scheduler"])
    again.buffer.load_state_dict(saved["buffer"])
    again.learner.version = parts.learner.version
    resumed.state = RunState(**saved["progress"] | {"failing": Failing(**saved["progress"]["failing"])})
    resumed.load_state_dict(saved)
    assert waiting(resumed) == waiting(loop)
    while resumed.state.step < 2 * steps:
        resumed.take_step(view)
        lines += again.ledger.take()
    resumed.close()
    found = balance(lines, max_staleness=40, ended=True, all_used=True)
    assert found.wrong == []
    assert found.states["unscored"] > 0


def test_all_groups_that_wait_for_the_verifier_are_handed_over_together(monkeypatch):
    parts, loop = made(monkeypatch, ahead=2, staleness=15, length=uneven(5), turns=10)
    gate, asked = threading.Event(), []

    def scores(responses):
        asked.append([problem.id for problem, _ in responses])
        gate.wait(10)
        return [Score(float(place % 2)) for place in range(len(responses))]

    parts.task.scores = scores
    groups = [new_group(id, Problem(str(id), "?", "1"), [1], responses=2, seed=0) for id in range(4)]
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.tokens, trajectory.status = [2], Status.STOPPED
        loop._score([group])
    gate.set()
    while loop._scoring:
        loop._take_scores()
    assert [id for ids in asked for id in ids] == [str(group.id) for group in groups for _ in range(2)]
    assert len(asked) <= 2  # the first is asked about at once, and the others wait for it
    assert [id for id, _ in loop._returned] == [0, 1, 2, 3]
    loop.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_stop_undoes_a_step_that_waits_for_slow_rewards(monkeypatch, ahead):
    def slow(asked):
        follower = followed(len(asked))
        for _ in asked:
            time.sleep(slowly)
            follower.known(Score(1.0))
        return [Score(float(place % 2)) for place in range(len(asked))]

    parts, loop = made(monkeypatch, ahead=ahead, staleness=15, length=uneven(5), turns=10)
    slowly, parts.task.scores, view, heard = 0.0, slow, View(1, title="", clock=lambda: 0.0), []
    for _ in range(3):
        loop.take_step(view)
        parts.ledger.take()
    slowly = 4.0
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    stopped = False
    with stops.listening(heard.append):
        for _ in range(3):  # a step may have groups whose rewards were there before they became slow
            before, cursor, _ = state_of(parts, loop), parts.stream.cursor, parts.ledger.take()
            try:
                loop.take_step(view)
            except stops.StopAsked:
                stopped = True
                break
    assert stopped
    loop.learner.meanwhile()  # while a checkpoint is written
    assert state_of(parts, loop) == before
    assert (parts.stream.cursor, parts.ledger.take(), heard) == (cursor, [], [signal.SIGTERM])
    loop.close()


def problem_of(group):
    return int(group["problem"]["id"])


def test_what_is_owed_and_finds_no_room_stays_owed(monkeypatch):
    parts, loop = made(monkeypatch, ahead=0, staleness=1, length=lambda prompt: 5)
    loop.close()
    state = RunState(owed=3)
    assert admit(parts, state) == PROMPTS + 3
    assert state.owed == 0
    state.owed = 2
    assert admit(parts, state) == 1  # two steps' worth are in progress
    assert state.owed == 2
    assert admit(parts, state, most=4) == PROMPTS + 2
    assert state.owed == 0
    state.owed = 3 * PROMPTS
    assert admit(parts, state, most=99) == 2 * PROMPTS
    assert state.owed == 0, "a step makes up for one step's worth at most, and the rest is forgiven"
    assert state.groups == len(parts.scheduler.in_progress) == PROMPTS + 3 + 1 + PROMPTS + 2 + 2 * PROMPTS


@pytest.mark.parametrize("ahead", [0, 1])
def test_groups_without_a_signal_are_made_up_for_in_the_next_window(monkeypatch, ahead):
    parts, loop = made(monkeypatch, ahead=ahead, staleness=9, length=lambda prompt: 5, steps=3)
    parts.task.scores = lambda asked: [Score(1.0) for _ in asked]  # no group has a signal
    admitted = [loop.take_step(View(1, title="", clock=lambda: 0.0)).rollout["rollout/admitted"] for _ in range(3)]
    loop.close()
    assert admitted == [PROMPTS, 2 * PROMPTS, 2 * PROMPTS] if ahead == 0 else [2 * PROMPTS, 2 * PROMPTS, 0]
