"""The buffer on hand-made groups: passes by hand, then what holds for every sequence of adds, draws and versions."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.buffer import Buffer, BufferMetrics, NoBatch
from bapo.types import Group, Problem, Status, Trajectory, batches_per_pass, group_from_state, group_state


def response(versions: Sequence[int], reward: float | None, status: Status = Status.STOPPED) -> Trajectory:
    count = len(versions)
    return Trajectory(
        prompt=[1, 2],
        seed=7,
        tokens=[9] * count,
        behavior_logprobs=[-0.1] * count,
        entropies=[0.3] * count,
        versions=list(versions),
        status=status,
        reward=reward,
    )


def group(id: int, *versions: int, rewards: Sequence[float | None] = (0.0, 1.0)) -> Group:
    """A group whose first response has tokens of these versions; the others have none."""
    problem = Problem(id=f"p{id}", prompt="?", answer=[id])
    first, *others = rewards
    return Group(id, problem, [response(versions, first), *(response([], reward) for reward in others)])


def groups(ids: Sequence[int], version: int) -> list[Group]:
    return [group(id, version) for id in ids]


def ids(batch: Sequence[Group]) -> list[int]:
    return [member.id for member in batch]


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [id for batch in batches for id in batch]


def drain(buffer: Buffer, version: int) -> list[list[int]]:
    """Draw until the passes are done; one update per draw, from `version` on."""
    batches = []
    while isinstance(batch := buffer.draw(version=version), list):
        batches.append(ids(batch))
        version += 1
    return batches


def age(member: Group, version: int) -> int:
    return max((version - token for trajectory in member.trajectories for token in trajectory.versions), default=-1)


def test_one_pass_visits_every_group_once_in_batches_of_even_size():
    buffer = Buffer(batch_groups=2, max_staleness=2)
    buffer.add(groups(range(5), 0), version=0)
    batches = drain(buffer, 0)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sorted(flat(batches)) == [0, 1, 2, 3, 4]
    assert buffer.draw(version=3) is NoBatch.DONE
    assert buffer.metrics() == BufferMetrics(adds=1, draws=3, added=5, fresh=5, retired=5)


def test_a_skipped_update_is_a_visit_but_no_use():
    told = []
    buffer = Buffer(
        **{"batch_groups": 2, "reuse": 3, "max_staleness": 9, "replay_fraction": 0.5, "replay_max_age": 9},
        record=lambda event, group, **facts: told.append((event, group, facts)),
    )
    buffer.add(groups(range(2), 0), version=0)
    assert [member.uses for member in buffer.draw(version=0)] == [0, 0]
    drawn = buffer.draw(version=1)
    assert [member.uses for member in drawn] == [1, 1]
    buffer.skipped(drawn)
    assert sorted(told[-2:]) == [("skipped", 0, {"version": 1}), ("skipped", 1, {"version": 1})]
    again = Buffer(batch_groups=2, reuse=3, max_staleness=9, replay_fraction=0.5, replay_max_age=9)
    again.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    for other in (buffer, again):
        assert [member.uses for member in other.draw(version=2)] == [1, 1]  # the third pass, the second use
        other.add(groups([7, 8], 3), version=3)
        replayed = {member.id: member.uses for member in other.draw(version=3)}
        assert replayed == {7: 0, 8: 0, 0: 2, 1: 2}


def test_a_skipped_update_of_a_group_that_has_left_is_recorded():
    told = []
    buffer = Buffer(batch_groups=2, max_staleness=9, record=lambda event, group, **facts: told.append((event, group)))
    buffer.add(groups([3], 0), version=0)
    buffer.skipped(buffer.draw(version=0))
    assert [event for event, _ in told] == ["held", "trained", "retired", "skipped"]


@pytest.mark.parametrize(
    ("rewards", "cut", "signal"),
    [
        ((0.0, 1.0, 0.0), "", {"keep", "mask", "drop"}),
        ((0.0, 1.0, 0.0), "1", {"keep", "mask"}),  # those that are left earn the same
        ((0.0, 1.0, 0.0), "0", {"keep", "mask", "drop"}),
        ((0.0, 1.0, 0.0), "12", {"keep", "mask"}),  # one is left, which differs from the others
        ((0.0, 1.0, 0.0), "012", {"keep"}),
        ((1.0, 1.0, 1.0), "1", set()),
    ],
)
def test_a_group_has_a_signal_if_what_truncation_leaves_has_one(rewards, cut, signal):
    responses = [
        response([0, 0], reward, Status.TRUNCATED if str(index) in cut else Status.STOPPED)
        for index, reward in enumerate(rewards)
    ]
    found = set()
    for truncated in ("keep", "mask", "drop"):
        buffer = Buffer(batch_groups=1, max_staleness=2, truncated=truncated)
        added = buffer.add([Group(0, Problem("p", "?", [0]), responses)], version=0)
        assert len(added.groups) + len(added.filtered) == 1
        found |= {truncated} if added.groups else set()
    assert found == signal


def test_reuse_makes_whole_passes_each_in_its_own_order():
    buffer = Buffer(batch_groups=2, reuse=3, max_staleness=5)
    buffer.add(groups(range(4), 0), version=0)
    assert buffer.metrics().to_visit == 12
    batches = drain(buffer, 0)
    assert [len(batch) for batch in batches] == [2, 2, 2, 2, 2, 2]
    passes = [batches[i] + batches[i + 1] for i in (0, 2, 4)]
    assert [sorted(order) for order in passes] == [[0, 1, 2, 3]] * 3
    assert len({tuple(order) for order in passes}) > 1


def test_the_order_is_that_of_the_seed_the_rollout_and_the_pass():
    def orders(seed: int, arrival: Sequence[int] = range(6)) -> list[list[int]]:
        buffer = Buffer(batch_groups=6, reuse=2, max_staleness=9, seed=seed)
        result = []
        for rollout in range(2):
            buffer.add(groups(arrival, 2 * rollout), version=2 * rollout)
            result += drain(buffer, 2 * rollout)
        return result

    # The same on every machine and version of Python.
    assert orders(0) == [[2, 3, 0, 1, 5, 4], [4, 5, 3, 0, 1, 2], [3, 0, 2, 1, 5, 4], [5, 4, 3, 0, 1, 2]]
    assert len({tuple(order) for order in orders(0) + orders(1)}) == 8
    assert orders(0, arrival=[3, 5, 0, 1, 4, 2]) == orders(0)


def test_a_burst_makes_larger_batches_not_more_of_them():
    buffer = Buffer(batch_groups=4, max_batches=2, reuse=2, max_staleness=3)
    buffer.add(groups(range(15), 0), version=0)
    assert [len(batch) for batch in drain(buffer, 0)] == [8, 7, 8, 7]
    assert buffer.metrics().lost_fresh == 0


def sizes(count: int, batch_groups: int, max_batches: int | None = None, reuse: int = 1) -> list[int]:
    buffer = Buffer(batch_groups=batch_groups, max_batches=max_batches, reuse=reuse, max_staleness=9999, capacity=9999)
    buffer.add(groups(range(count), 0), version=0)
    return [len(batch) for batch in drain(buffer, 0)]


@pytest.mark.parametrize("batch_groups", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("max_batches", [None, 1, 3, 8])
def test_a_pass_is_cut_evenly_whatever_its_size(batch_groups: int, max_batches: int | None):
    """Against the definition, and against the cut into equal batches and a rest, where that one is even."""
    for count in range(1, 70):
        found = sizes(count, batch_groups, max_batches)
        batches = min(max(1, math.floor(count / batch_groups + 0.5)), max_batches or count)
        each, more = divmod(count, batches)
        assert found == [each + 1] * more + [each] * (batches - more), count
        full = math.ceil(count / batches)
        with_rest = [min(full, count - begin) for begin in range(0, count, full)]
        assert found == with_rest or len(with_rest) < batches or max(with_rest) - min(with_rest) > 1
        assert min(found) >= math.floor(2 / 3 * batch_groups) or count < batch_groups


def test_passes_that_used_to_end_in_a_rest():
    assert sizes(21, 4) == [5, 4, 4, 4, 4]
    assert sizes(41, 4) == [5, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    assert sizes(21, 4, reuse=2) == 2 * [5, 4, 4, 4, 4]


def test_what_is_left_of_a_pass_is_cut_again_after_a_loss():
    for lost in range(15):
        buffer = Buffer(batch_groups=4, max_batches=4, reuse=2, max_staleness=20)
        buffer.add([*groups(range(lost), 0), *groups(range(lost, 20), 9)], version=10)
        found = [len(buffer.draw(version=10))]
        left = buffer.metrics().to_visit - 20  # of the first pass
        found += [len(batch) for batch in drain(buffer, 21)]  # where those of version 0 are too old
        assert found[0] == 5
        second_pass = min(4, batches_per_pass(20 - lost, 4))
        rest, second = found[1:-second_pass], found[-second_pass:]
        assert (left, sum(second)) == (15, 20 - lost)
        assert 15 - lost <= sum(rest) <= 15
        assert len(rest) <= 3
        for batches in (rest, second):
            assert max(batches, default=0) - min(batches, default=0) <= 1


def test_draw_before_any_rollout_is_empty():
    assert Buffer(batch_groups=1, max_staleness=0).draw(version=0) is NoBatch.DONE


def test_groups_without_signal_are_refused_and_counted():
    buffer = Buffer(batch_groups=4, max_staleness=0)
    solved = group(0, 3, rewards=(1.0, 1.0, 1.0))
    failed = group(1, 3, rewards=(0.0, -0.0))
    alone = group(2, 3, rewards=(1.0,))
    silent = group(3, rewards=(0.0, 1.0))
    mixed = group(4, 3, rewards=(0.0, 0.0, 1e-9))
    buffer.add([solved, failed, alone, silent, mixed], version=3)
    assert drain(buffer, 3) == [[4]]
    assert (buffer.metrics().filtered, buffer.metrics().added) == (4, 1)


def test_with_several_rewards_a_group_may_teach_though_the_sums_are_equal():
    even = group(1, 0, rewards=(1.0, 1.0, 1.0))
    for one, parts in zip(even.trajectories, ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]), strict=True):
        one.rewards = dict(zip(("right", "brief"), parts, strict=True))
    for each_reward in (False, True):
        buffer = Buffer(batch_groups=1, max_staleness=0, each_reward=each_reward)
        assert bool(buffer.add([even], version=0).groups) is each_reward


def test_a_rollout_without_signal_leaves_nothing_to_draw_and_lets_the_next_be_added():
    buffer = Buffer(batch_groups=4, max_staleness=0)
    buffer.add([group(0, 0, rewards=(1.0, 1.0))], version=0)
    assert buffer.draw(version=0) is NoBatch.DONE
    buffer.add(groups([1], 0), version=0)
    assert drain(buffer, 0) == [[1]]


def test_a_fresh_group_is_drawn_at_the_bound_and_expires_beyond_it():
    for version, drawn in ((6, [[0]]), (7, [])):
        buffer = Buffer(batch_groups=1, max_staleness=4)
        buffer.add([group(0, 2, 3, 5)], version=5)  # the oldest of its tokens decides
        assert drain(buffer, version) == drawn
        assert buffer.metrics().expired == buffer.metrics().lost_fresh == (0 if drawn else 1)
        assert buffer.metrics().held == 0


def test_the_oldest_token_counts_wherever_it_is_and_empty_responses_do_not():
    member = group(0, 5, rewards=(0.0, 1.0, 0.5))
    member.trajectories[2] = response([5, 3], 0.5)
    for max_staleness, drawn in ((1, []), (2, [[0]])):
        buffer = Buffer(batch_groups=1, max_staleness=max_staleness)
        buffer.add([member], version=5)
        assert drain(buffer, 5) == drawn


def test_groups_that_arrive_too_old_are_not_held():
    buffer = Buffer(batch_groups=1, max_staleness=1)
    buffer.add([group(0, 3), group(1, 4)], version=5)
    assert buffer.metrics() == BufferMetrics(
        adds=1, added=2, expired=1, lost_fresh=1, held=1, held_tokens=1, to_visit=1
    )


def test_groups_that_expire_in_a_pass_make_room_in_its_batches():
    members = [group(0, 0), group(1, 0), *groups([2, 3, 4, 5, 6], 2)]
    patient = Buffer(batch_groups=7, reuse=2, max_staleness=9)
    patient.add(members, version=2)
    first, second = drain(patient, 2)
    assert not {0, 1} & set(first[:2])
    buffer = Buffer(batch_groups=2, reuse=2, max_staleness=2)
    buffer.add(members, version=2)
    one, two = ([id for id in order if id > 1] for order in (first, second))
    # At version 3, groups 0 and 1 are too old; the others keep their order. At version 5 all are.
    assert drain(buffer, 2) == [one[:2], one[2:4], one[4:]]
    assert (buffer.metrics().expired, buffer.metrics().lost_fresh) == (7, 7)
    buffer = Buffer(batch_groups=2, reuse=2, max_staleness=4)
    buffer.add(members, version=4)
    assert drain(buffer, 4) == [first[:2], one[2:4], one[4:]]
    buffer = Buffer(batch_groups=3, reuse=2, max_staleness=4)
    buffer.add(members, version=3)
    # Seven groups make two batches, of four and three; at version 5 groups 0 and 1 expire, and five make three and two.
    assert drain(buffer, 3) == [first[:4], first[4:], two[:3], two[3:]]


@pytest.mark.parametrize(("count", "late"), [(4, 0), (5, 0), (7, 1), (8, 1)])
def test_the_bound_costs_nothing_where_the_module_says_so(count, late):
    """u = reuse * max(1, n / batch_groups rounded); arriving at age A, nothing is lost iff S >= A + u - 1."""
    reuse, batch_groups, arrival_age = 2, 4, 3
    updates = reuse * (1 + late)
    enough = arrival_age + updates - 1
    for max_staleness, lost in ((enough, False), (enough - 1, True)):
        buffer = Buffer(batch_groups=batch_groups, reuse=reuse, max_staleness=max_staleness)
        buffer.add(groups(range(count), 10 - arrival_age), version=10)
        drain(buffer, 10)
        assert (buffer.metrics().lost_fresh > 0) == lost


def test_replayed_groups_are_the_asked_fraction_of_a_batch():
    buffer = Buffer(batch_groups=6, max_staleness=9, replay_fraction=0.25, replay_max_age=9)
    buffer.add(groups(range(6), 0), version=0)
    assert [sorted(batch) for batch in drain(buffer, 0)] == [[0, 1, 2, 3, 4, 5]]
    assert buffer.metrics().replay_short == 2  # nothing is older than the first rollout
    buffer.add(groups(range(10, 22), 1), version=1)
    first, second = buffer.draw(version=1), buffer.draw(version=2)
    # 0.25 / 0.75 * 6 = 2 of 8
    for batch in (first, second):
        assert [id >= 10 for id in ids(batch)] == [True] * 6 + [False] * 2
    assert len(set(ids(first + second))) == 16  # replay_max_uses=1: none is replayed twice
    assert buffer.metrics().replayed == 4


def test_replay_is_limited_by_uses_and_the_shortage_is_counted():
    buffer = Buffer(batch_groups=1, max_staleness=9, replay_fraction=0.5, replay_max_age=9, replay_max_uses=2)
    buffer.add(groups([0], 0), version=0)
    assert drain(buffer, 0) == [[0]]
    buffer.add(groups([1, 2, 3], 1), version=1)
    batches = drain(buffer, 1)
    assert [batch[1:] for batch in batches] == [[0], [0], []]
    metrics = buffer.metrics()
    assert (metrics.replayed, metrics.replay_short, metrics.retired, metrics.held) == (2, 2, 1, 3)


def test_replay_is_limited_by_its_own_age():
    for version, drawn in ((3, [1, 0]), (4, [1])):
        buffer = Buffer(batch_groups=1, max_staleness=9, replay_fraction=0.5, replay_max_age=3)
        buffer.add(groups([0], 0), version=0)
        assert drain(buffer, 0) == [[0]]
        buffer.add(groups([1], 1), version=1)
        assert ids(buffer.draw(version=version)) == drawn
        assert (buffer.metrics().expired, buffer.metrics().lost_fresh) == (2 - len(drawn), 0)


def test_the_latest_rollout_is_not_replayed_between_its_own_passes():
    buffer = Buffer(batch_groups=2, max_staleness=9, replay_fraction=0.5, replay_max_age=9)
    buffer.add(groups(range(6), 0), version=0)
    assert [len(batch) for batch in drain(buffer, 0)] == [2, 2, 2]


def test_replay_prefers_no_group():
    buffer = Buffer(batch_groups=1, max_staleness=999, replay_fraction=0.5, replay_max_age=999, replay_max_uses=999)
    buffer.add(groups(range(4), 0), version=0)
    drain(buffer, 0)
    buffer.add(groups(range(4, 404), 0), version=4)
    uses = Counter(id for batch in drain(buffer, 4) for id in batch if id < 4)
    assert sum(uses.values()) == 400
    assert all(70 <= uses[id] <= 130 for id in range(4))  # 100 each, give or take 3.5 standard deviations


def test_groups_are_released_with_their_last_use():
    buffer = Buffer(batch_groups=2, reuse=2, max_staleness=9)
    buffer.add(groups(range(4), 0), version=0)
    held = []
    for version in range(4):
        buffer.draw(version=version)
        held.append(buffer.metrics().held)
    assert held == [4, 4, 2, 0]


def test_beyond_capacity_the_oldest_leave_first():
    buffer = Buffer(batch_groups=2, max_staleness=9, capacity=3)
    buffer.add([group(4, 1), group(3, 2), group(2, 1), group(1, 3), group(0, 2)], version=3)
    assert sorted(flat(drain(buffer, 3))) == [0, 1, 3]  # by oldest token 2 and 4 go
    assert (buffer.metrics().evicted, buffer.metrics().lost_fresh) == (2, 2)
    buffer = Buffer(batch_groups=2, max_staleness=9, capacity=3)
    buffer.add(groups([4, 2, 0, 3, 1], 3), version=3)
    assert sorted(flat(drain(buffer, 3))) == [2, 3, 4]  # as old as each other: by id


def test_capacity_holds_for_fresh_and_replayable_groups_together():
    buffer = Buffer(batch_groups=3, max_staleness=9, replay_fraction=0.5, replay_max_age=9, capacity=4)
    buffer.add(groups(range(3), 0), version=0)
    drain(buffer, 0)
    buffer.add(groups(range(3, 6), 1), version=1)
    assert buffer.metrics().held == 4
    assert (buffer.metrics().evicted, buffer.metrics().lost_fresh) == (2, 0)
    assert sorted(ids(buffer.draw(version=1))) == [2, 3, 4, 5]


def test_a_drawn_group_says_how_often_it_was_drawn_before():
    buffer = Buffer(
        batch_groups=2, reuse=2, max_staleness=20, replay_fraction=0.5, replay_max_age=20, replay_max_uses=3
    )
    drawn = Counter()
    for rollout in range(3):
        version = 4 * rollout
        buffer.add(groups(range(4 * rollout, 4 * rollout + 4), version), version=version)
        while isinstance(batch := buffer.draw(version=version), list):
            for member in batch:
                assert member.uses == drawn[member.id]
            drawn.update(ids(batch))
            version += 1
            restored = Buffer(
                batch_groups=2, reuse=2, max_staleness=20, replay_fraction=0.5, replay_max_age=20, replay_max_uses=3
            )
            restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
            buffer = restored
    assert max(drawn.values()) > 2  # passes and replays were both counted


# Every sequence of adds, draws and version jumps.

SETTINGS = st.builds(
    lambda batch_groups, reuse, slack, replay_fraction, replay_room, replay_max_uses, room, seed: {
        "batch_groups": batch_groups,
        "reuse": reuse,
        "max_staleness": reuse + slack,
        "replay_fraction": replay_fraction,
        "replay_max_age": reuse + min(replay_room, slack),
        "replay_max_uses": replay_max_uses,
        "capacity": batch_groups + room,
        "seed": seed,
    },
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.25, 0.5, 0.8]),
    st.integers(0, 6),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(-3, 3),
)
# Each rollout: how many versions ago each of its groups was begun, and by how much the version jumps between draws.
ROLLOUTS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=9), st.lists(st.sampled_from([1, 1, 1, 0, 2, 4]), min_size=1)),
    min_size=1,
    max_size=6,
)


def loop(rollouts: list[tuple[list[int], list[int]]], buffers: list[Buffer]) -> Iterator[tuple[int, list[list[Group]]]]:
    """The synchronous loop on several buffers at once: add a rollout, draw until nothing comes. Yields after every
    step: the version, and what each buffer gave.
    """
    version, next_id = 5, 0
    for ages, jumps in rollouts:
        for buffer in buffers:
            buffer.add(
                [
                    group(next_id + index, version - begun, version, rewards=(0.0, float(index % 4 > 0)))
                    for index, begun in enumerate(ages)
                ],
                version=version,
            )
        next_id += len(ages)
        yield version, [[] for _ in buffers]
        for jump in cycle(jumps):
            drawn = [buffer.draw(version=version) for buffer in buffers]
            yield version, [batch if isinstance(batch, list) else [] for batch in drawn]
            if drawn[0] is NoBatch.DONE:
                break
            version += jump


@settings(max_examples=300, deadline=None)
@given(SETTINGS, ROLLOUTS)
def test_bound_uses_and_memory_hold_for_every_sequence(chosen, rollouts):
    buffer = Buffer(**chosen)
    uses: Counter[int] = Counter()
    for version, (drawn,) in loop(rollouts, [buffer]):
        metrics = buffer.metrics()
        assert all(age(member, version) <= chosen["max_staleness"] for member in drawn)
        replayed = [member for member in drawn if uses[member.id] >= chosen["reuse"]]
        assert all(age(member, version) <= chosen["replay_max_age"] for member in replayed)
        assert len(set(ids(drawn))) == len(drawn)
        assert all(member.uses == uses[member.id] for member in drawn)
        assert metrics.held <= chosen["capacity"]
        assert metrics.added == metrics.retired + metrics.expired + metrics.evicted + metrics.held
        uses.update(ids(drawn))
    most = chosen["reuse"] + (chosen["replay_max_uses"] if chosen["replay_fraction"] else 0)
    assert max(uses.values(), default=0) <= most
    metrics = buffer.metrics()
    assert sum(uses.values()) == metrics.fresh + metrics.replayed
    assert metrics.to_visit == 0
    assert metrics.lost_fresh <= metrics.expired + metrics.evicted
    if chosen["replay_fraction"] == 0:
        assert metrics.replayed == metrics.replay_short == metrics.held == 0


@settings(max_examples=200, deadline=None)
@given(SETTINGS, ROLLOUTS, st.sets(st.integers(0, 30), min_size=1))
def test_a_saved_buffer_goes_on_exactly_from_any_point(chosen, rollouts, restarts):
    buffers = [Buffer(**chosen), Buffer(**chosen)]
    for index, (_, (straight, resumed)) in enumerate(loop(rollouts, buffers)):
        assert resumed == straight  # the same groups, to the last float
        assert buffers[1].metrics() == buffers[0].metrics()
        assert buffers[1].state_dict() == buffers[0].state_dict()
        if index in restarts:
            saved = json.loads(json.dumps(buffers[1].state_dict()))
            buffers[1] = Buffer(**chosen)
            buffers[1].load_state_dict(saved)


@settings(max_examples=200, deadline=None)
@given(SETTINGS, ROLLOUTS, st.randoms(use_true_random=False))
def test_the_order_of_arrival_and_of_the_dict_do_not_matter(chosen, rollouts, random):
    chosen["capacity"] = 100
    one, other = Buffer(**chosen), Buffer(**chosen)
    for _, (drawn, same) in loop(rollouts, [one, other]):
        assert ids(same) == ids(drawn)
        saved = other.state_dict()
        random.shuffle(saved["held"])
        other.load_state_dict(saved)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 3))
def test_without_replay_the_draws_are_plain_passes(batch_groups, reuse, counts, seed):
    """And with replay the fresh part of every batch is still the same."""
    room: dict[str, Any] = {"batch_groups": batch_groups, "reuse": reuse, "max_staleness": 999, "seed": seed}
    plain = Buffer(**room)
    replaying = Buffer(**room, replay_fraction=0.5, replay_max_age=999, replay_max_uses=2)
    version = 0
    for rollout, count in enumerate(counts):
        fresh = [10 * rollout + index for index in range(count)]
        for buffer in (plain, replaying):
            buffer.add(groups(fresh, version), version=version)
        batches = drain(plain, version)
        per_pass = max(1, math.floor(count / batch_groups + 0.5)) if count else 0
        assert len(batches) == reuse * per_pass
        for index in range(reuse):
            cut = batches[index * per_pass : (index + 1) * per_pass]
            assert sorted(flat(cut)) == fresh
            sizes = [len(batch) for batch in cut]
            assert not sizes or max(sizes) - min(sizes) <= 1
        assert [[id for id in batch if id in fresh] for batch in drain(replaying, version)] == batches
        version += len(batches)
    assert plain.metrics().held == 0


def test_a_state_speaks_of_several_rewards_only_where_there_are_some():
    one = group(1, 0)
    assert "rewards" not in group_state(one)["trajectories"][0]
    one.trajectories[1].rewards = {"right": 1.0, "brief": None}
    again = group_from_state(json.loads(json.dumps(group_state(one))))
    assert [t.rewards for t in again.trajectories] == [{}, {"right": 1.0, "brief": None}]


def test_a_group_survives_json_to_the_last_float():
    member = group(3, 1, 2, rewards=(0.1 + 0.2, 1e-300))
    member.trajectories[0].behavior_logprobs = [-1 / 3, -5e-324]
    member.trajectories[1].status = Status.TRUNCATED
    back = group_from_state(json.loads(json.dumps(group_state(member))))
    assert back == member
    assert back.trajectories[1].status is Status.TRUNCATED


def test_a_saved_state_does_not_change_with_the_buffer():
    buffer = Buffer(batch_groups=1, max_staleness=9)
    buffer.add(groups([0, 1], 0), version=0)
    saved = buffer.state_dict()
    text = json.dumps(saved)
    drawn = buffer.draw(version=0)
    drawn[0].trajectories[0].tokens.append(1)
    assert json.dumps(saved) == text


def test_loading_forgets_what_was_held_and_obeys_the_settings_of_the_new_buffer():
    old = Buffer(batch_groups=1, max_staleness=9, replay_fraction=0.5, replay_max_age=9)
    old.add(groups(range(5), 0), version=0)
    drain(old, 0)
    old.add(groups(range(5, 9), 5), version=5)
    new = Buffer(batch_groups=2, reuse=2, max_staleness=9, replay_fraction=0.5, replay_max_age=3, capacity=3)
    new.add(groups([99], 0), version=0)
    new.load_state_dict(old.state_dict())
    with pytest.raises(ValueError, match="version=4 is older than the last call's 5"):
        new.draw(version=4)
    # The first rollout had one pass; its turn is over, though two are asked for now. At age 5 so is its replay.
    assert set(ids(new.draw(version=5))) < {6, 7, 8}
    metrics = new.metrics()
    assert (metrics.expired, metrics.evicted, metrics.held, metrics.to_visit) == (5, 1, 3, 4)


# Errors.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_groups": 0}, r"learn\.batch_groups=0 is too small\. Set it to 1 or more\."),
        ({"reuse": 0}, r"offpolicy\.reuse=0 is too small\. Set it to 1 or more"),
        ({"max_staleness": -1}, r"offpolicy\.max_staleness=-1 is too small\. Set it to 0 or more"),
        (
            {"reuse": 4, "max_staleness": 2},
            r"offpolicy\.reuse=4 makes 4 updates .* staleness 3, but offpolicy\.max_staleness=2 forbids that\. "
            r"Set max_staleness >= 3, lower reuse",
        ),
        ({"replay_fraction": 1.0}, r"offpolicy\.replay_fraction=1\.0 is not a share .* Set it to 0 .* between 0 and 1"),
        ({"replay_fraction": -0.1}, r"offpolicy\.replay_fraction=-0\.1 is not a share"),
        ({"replay_fraction": float("nan")}, r"offpolicy\.replay_fraction=nan is not a share"),
        ({"replay_max_age": -1}, r"offpolicy\.replay_max_age=-1 is too small\. Set it to 0 or more"),
        (
            {"replay_fraction": 0.5, "replay_max_age": 9},
            r"offpolicy\.replay_max_age=9 exceeds offpolicy\.max_staleness=8.* Set replay_max_age <= 8, or raise",
        ),
        (
            {"replay_fraction": 0.5},
            r"offpolicy\.replay_max_age=0 replays nothing: .* Set replay_max_age >= 1, or replay_fraction=0",
        ),
        (
            {"replay_fraction": 0.5, "replay_max_age": 2, "reuse": 3},
            r"offpolicy\.replay_max_age=2 replays nothing: .*offpolicy\.reuse=3.* Set replay_max_age >= 3",
        ),
        ({"replay_max_uses": 0}, r"offpolicy\.replay_max_uses=0 is too small\. Set it to 1 or more"),
        (
            {"capacity": 3},
            r"offpolicy\.replay_capacity=3 cannot hold one batch of learn\.batch_groups=4\. Set replay_capacity >= 4",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_be(changed, message):
    with pytest.raises(ValueError, match=message):
        Buffer(**{"batch_groups": 4, "max_staleness": 8, **changed})


def test_settings_at_their_limits():
    Buffer(batch_groups=4, capacity=4, reuse=3, max_staleness=2, replay_max_age=2)
    Buffer(batch_groups=1, reuse=2, max_staleness=2, replay_fraction=0.99, replay_max_age=2)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (response([0], None, Status.PARKED), r"response 1 of group 5 \(problem 'p5'\) is parked; only finished"),
        (response([0], 1.0, Status.DROPPED), r"response 1 of group 5 \(problem 'p5'\) is dropped; only finished"),
        (response([0], None), r"response 1 of group 5 \(problem 'p5'\) has reward None, .* Score every response"),
        (response([0], float("nan")), r"response 1 of group 5 \(problem 'p5'\) has reward nan, which is not a finite"),
        (response([0, 3], 1.0), r"group 5 \(problem 'p5'\) has a token of version 3, newer than the learner's 2"),
    ],
)
def test_an_incomplete_group_is_named_and_nothing_is_taken(second, message):
    buffer = Buffer(batch_groups=1, max_staleness=8)
    bad = group(5, 0)
    bad.trajectories[1] = second
    with pytest.raises(ValueError, match=message):
        buffer.add([group(4, 0), bad], version=2)
    assert buffer.metrics() == BufferMetrics()
    buffer.add([group(4, 0)], version=0)


def test_a_group_is_added_once():
    buffer = Buffer(batch_groups=1, max_staleness=8, replay_fraction=0.5, replay_max_age=8)
    message = r"group 4 \(problem 'p4'\) is already in the buffer, .* Add each finished group once"
    with pytest.raises(ValueError, match=message):
        buffer.add(groups([4, 4], 0), version=0)
    buffer.add(groups([4], 0), version=0)
    drain(buffer, 0)
    with pytest.raises(ValueError, match=message):
        buffer.add(groups([4], 1), version=1)


def test_a_rollout_may_be_added_over_unfinished_passes_and_waits_for_its_turn():
    buffer = Buffer(batch_groups=2, reuse=2, max_staleness=8)
    buffer.add(groups(range(3), 0), version=0)
    assert len(buffer.draw(version=0)) == 2
    buffer.add(groups([7], 1), version=1)
    assert buffer.metrics().to_visit == 4 + 2
    batches = drain(buffer, 1)
    assert [sorted(batch) for batch in batches[3:]] == [[7], [7]]  # after the first rollout's passes
    assert sorted(flat(batches[:1])) != [7]
    assert Counter(flat(batches))[7] == 2
    alone = Buffer(batch_groups=2, reuse=2, max_staleness=8)
    alone.add(groups(range(3), 0), version=0)
    assert drain(alone, 0)[1:] == batches[:3]  # in the order that it would have had alone


def test_groups_of_a_rollout_may_come_one_by_one_and_are_drawn_once_it_is_whole():
    at_once, one_by_one = (Buffer(batch_groups=2, reuse=2, max_staleness=9, seed=3) for _ in range(2))
    at_once.add(groups(range(5), 0), version=0)
    for member in groups(range(4), 0):
        assert one_by_one.add([member], version=0, whole=False).groups == [member]
        assert one_by_one.draw(version=0) is NoBatch.NOT_YET
    one_by_one.add(groups([4], 0), version=0)
    assert drain(one_by_one, 0) == drain(at_once, 0)
    assert one_by_one.draw(version=9) is NoBatch.DONE
    assert one_by_one.metrics() == at_once.metrics()


def test_a_rollout_whose_groups_so_far_teach_nothing_is_not_done():
    buffer = Buffer(batch_groups=1, max_staleness=0)
    buffer.add([group(0, 0, rewards=(1.0, 1.0))], version=0, whole=False)
    assert buffer.draw(version=0) is NoBatch.NOT_YET
    buffer.add([], version=0)
    assert buffer.draw(version=0) is NoBatch.DONE


def test_add_says_what_it_admitted_and_what_it_filtered():
    buffer = Buffer(batch_groups=1, max_staleness=0)
    useful, useless = group(0, 0), group(1, 0, rewards=(1.0, 1.0))
    admitted = buffer.add([useful, useless], version=0)
    assert (admitted.groups, admitted.filtered) == ([useful], [useless])


def test_a_state_saved_between_two_rollouts_continues_identically():
    buffer = Buffer(batch_groups=2, reuse=2, max_staleness=9, replay_fraction=0.5, replay_max_age=9, seed=1)
    buffer.add(groups(range(5), 0), version=0)
    buffer.draw(version=0)
    buffer.add(groups(range(5, 9), 1), version=1)
    buffer.add(groups([9], 1), version=1, whole=False)
    restored = Buffer(batch_groups=2, reuse=2, max_staleness=9, replay_fraction=0.5, replay_max_age=9, seed=1)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert restored.metrics() == buffer.metrics()
    assert drain(restored, 1) == drain(buffer, 1)
    assert restored.draw(version=10) is buffer.draw(version=10) is NoBatch.NOT_YET


def test_versions_never_decrease():
    buffer = Buffer(batch_groups=1, max_staleness=8)
    buffer.add(groups([0], 3), version=3)
    buffer.draw(version=5)
    for call in (lambda: buffer.draw(version=4), lambda: buffer.add([], version=4)):
        with pytest.raises(ValueError, match=r"version=4 is older than the last call's 5; .* Pass the learner's"):
            call()
    buffer.draw(version=5)
