"""A fleet of engines loses nothing when its members die, fall silent or get wrong weights at any point.

The engines are real and in this process; only the way to them is not: a call is done when it is made, or it is lost.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from bapo.config.errors import ClusterError
from bapo.rollout.engine import Request, Sampling, generate, join
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.worker import Worker, WrongWeights
from bapo.train.cluster import fleet as fleet_module
from bapo.train.cluster.cargo import Answer
from bapo.train.cluster.fleet import Fleet
from bapo.train.cluster.hosts import Probe, Published
from bapo.train.cluster.pulse import RayGone
from bapo.train.cluster.ray import Hello, Lost, Missing, Silent
from bapo.train.machine import code_digest
from bapo.types import Status
from tests.tiny.models import tiny

SAMPLING = Sampling(1.0)
NEVER = 10**9


def request(id, tokens=10):
    return Request(context=[3, 5, id % 7 + 1], position=0, seed=id, max_new_tokens=tokens, id=id)


class Call:
    """An answer that is there, or never comes."""

    def __init__(self, result, *, silent=False):
        self.result, self.silent = result, silent
        self.seconds = NEVER if silent else 0.0

    def answer(self, seconds):
        if self.silent:
            raise Silent("it has not answered")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Member:
    """An actor whose calls happen in this process, until its number of calls is used up."""

    def __init__(self, name, lives=NEVER, *, how="dies", after=False):
        self.name, self.lives, self.how, self.after = name, lives, how, after
        self.engine = LocalEngine(tiny(), slots=4)
        self.worker = Worker(self.engine)
        self.process, self.killed = None, False

    def call(self, method, *given, what):
        self.lives -= 1
        if self.lives < 0:
            if self.after:
                getattr(self, method)(*given)  # done, but nobody hears of it
            return Call(Lost(f"{self.name} died"), silent=self.how == "is silent")
        try:
            return Call(getattr(self, method)(*given))
        except (Missing, WrongWeights, RayGone) as error:
            return Call(error)

    def hello(self):
        return Hello(("here", 1), "here", code_digest())

    def load(self, parcel, version, expected, told):
        if self.how == "is wrong":
            raise WrongWeights("the head is stale")
        self.worker.load(parcel, version=version)
        return 1e-6

    def work(self, requests, sampling, seconds):
        if requests:
            self.worker.give(requests, sampling)
        return Answer.of(self.worker.work(0.0), 0.1)  # one token of each response

    def park(self):
        return Answer.of(self.worker.park(), 0.0)

    def greet(self, hello):
        self.process = hello.process
        hello.check(f"{self.name} on {hello.node}")

    def kill(self):
        self.killed = True


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(fleet_module, "answered", lambda calls, seconds: [c for c in calls if not c.silent])
    monkeypatch.setattr(fleet_module.time, "sleep", lambda seconds: None)


def published(version=0, shift=0.0):
    weights = [(name, weight.detach() + shift) for name, weight in tiny().named_parameters()]
    return Published(version, weights, "", Probe([], np.zeros((0, 0), np.float32), 1.0))


def made(*firsts, even=False, slots=4):
    """A fleet whose first members are these; whoever replaces one lives for ever."""
    spawned = list(firsts)
    places = [0] * len(firsts)
    told, restarts = [], []

    def spawn(place):
        places[place] += 1
        if places[place] == 1:
            return firsts[place]
        spawned.append(Member(f"rollout {place}"))
        return spawned[-1]

    made = Fleet(
        spawn,
        len(firsts),
        slots=slots,
        even=even,
        silence_seconds=60,
        start_seconds=60,
    )
    made.say, made.restarted = told.append, restarts.append
    return SimpleNamespace(fleet=made, members=spawned, told=told, restarts=restarts)


def collected(fleet, parts=None):
    """Collect until all is done: what came for each request, in order."""
    parts = {} if parts is None else parts
    for _ in range(300):
        for id, segment in fleet.collect(0):
            parts.setdefault(id, []).append(segment)
        if not fleet.known:
            return parts
    raise AssertionError(f"{fleet.known} never came back")


@pytest.fixture(scope="module")
def alone():
    """What one engine alone would sample."""
    engine = LocalEngine(tiny(), slots=4)
    engine.load(list(engine.model.named_parameters()), version=0)
    return generate(engine, [request(id) for id in range(12)], SAMPLING)


def assert_like(parts, alone):
    assert parts.keys() == set(range(len(alone)))
    for id, segments in parts.items():
        assert [segment.status for segment in segments[:-1]] == [None] * (len(segments) - 1)
        assert join(segments).status is Status.TRUNCATED
        assert join(segments).tokens == alone[id].tokens


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("lives", range(9))
def test_a_member_may_die_at_any_call(alone, lives, after, even):
    ours = made(Member("rollout 0", lives, after=after), Member("rollout 1"), even=even)
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    assert_like(collected(ours.fleet), alone)
    assert ours.members[0].killed
    assert [line.restarts for line in ours.fleet.lines()] == [1, 0]
    assert [(restart.who, restart.why) for restart in ours.restarts] == [("rollout 0", "rollout 0 died")]


def test_a_member_that_has_nothing_to_do_has_no_speed():
    ours = made(Member("rollout 0"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(4)], SAMPLING)
    speeds = []
    ours.fleet.watch = lambda: speeds.append(ours.fleet.lines()[0].tokens_per_second)
    collected(ours.fleet)
    assert max(speeds) > 0
    assert ours.fleet.lines()[0].tokens_per_second == 0
    assert ours.fleet.lines()[0].doing == "idle"


@pytest.mark.parametrize("lives", [1, 2, 5])
def test_a_silent_member_is_replaced_like_a_dead_one(alone, lives):
    ours = made(Member("rollout 0", lives, how="is silent"), Member("rollout 1"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    assert_like(collected(ours.fleet), alone)
    assert "has not answered" in ours.restarts[0].why


@pytest.mark.parametrize(("lives", "tokens"), [(2, 0), (3, 4), (5, 12)])  # start, load, then a token of each response
def test_a_restart_says_what_became_of_the_responses(alone, lives, tokens):
    ours = made(Member("rollout 0", lives, after=True), Member("rollout 1"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(8)], SAMPLING)
    assert_like(collected(ours.fleet), alone[:8])
    (restart,) = ours.restarts
    assert (restart.responses, restart.tokens) == (4, tokens), "tokens that nobody heard of are not kept"
    assert "its 4 responses " in restart.line()


def test_a_member_with_wrong_weights_samples_nothing(alone):
    ours = made(Member("rollout 0", how="is wrong"), Member("rollout 1"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    assert_like(collected(ours.fleet), alone)
    assert ours.members[0].engine.version == -1
    assert "the head is stale" in ours.restarts[0].why


def test_lost_weights_are_asked_for_again(alone):
    ours = made(Member("rollout 0"), Member("rollout 1"))
    ours.members[1].load = lambda *_: (_ for _ in ()).throw(Missing("it was handed nothing"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    parts = {}
    while not ours.fleet.lacking:
        for id, segment in ours.fleet.collect(0):
            parts.setdefault(id, []).append(segment)
    assert not ours.members[1].killed
    assert ours.told == ["the weights must be published again: it was handed nothing"]
    del ours.members[1].load
    ours.fleet.load(published(), version=0)
    assert_like(collected(ours.fleet, parts), alone)


def test_weights_that_no_engine_accepts_end_the_run():
    ours = made(Member("rollout 0", how="is wrong"))
    ours.fleet.spawn = lambda place: Member("rollout 0", how="is wrong")
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(0)], SAMPLING)
    with pytest.raises(ClusterError, match="rollout 0 failed 3 times while loading weights: the head is stale"):
        collected(ours.fleet)


@pytest.mark.parametrize("lives", [NEVER, 5, 6])
def test_new_weights_reach_every_member_and_versions_never_fall(lives):
    ours = made(Member("rollout 0", lives), Member("rollout 1"))
    ours.fleet.load(published(0), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    parts = {}
    for _ in range(4):
        for id, segment in ours.fleet.collect(0):
            parts.setdefault(id, []).append(segment)
    ours.fleet.load(published(1, shift=0.02), version=1)
    collected(ours.fleet, parts)
    versions = [join(segments).versions for segments in parts.values()]
    assert all(found == sorted(found) for found in versions)
    assert {version for found in versions for version in found} == {0, 1}
    assert all(len(found) == 10 for found in versions)
    assert all(line.version == 1 for line in ours.fleet.lines())


@pytest.mark.parametrize("lives", [NEVER, 4, 5])
def test_park_gives_everything_back_even_from_a_dying_member(lives):
    ours = made(Member("rollout 0", lives), Member("rollout 1"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    parts = {}
    for _ in range(3):
        for id, segment in ours.fleet.collect(0):
            parts.setdefault(id, []).append(segment)
    ours.fleet.park()
    for id, segment in ours.fleet.collect(0):
        parts.setdefault(id, []).append(segment)
    assert {id: join(segments).status for id, segments in parts.items()} == dict.fromkeys(range(12), Status.PARKED)
    assert not ours.fleet.known
    ours.fleet.submit([request(id + 100) for id in range(3)], Sampling(0.5))  # and it can do something else
    assert collected(ours.fleet).keys() == {100, 101, 102}


def test_requests_are_divided_evenly_and_in_order_if_asked():
    first, second = Member("rollout 0"), Member("rollout 1")
    ours = made(first, second, even=True)
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(7)], SAMPLING)
    while not ours.fleet.members[0].given:
        ours.fleet.collect(0)
    assert list(ours.fleet.members[0].given) == [0, 2, 4, 6]
    assert list(ours.fleet.members[1].given) == [1, 3, 5]


def test_nobody_waits_for_a_place_that_stays_empty():
    """Not even with `even`, where whoever starts is waited for; and it has its part again when it comes back."""
    first, second = Member("rollout 0"), Member("rollout 1", 3)  # start, load, work: it dies in its second call to work
    ours = made(first, second, even=True)
    starting = Member("rollout 1")
    starting.call = lambda method, *given, what: Call(None, silent=True)
    ours.fleet.spawn = lambda place: starting
    ours.fleet.start_seconds = 2 * NEVER  # it may still come
    for version in range(2):
        ours.fleet.load(published(version), version=version)
        ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
        assert collected(ours.fleet).keys() == set(range(12))
    assert [line.doing.split()[0] for line in ours.fleet.lines()] == ["idle", "starting"]
    ours.fleet.members[1].renew(Member("rollout 1"))
    ours.fleet.load(published(2), version=2)
    while any(member.version != 2 for member in ours.fleet.members):
        ours.fleet.collect(0)
    ours.fleet.submit([request(id) for id in range(4)], SAMPLING)
    ours.fleet._divide()
    assert [[request.id for request in member.portion] for member in ours.fleet.members] == [[0, 2], [1, 3]]


def test_without_a_fit_member_the_fleet_gives_up(monkeypatch):
    ours = made(Member("rollout 0", 0))
    ours.fleet.spawn = lambda place: Member("rollout 0", 0)
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(0)], SAMPLING)
    ours.fleet.start_seconds, ours.fleet._unfit_seconds = 1.0, 9.0
    with pytest.raises(ClusterError, match="no rollout actor has been fit"):
        collected(ours.fleet)


def test_nobody_is_replaced_where_ray_itself_has_gone():
    ours = made(member := Member("rollout 0"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(0)], SAMPLING)
    member.work = lambda *_: (_ for _ in ()).throw(RayGone("Ray is lost"))
    with pytest.raises(RayGone):
        collected(ours.fleet)
    assert ours.restarts == []


def test_other_code_is_refused():
    member = Member("rollout 0")
    member.hello = lambda: Hello(("there", 1), "far away", code_digest() | {"bapo": "0.0.9 (abc)"})
    ours = made(member)
    with pytest.raises(ClusterError, match=r"rollout 0 on far away runs bapo 0.0.9 \(abc\) instead of 0.1.0"):
        ours.fleet.ready()


def test_a_lost_answer_is_a_lost_member(alone):
    """What a member has sampled and we never heard of must be sampled again, not skipped."""
    ours = made(first := Member("rollout 0"), Member("rollout 1"))
    works = []
    work = first.work

    def lose_the_third(*given):
        works.append(work(*given))
        if len(works) == 3:
            raise Missing("the answer is lost")
        return works[-1]

    first.work = lose_the_third
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    assert_like(collected(ours.fleet), alone)
    assert first.killed


def test_time_in_which_nobody_listens_makes_nobody_unfit(alone):
    ours = made(Member("rollout 0"))
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    ours.fleet.collect(0)
    ours.fleet._listened -= 1000  # an update that took long
    ours.fleet.load(published(1), version=1)
    assert len(collected(ours.fleet)) == 12


def test_actors_are_seen_while_they_start():
    ours = made(Member("rollout 0"), Member("rollout 1", 0, how="is silent"))
    ours.fleet.members[1].call.seconds = 12.3
    seen = []
    ours.fleet.watch = lambda: seen.append([line.doing for line in ours.fleet.lines()])
    before = [line.doing for line in ours.fleet.lines()]
    assert before == ["starting for 0 s", "starting for 12 s"]
    ours.fleet.hear()
    assert seen == [["idle", "starting for 12 s"]]


def test_nobody_is_unfit_before_there_are_weights():
    """The learner may take longer to start than a rollout actor may be unfit."""
    ours = made(Member("rollout 0"))
    ours.fleet.hear()
    ours.fleet._unfit_seconds = 1000
    ours.fleet.hear()
    ours.fleet.load(published(), version=0)
    ours.fleet.submit([request(0)], SAMPLING)
    assert len(collected(ours.fleet)) == 1


def test_the_oldest_weights_at_work_are_known():
    ours = made(Member("rollout 0"), Member("rollout 1", 4, how="is silent"))
    ours.fleet.silence_seconds = 2 * NEVER  # nobody is replaced
    assert ours.fleet.oldest is None
    ours.fleet.load(published(3), version=3)
    ours.fleet.submit([request(id) for id in range(12)], SAMPLING)
    for _ in range(4):
        ours.fleet.collect(0)
    ours.fleet.load(published(4), version=4)
    for _ in range(4):
        ours.fleet.collect(0)
    assert [line.version for line in ours.fleet.lines()] == [4, 3]
    assert ours.fleet.oldest == 3
