"""The scheduler on a real engine wherever it can be; on a counting fake where the numbers are to be exact."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.rollout import rounds
from bapo.rollout.engine import NOTHING_LOADED, Request, Sampled, Sampling, Segment, TellSampled
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.randomness import response_seed
from bapo.rollout.scheduler import Rollout, Scheduler, SchedulerMetrics, new_group
from bapo.types import Group, Problem, Status
from tests.rollouts import forcing_limit
from tests.tiny.models import STOP, tiny

SAMPLING = Sampling(stop_ids=frozenset({STOP}))


ENGINE = LocalEngine(tiny(), slots=4)


def problem(id: int) -> Problem:
    return Problem(id=f"p{id}", prompt="?", answer=[id])


def groups(ids: Sequence[int], *, responses: int = 3) -> list[Group]:
    return [new_group(id, problem(id), [5, 6 + id % 8], responses=responses, seed=1) for id in ids]


class CountingEngine:
    """Gives every response the length written in its prompt; the first in line gets all it needs before the next.

    Each collect gives the segments of one request.
    """

    draws_by_position = gives_entropies = True
    resting = False

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int | None]] = []
        self.version = NOTHING_LOADED
        self.found: list[tuple[int, Segment]] = []

    def load(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        self.version = version

    def submit(
        self, requests: Sequence[Request], sampling: Sampling, *, token_budget: int | None = None, turns: bool = False
    ) -> None:
        self.calls.append(([request.seed for request in requests], token_budget))
        left = token_budget if token_budget is not None else 10**9
        for request in requests:
            missing = request.context[0] - request.position
            count = min(missing, left)
            left -= count
            status = Status.STOPPED if count == missing else Status.PARKED
            segment = Segment([9] * count, [-0.5] * count, [0.5] * count, [self.version] * count, status)
            self.found.append((request.id, segment))

    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        found, self.found = self.found[:1], self.found[1:]
        return found

    def park(self) -> None:
        """Nothing is ever unfinished."""


def run(scheduler: Scheduler, engine: Any, *, version: int, tell: TellSampled | None = None) -> Rollout:
    """One run with the weights of this version."""
    engine.load(engine.model.named_parameters() if engine is ENGINE else [], version=version)
    return rounds.run(scheduler, engine, tell=tell)


def counted_group(id: int, *lengths: int) -> Group:
    """A group whose responses take exactly these many tokens from the CountingEngine; response i has seed 10 id + i."""
    group = new_group(id, problem(id), [1], responses=len(lengths), seed=0)
    for index, (trajectory, length) in enumerate(zip(group.trajectories, lengths, strict=True)):
        trajectory.prompt, trajectory.seed = [length], 10 * id + index
    return group


def content(rollout: Rollout) -> list[tuple[int, list[list[int]], list[list[float]], list[list[int]]]]:
    return [
        (
            group.id,
            [t.tokens for t in group.trajectories],
            [t.behavior_logprobs for t in group.trajectories],
            [t.versions for t in group.trajectories],
        )
        for group in rollout.groups
    ]


def assert_conserved(scheduler: Scheduler) -> None:
    totals = scheduler.totals()
    assert totals.sampled_tokens == totals.returned_tokens + totals.held_tokens + totals.wasted_tokens


# Budgets


def test_without_a_budget_every_response_finishes_in_its_run():
    scheduler = Scheduler(SAMPLING, max_response_tokens=20)
    scheduler.admit(groups([0, 1, 2]))
    rollout = run(scheduler, ENGINE, version=0)
    assert [group.id for group in rollout.groups] == [0, 1, 2]
    assert all(group.finished for group in rollout.groups)
    assert rollout.metrics.sampled_tokens == rollout.metrics.returned_tokens > 0
    assert scheduler.totals() == rollout.metrics


def test_a_budget_larger_than_anything_equals_none():
    rollouts = []
    for budget in (None, 10**6):
        scheduler = Scheduler(SAMPLING, max_response_tokens=20, token_budget=budget)
        scheduler.admit(groups([0, 1, 2]))
        rollouts.append(run(scheduler, ENGINE, version=0))
    assert content(rollouts[0]) == content(rollouts[1])
    assert rollouts[0].metrics == rollouts[1].metrics


@pytest.mark.numeric
def test_sittings_under_equal_weights_give_the_responses_of_one_sitting():
    whole = Scheduler(SAMPLING, max_response_tokens=20)
    whole.admit(groups([0, 1, 2, 3]))
    expected = {group.id: group for group in run(whole, ENGINE, version=0).groups}
    responses = [t for group in expected.values() for t in group.trajectories]
    requests = [Request(t.prompt, 0, 0, len(t.tokens)) for t in responses]
    limit = forcing_limit(ENGINE.model, requests, responses, SAMPLING.temperature)
    scheduler = Scheduler(SAMPLING, max_response_tokens=20, token_budget=33)
    scheduler.admit(groups([0, 1, 2, 3]))
    seen = []
    for version in range(20):
        rollout = run(scheduler, ENGINE, version=version)
        assert rollout.metrics.sampled_tokens <= 33
        assert_conserved(scheduler)
        for group in rollout.groups:
            seen.append(group.id)
            for got, want in zip(group.trajectories, expected[group.id].trajectories, strict=True):
                assert (got.tokens, got.status) == (want.tokens, want.status)
                assert got.behavior_logprobs == pytest.approx(want.behavior_logprobs, rel=0, abs=limit)
                assert got.versions == sorted(got.versions)
                assert len(got.tokens) == len(got.behavior_logprobs) == len(got.entropies) == len(got.versions)
    assert sorted(seen) == [0, 1, 2, 3]
    assert scheduler.totals().resumed > 0
    assert max(t.versions[-1] for group in expected.values() for t in group.trajectories) == 0


def test_parked_responses_go_first_and_the_oldest_group_before_all():
    engine = CountingEngine()
    scheduler = Scheduler(SAMPLING, max_response_tokens=50, token_budget=10)
    scheduler.admit([counted_group(0, 4, 9), counted_group(1, 5)])
    run(scheduler, engine, version=0)  # response 0 ends, response 1 is parked with 6 tokens of 9
    scheduler.admit([counted_group(2, 2)])
    rollout = run(scheduler, engine, version=1)
    assert engine.calls == [([0, 1, 10], 10), ([1, 10, 20], 10)]
    assert [group.id for group in rollout.groups] == [0, 1, 2]
    assert rollout.groups[0].trajectories[1].versions == [0] * 6 + [1] * 3


def test_a_parked_response_of_a_young_group_goes_before_an_unstarted_one_of_an_old_group():
    scheduler = Scheduler(SAMPLING, max_response_tokens=50, token_budget=10)
    old, young = counted_group(0, 3), counted_group(1, 3)
    scheduler.admit([old, young])
    state = scheduler.state_dict()
    saved = state["groups"][1]["trajectories"][0]
    saved.update(tokens=[9], behavior_logprobs=[-0.5], entropies=[0.5], versions=[0])
    scheduler.load_state_dict(state)
    engine = CountingEngine()
    run(scheduler, engine, version=1)
    assert engine.calls[0][0] == [10, 0]


def test_counts_by_hand():
    scheduler = Scheduler(SAMPLING, max_response_tokens=50, token_budget=10)
    scheduler.admit([counted_group(0, 4, 9), counted_group(1, 5), counted_group(2, 1)])
    first = run(scheduler, CountingEngine(), version=0)
    assert first.groups == []
    assert first.metrics == SchedulerMetrics(sampled_tokens=10, parked=1, waiting=2, held_tokens=10)
    second = run(scheduler, CountingEngine(), version=1)
    assert second.metrics == SchedulerMetrics(sampled_tokens=9, returned_tokens=19, finished_groups=3, resumed=1)
    assert scheduler.totals() == SchedulerMetrics(sampled_tokens=19, returned_tokens=19, finished_groups=3, resumed=1)


# Age


def test_drop_gives_up_the_whole_group_once_it_is_older_than_the_maximum():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=1, over_age="drop")
    scheduler.admit([counted_group(0, 2, 50), counted_group(1, 5)])
    assert run(scheduler, CountingEngine(), version=0).metrics.parked == 1  # 2 + 8 of 50
    assert run(scheduler, CountingEngine(), version=1).dropped == []  # 18 of 50, age 1
    rollout = run(scheduler, CountingEngine(), version=2)  # age 2: too old; the budget goes to group 1
    assert [group.id for group in rollout.dropped] == [0]
    assert [t.status for t in rollout.dropped[0].trajectories] == [Status.DROPPED] * 2
    assert not rollout.dropped[0].finished
    assert [group.id for group in rollout.groups] == [1]
    assert rollout.metrics == SchedulerMetrics(
        sampled_tokens=5, returned_tokens=5, wasted_tokens=20, finished_groups=1, dropped_groups=1, dropped=2
    )
    assert_conserved(scheduler)


def test_finish_completes_a_group_on_its_last_chance_whatever_the_budget():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=1, over_age="finish")
    scheduler.admit([counted_group(0, 2, 50), counted_group(1, 5)])
    run(scheduler, CountingEngine(), version=0)
    engine = CountingEngine()
    rollout = run(scheduler, engine, version=1)  # age 1, at the next run it would be 2
    assert engine.calls == [([1], None)]  # 42 tokens: nothing of the budget is left for group 1
    assert [group.id for group in rollout.groups] == [0]
    assert rollout.metrics == SchedulerMetrics(
        sampled_tokens=42, returned_tokens=52, finished_groups=1, resumed=1, forced=1, waiting=1
    )
    assert rollout.groups[0].trajectories[1].versions == [0] * 8 + [1] * 42
    assert run(scheduler, CountingEngine(), version=2).metrics.finished_groups == 1


def test_forced_tokens_come_out_of_the_budget():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=1)
    scheduler.admit([counted_group(0, 14), counted_group(1, 50)])
    run(scheduler, CountingEngine(), version=0)
    engine = CountingEngine()
    assert run(scheduler, engine, version=1).metrics.sampled_tokens == 10
    assert engine.calls == [([0], None), ([10], 6)]


def test_finish_at_age_zero_leaves_nothing_half_sampled():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=0)
    scheduler.admit([counted_group(0, 4), counted_group(1, 9, 3), counted_group(2, 7)])
    engine = CountingEngine()
    rollout = run(scheduler, engine, version=5)
    # Group 1 is begun with the budget's last 6 tokens, so both its responses are completed; group 2 waits untouched.
    assert engine.calls == [([0, 10, 11, 20], 10), ([10, 11], None)]
    assert [group.id for group in rollout.groups] == [0, 1]
    assert (rollout.metrics.forced, rollout.metrics.waiting, rollout.metrics.parked) == (2, 1, 0)
    assert {v for group in rollout.groups for t in group.trajectories for v in t.versions} == {5}


def test_a_learner_that_outruns_its_pace_loses_groups_but_not_the_bound():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=2, over_age="finish")
    scheduler.admit([counted_group(0, 30)])
    run(scheduler, CountingEngine(), version=0)
    rollout = run(scheduler, CountingEngine(), version=3)
    assert (rollout.groups, rollout.metrics.dropped, rollout.metrics.wasted_tokens) == ([], 1, 10)


def test_complete_responses_age_while_they_wait_for_their_group():
    # Response 0 is complete at version 0; response 1 is first sampled at version 2. The group's age counts from 0.
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=2, over_age="drop")
    scheduler.admit([counted_group(0, 10, 40)])
    for version in range(3):
        assert run(scheduler, CountingEngine(), version=version).dropped == []
    assert run(scheduler, CountingEngine(), version=3).metrics.dropped == 2


def test_a_response_the_engine_gave_up_takes_its_group_along():
    class Failing(CountingEngine):
        def submit(self, requests, sampling, **rest):
            super().submit(requests, sampling, **rest)
            id, segment = self.found[0]
            self.found[0] = id, replace(segment, status=Status.DROPPED)

    scheduler = Scheduler(SAMPLING, max_response_tokens=99)
    scheduler.admit([counted_group(0, 3, 4), counted_group(1, 5)])
    rollout = run(scheduler, Failing(), version=0)
    assert [group.id for group in rollout.groups] == [1]
    assert (rollout.metrics.dropped, rollout.metrics.wasted_tokens) == (2, 7)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=8),
    budget=st.integers(1, 40),
    max_age=st.integers(0, 4),
    policy=st.sampled_from(["finish", "drop"]),
    pace=st.integers(1, 3),
    jumps=st.lists(st.integers(0, 5), min_size=12, max_size=12),
)
def test_no_returned_token_is_older_than_promised(lengths, budget, max_age, policy, pace, jumps):
    scheduler = Scheduler(
        SAMPLING,
        max_response_tokens=99,
        token_budget=budget,
        max_age=max_age,
        over_age=policy,
        versions_per_run=pace,
    )
    version, honest = 0, True
    for step, jump in enumerate(jumps):
        if step < len(lengths):
            scheduler.admit([counted_group(step, *lengths[step])])
        rollout = run(scheduler, CountingEngine(), version=version)
        for group in rollout.groups:
            assert group.finished
            for trajectory in group.trajectories:
                assert version - trajectory.versions[0] <= max_age
                assert trajectory.versions == sorted(trajectory.versions)
        if rollout.metrics.forced == 0:
            assert rollout.metrics.sampled_tokens <= budget
        if policy == "finish" and honest:
            assert rollout.dropped == []
        assert_conserved(scheduler)
        version += jump
        honest = honest and jump <= pace


# Watched


def test_a_watch_hears_of_all_engine_calls_of_a_run_together():
    told = []
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=1)
    scheduler.admit([counted_group(0, 14), counted_group(1, 50)])
    run(scheduler, CountingEngine(), version=0, tell=told.append)
    assert told == [Sampled(0, 2, 0), Sampled(0, 2, 10), Sampled(0, 2, 10)]
    told.clear()
    # Group 0 is due and is completed first, with 4 tokens; 6 are left for group 1.
    run(scheduler, CountingEngine(), version=1, tell=told.append)
    assert told == [Sampled(0, 2, 0), Sampled(1, 2, 4), Sampled(1, 2, 4), Sampled(1, 2, 10)]

    told.clear()
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=0)
    scheduler.admit([counted_group(0, 4, 14), counted_group(1, 5)])
    run(scheduler, CountingEngine(), version=0, tell=told.append)
    # The budget ends within the second response, which is then completed with 8 more, for it may not wait.
    counts = [(0, 0), (1, 4), (1, 10), (1, 10), (1, 10), (2, 18)]
    assert told == [Sampled(complete, 3, tokens) for complete, tokens in counts]


def test_a_watch_changes_nothing_and_ends_with_all(monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
    rollouts, told = [], []
    for tell in (None, told.append):
        scheduler = Scheduler(SAMPLING, max_response_tokens=20)
        scheduler.admit(groups([0, 1, 2]))
        rollouts.append(run(scheduler, ENGINE, version=0, tell=tell))
    assert content(rollouts[0]) == content(rollouts[1])
    assert rollouts[0].metrics == rollouts[1].metrics
    assert (told[0], told[-1]) == (Sampled(0, 9, 0), Sampled(9, 9, rollouts[0].metrics.sampled_tokens))


# Saved state


@pytest.mark.parametrize("save_at", [1, 2, 4])
def test_a_saved_scheduler_continues_identically(save_at):
    def fresh() -> Scheduler:
        return Scheduler(SAMPLING, max_response_tokens=24, token_budget=40, max_age=2, over_age="finish")

    def step(scheduler: Scheduler, version: int) -> Rollout:
        scheduler.admit(groups([2 * version, 2 * version + 1]))
        return run(scheduler, ENGINE, version=version)

    original = fresh()
    for version in range(save_at):
        step(original, version)
    text = json.dumps(original.state_dict())
    restored = fresh()
    restored.load_state_dict(json.loads(text))
    assert restored.state_dict() == original.state_dict()
    assert restored.totals() == original.totals()
    assert original.totals().parked > 0
    for version in range(save_at, save_at + 4):
        ours, theirs = step(original, version), step(restored, version)
        assert content(ours) == content(theirs)  # bit for bit: log-probs too
        assert ours.metrics == theirs.metrics
        assert [group.problem for group in ours.groups] == [group.problem for group in theirs.groups]
    assert original.state_dict() == restored.state_dict()


def test_a_saved_state_is_a_copy():
    scheduler = Scheduler(SAMPLING, max_response_tokens=24, token_budget=5)
    scheduler.admit(groups([0]))
    run(scheduler, ENGINE, version=0)
    state = scheduler.state_dict()
    text = json.dumps(state)
    run(scheduler, ENGINE, version=1)
    assert json.dumps(state) == text


def test_an_engine_that_dies_loses_nothing():
    class Dying(CountingEngine):
        def submit(self, requests, sampling, **rest):
            if self.calls:
                raise RuntimeError("engine died")
            super().submit(requests, sampling, **rest)

    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=10, max_age=1)
    scheduler.admit([counted_group(0, 14), counted_group(1, 50)])
    run(scheduler, CountingEngine(), version=0)
    with pytest.raises(RuntimeError, match="engine died"):
        run(scheduler, Dying(), version=1)  # group 0 was completed before
    assert_conserved(scheduler)
    rollout = run(scheduler, CountingEngine(), version=1)
    assert [group.id for group in rollout.groups] == [0]
    assert rollout.groups[0].trajectories[0].versions == [0] * 10 + [1] * 4
    assert_conserved(scheduler)


# New groups, errors


def test_new_groups_have_their_own_seeds_and_prompts():
    group = new_group(7, problem(7), (5, 6), responses=3, seed=42)
    assert [t.seed for t in group.trajectories] == [response_seed(42, 7, index) for index in range(3)]
    assert all(t.prompt == [5, 6] and t.status is Status.PARKED for t in group.trajectories)
    assert group.trajectories[0].prompt is not group.trajectories[1].prompt
    with pytest.raises(ValueError, match="responses=0 makes an empty group 7"):
        new_group(7, problem(7), [5], responses=0, seed=0)
    with pytest.raises(ValueError, match=r"problem 'p7' has no prompt tokens.*beginning-of-sequence"):
        new_group(7, problem(7), [], responses=1, seed=0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_response_tokens": 0}, "max_response_tokens=0 allows no response"),
        ({"token_budget": 0}, "token_budget=0 would never finish anything"),
        ({"max_age": -1}, "max_age=-1 is negative"),
        ({"over_age": "abort"}, "over_age='abort' is neither 'finish' nor 'drop'"),
        ({"versions_per_run": 0}, "versions_per_run=0"),
    ],
)
def test_impossible_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(SAMPLING, **{"max_response_tokens": 8, **setting})


def test_what_cannot_be_admitted():
    scheduler = Scheduler(SAMPLING, max_response_tokens=8)
    scheduler.admit(groups([4]))
    with pytest.raises(ValueError, match=r"group 4 \(problem 'p4'\) comes after group 4.*order they are drawn"):
        scheduler.admit(groups([4]))
    with pytest.raises(ValueError, match=r"group 5 \(problem 'p5'\) has no responses"):
        scheduler.admit([Group(5, problem(5), [])])
    begun = groups([6])
    begun[0].trajectories[1].tokens.append(9)
    with pytest.raises(ValueError, match=r"group 6 .* has responses that were begun"):
        scheduler.admit(begun)


def test_versions_cannot_go_back():
    scheduler = Scheduler(SAMPLING, max_response_tokens=8)
    run(scheduler, ENGINE, version=3)
    with pytest.raises(ValueError, match="version=2 is older than the last run's 3"):
        run(scheduler, ENGINE, version=2)


def test_an_engine_that_breaks_its_promises_is_named(monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.QUIET_SECONDS", 0)

    class Short(CountingEngine):
        def collect(self, timeout=None):
            return []

    class Old(CountingEngine):
        def collect(self, timeout=None):
            return [(id, replace(s, versions=[v - 5 for v in s.versions])) for id, s in super().collect(timeout)]

    class Strange(CountingEngine):
        def collect(self, timeout=None):
            return [(id + 1, segment) for id, segment in super().collect(timeout)]

    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=3)
    scheduler.admit([counted_group(0, 9)])
    with pytest.raises(RuntimeError, match="Short has sampled nothing for 0 s while 1 requests are under way"):
        run(scheduler, Short(), version=0)
    run(scheduler, CountingEngine(), version=0)
    with pytest.raises(RuntimeError, match="sampled with version -4 after version 0"):
        run(scheduler, Old(), version=1)
    with pytest.raises(RuntimeError, match=r"segment for request \d+, which is not under way"):
        run(scheduler, Strange(), version=1)


# The verbs a run is made of


def test_responses_under_way_are_not_asked_for_again_and_may_come_in_pieces():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99)
    scheduler.admit([counted_group(0, 4), counted_group(1, 6)])
    first = scheduler.requests(3)
    assert first is not None
    assert [request.context for request in first.requests] == [[4], [6]]
    assert scheduler.requests(3) is None
    one, other = (request.id for request in first.requests)
    scheduler.accept(one, Segment([9] * 4, [-0.5] * 4, [0.5] * 4, [3] * 4, Status.STOPPED))
    scheduler.accept(other, Segment([9], [-0.5], [0.5], [3]))
    rollout = scheduler.take()
    assert [group.id for group in rollout.groups] == [0]
    assert (rollout.metrics.sampled_tokens, rollout.metrics.parked) == (5, 1)

    scheduler.admit([counted_group(2, 2)])
    second = scheduler.requests(4)
    assert second is not None
    assert [request.context for request in second.requests] == [[2]]  # response 1 is still under way
    scheduler.accept(other, Segment([9] * 5, [-0.5] * 5, [0.5] * 5, [4] * 5, Status.STOPPED))
    rollout = scheduler.take()
    assert [group.id for group in rollout.groups] == [1]
    assert rollout.groups[0].trajectories[0].versions == [3, 4, 4, 4, 4, 4]
    assert_conserved(scheduler)


def segment_of(count: int, version: int, status: Status | None) -> Segment:
    return Segment([9] * count, [-0.5] * count, [0.5] * count, [version] * count, status)


def test_a_group_given_up_while_it_is_under_way_stays_given_up():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, max_age=2)
    scheduler.admit([counted_group(0, 9)])
    (request,) = scheduler.requests(0).requests
    scheduler.accept(request.id, segment_of(4, 0, None))
    assert scheduler.take().groups == []
    assert scheduler.requests(5) is None  # too old: given up, though an engine still works on it
    scheduler.accept(request.id, segment_of(5, 0, Status.STOPPED))
    rollout = scheduler.take()
    assert (rollout.groups, [group.id for group in rollout.dropped]) == ([], [0])
    assert scheduler.totals().wasted_tokens == 9
    assert_conserved(scheduler)


def test_a_sibling_that_comes_late_does_not_change_a_group_that_was_handed_out():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99)
    scheduler.admit([counted_group(0, 4, 6)])
    one, other = (request.id for request in scheduler.requests(0).requests)
    scheduler.accept(one, segment_of(1, 0, Status.DROPPED))
    (group,) = scheduler.take().dropped
    scheduler.accept(other, segment_of(6, 0, Status.STOPPED))
    assert group.trajectories[1].tokens == []
    assert scheduler.totals().wasted_tokens == 7
    assert_conserved(scheduler)


def test_what_is_due_is_asked_for_however_often_somebody_asked_before():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99, token_budget=4, max_age=0)
    scheduler.admit([counted_group(0, 9)])
    (request,) = scheduler.requests(0).requests
    assert scheduler.requests(0) is None
    scheduler.accept(request.id, segment_of(4, 0, Status.PARKED))
    due = scheduler.requests(0)  # it may not wait for the next version
    assert due.token_budget is None
    scheduler.accept(due.requests[0].id, segment_of(5, 0, Status.STOPPED))
    assert [group.id for group in scheduler.take().groups] == [0]


def test_a_loaded_state_forgets_what_was_under_way():
    scheduler = Scheduler(SAMPLING, max_response_tokens=99)
    scheduler.admit([counted_group(0, 4)])
    state = scheduler.state_dict()
    assert scheduler.requests(0) is not None
    scheduler.load_state_dict(state)
    assert len(scheduler.requests(0).requests) == 1
