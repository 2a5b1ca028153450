"""A learner elsewhere arrives at the same weights, bit for bit, wherever its ranks die.

The learner is real and in this process; only the way to it is not: a call is done when it is made, or it is lost.
"""

from dataclasses import replace

import pytest

from bapo.config.errors import ClusterError
from bapo.learn.learner import Learner
from bapo.train.cluster import learner as learners_module
from bapo.train.cluster.learner import RemoteLearner
from bapo.train.cluster.ray import Hello, Lost, Missing, Silent
from bapo.train.machine import code_digest
from tests.sharded import SETTINGS, groups, overflowing
from tests.tiny.models import tiny


class Call:
    """An answer that is there, or is lost."""

    def __init__(self, ref, who="", what=""):
        self.ref, self.who, self.what, self.seconds = ref, who, what, 0.0

    @property
    def parts(self):
        return [self, self] if isinstance(self.ref, Exception) else [Call(part) for part in self.ref]

    def answer(self, seconds):
        if isinstance(self.ref, Exception):
            raise self.ref
        return self.ref


class Rank:
    """The only rank of a learner; it dies at one of its calls, before or after it has done what it was asked for."""

    settings = SETTINGS

    def __init__(self, lives, *, after, how=Lost):
        self.lives, self.after, self.how = lives, after, how
        self.name, self.process, self.killed = "learner 0", None, False

    def call(self, method, *given, what, returns=1):
        if self.killed or self.lives[0] == 0:
            if not self.killed and self.after:
                getattr(self, method)(*given)
            self.lives[0] -= 1
            return Call(self.how("learner 0 died"))
        self.lives[0] -= 1
        try:
            return Call(getattr(self, method)(*given))
        except FloatingPointError as error:
            return Call(error)

    def hello(self):
        return Hello(("here", 1), "here", code_digest())

    def meet(self, where):
        self.learner = Learner(tiny(), self.settings)

    def step(self, batch):
        return self.learner.step(batch.groups())

    def publish(self, contexts):
        return {name: w.detach().clone() for name, w in self.learner.weights()}, (self.learner.fingerprint(), None)

    def save(self, directory):
        self.learner.save(directory)

    def load(self, directory, version):
        self.learner.load(directory, version=version)

    def greet(self, hello):
        self.process = hello.process

    def kill(self):
        self.killed = True


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(learners_module, "answered", lambda calls, seconds: list(calls))
    monkeypatch.setattr(learners_module, "end", lambda ranks: [rank.kill() for rank in ranks])
    monkeypatch.setattr(learners_module, "put", lambda value, what: value)


def made(lives=-1, *, after=False, how=Lost):
    """A learner whose rank dies at this call, counted over all its lives."""
    left, told = [lives], []
    made = RemoteLearner(
        lambda: [Rank(left, after=after, how=how)],
        contexts=[],
        start_seconds=1,
        update_seconds=1,
    )
    made.say, made.restarted = told.append, lambda restart: told.append(restart.line())
    return made, told


def worked(learner, tmp_path):
    """Two updates, a checkpoint, three updates: what a run asks of its learner."""
    metrics = []
    for number in range(5):
        if number == 2:
            directory = tmp_path / "step-000002"
            directory.mkdir(parents=True)
            learner.save(directory)
            learner.saved(directory)
        metrics.append(learner.step(groups(seed=number)).metrics)
        learner.weights()
    return learner.weights(), metrics


CALLS = 16  # hello, meet, 5 x (step, publish), save, publish; and a few of the second life


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners_module, "answered", lambda calls, seconds: list(calls))
        patch.setattr(learners_module, "end", lambda ranks: [rank.kill() for rank in ranks])
        patch.setattr(learners_module, "put", lambda value, what: value)
        learner, told = made()
        found = worked(learner, tmp_path_factory.mktemp("whole"))
    assert not told
    return found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("lives", range(CALLS))
def test_a_death_at_any_call_changes_nothing(tmp_path, undisturbed, lives, after):
    dying, told = made(lives, after=after)
    found, metrics = worked(dying, tmp_path)
    assert dying.version == 5
    assert found.fingerprint == undisturbed[0].fingerprint
    assert metrics == undisturbed[1]
    assert dying.restarts == (1 if lives < 14 else 0)
    assert not any("has other bits" in text for text in told)


def test_only_updates_since_the_checkpoint_are_repeated(tmp_path):
    dying, told = made(11)  # hello, meet, 2 x (step, publish), save, 2 x (step, publish), then in the fifth update
    worked(dying, tmp_path)
    assert "with 2 updates to repeat" in told[0]


@pytest.mark.parametrize("lives", [-1, 2, 4, 6])  # hello, meet, then (step, publish) three times
def test_a_skipped_update_is_skipped_again_when_it_is_repeated_and_counts_once(lives, monkeypatch):
    monkeypatch.setattr(Rank, "settings", replace(SETTINGS, advantages="dr_grpo"))
    learner, told = made(lives, after=True)
    learner.step(groups(seed=0))
    before = learner.weights().fingerprint
    update = learner.step(overflowing(seed=1))
    assert update.skipped is not None
    assert (update.version, learner.version) == (2, 2)
    assert learner.weights().fingerprint == before
    assert learner.step(groups(seed=2)).skipped is None
    assert learner.version == 3
    assert len(learner.journal) == 3
    assert learner.restarts == (lives >= 0)
    assert not any("has other bits" in text for text in told)


def test_an_error_of_the_update_itself_is_not_repeated(tmp_path):
    learner, told = made()
    learner.step(groups())

    def diverge(groups):
        raise FloatingPointError("the gradient norm is inf")

    learner._ranks[0].step = diverge
    with pytest.raises(FloatingPointError, match="gradient norm is inf"):
        learner.step(groups())
    assert learner.version == 1
    assert not told


@pytest.mark.parametrize("how", [Lost, Silent])
def test_ranks_that_keep_dying_end_the_run(how):
    learner, _ = made(how=how)
    learner.step(groups())

    class Dead(Rank):
        def call(self, method, *given, what, returns=1):
            return Call(how("learner 0 died"))

    learner._ranks[0].lives[0] = 0
    learner.spawn = lambda: [Dead([0], after=False)]
    with pytest.raises(ClusterError, match="died 3 times in a row"):
        learner.step(groups())


def test_somebody_else_works_while_the_ranks_do(monkeypatch):
    learner, _ = made()
    turns = []
    learner.meanwhile = lambda: turns.append(learner.doing)
    late = iter([False, True] * 10)
    monkeypatch.setattr(learners_module, "answered", lambda calls, seconds: list(calls) if next(late) else [])
    learner.step(groups())
    assert turns[-1] == "take update 1"
    assert turns[0] == "starting"
    assert "loading the model" in turns
    assert learner.lines()[0].doing == "waiting"
    assert learner.rate > 0
    assert learner.lines()[0].tokens_per_second == 0


def test_weights_that_come_out_different_are_said(tmp_path):
    learner, told = made()
    learner.step(groups(seed=0))
    published = learner.weights()
    learner.last = published.version, "what another machine would have had"
    learner._ranks[0].lives[0] = 0
    learner.step(groups(seed=1))
    assert told[0] == "all learner ranks start again, with 1 update to repeat: learner 0 died"
    assert "version 1 has other bits than before the learner was restarted" in told[1]


@pytest.mark.parametrize("how", [Missing, Silent])
def test_an_answer_that_is_lost_is_asked_for_again(tmp_path, how):
    learner, told = made(3, how=how)  # hello, meet, step, then publish
    learner.step(groups(seed=0))
    learner.weights()
    assert len(told) == 1
