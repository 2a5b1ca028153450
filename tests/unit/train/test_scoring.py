"""Rewards for finished responses; a failed verifier is not a reward of 0."""

from functools import partial
from types import SimpleNamespace

from bapo.models import Policy
from bapo.rollout.scheduler import Rollout, SchedulerMetrics
from bapo.train.scoring import (
    ENOUGH_GROUPS,
    Failing,
    Scored,
    response_metrics,
    score,
    together,
    unscored,
    with_given_up,
)
from bapo.types import Group, Problem, Score, Status, Trajectory

STOP = 8


def response(tokens, status=Status.STOPPED):
    return Trajectory([1], 0, tokens, [-1.0] * len(tokens), [0.1] * len(tokens), [0] * len(tokens), status)


def group(number, *responses):
    return Group(number, Problem(f"p{number}", "?", 7), list(responses))


class Sums:
    """The right response adds up to the answer; a 9 in it makes the verifier fail."""

    train = test = ()

    def scores(self, responses):
        numbers = [(problem, [int(digit) for digit in text]) for problem, text in responses]
        return [Score(None, "nine") if 9 in n else Score(float(sum(n) == p.answer)) for p, n in numbers]


def scored(*groups, overlong=lambda length: 0.0):
    policy = SimpleNamespace(decode=lambda ids: "".join(map(str, ids)), stop_ids={STOP})
    return score(groups, Sums(), partial(Policy.transcript, policy), overlong)


def test_the_text_is_scored_without_its_stop_token_and_a_truncated_one_whole():
    cut = response([3, 4, STOP], Status.TRUNCATED)  # a conversation that a limit cut off after a turn
    one = group(1, response([3, 4, STOP]), response([3, 4], Status.TRUNCATED), response([3, STOP]), cut)
    result = scored(one)
    assert [t.reward for t in result.groups[0].trajectories] == [1.0, 1.0, 0.0, 1.0]
    assert result.failures == []


def test_a_failed_response_leaves_its_group_and_is_told_with_its_cause():
    result = scored(group(1, response([9, STOP]), response([7, STOP]), response([1, STOP])))
    assert [t.tokens[0] for t in result.groups[0].trajectories] == [7, 1]
    (failure,) = result.failures
    assert (failure.group, failure.problem, failure.response, failure.cause) == (1, "p1", "9", "nine")


def test_a_group_with_nothing_to_compare_is_left_out():
    result = scored(group(1, response([9, STOP]), response([7, STOP])), group(2, response([7]), response([6])))
    assert [group.id for group in result.groups] == [2]
    assert len(result.failures) == 1


def test_running_long_costs_learning_reward_only():
    result = scored(group(1, response([7, STOP]), response([3, 4, STOP])), overlong=lambda length: -0.5 * (length > 2))
    short, long = result.groups[0].trajectories
    assert (short.reward, short.learning_reward) == (1.0, 1.0)
    assert (long.reward, long.learning_reward) == (1.0, 0.5)


def test_metrics_count_what_has_a_reward():
    one = group(1, response([9, STOP]), response([7, STOP]), response([1, 1, STOP]))
    metrics = response_metrics([one], failures=len(scored(one).failures))
    assert metrics == {
        "reward": 0.5,
        "length": 2.5,
        "length_correct": 2.0,
        "length_wrong": 3.0,
        "truncated": 0.0,
        "reward_failures": 1,
    }


def test_each_of_several_rewards_has_its_mean_over_the_responses_that_it_applies_to():
    one = group(1, response([7, STOP]), response([1, STOP]), response([2, STOP]))
    for reward, trajectory in zip((1.0, 0.0, 0.5), one.trajectories, strict=True):
        trajectory.reward = reward
        trajectory.rewards = {"right": reward, "brief": None if reward == 1 else -4.0, "never": None}
    metrics = response_metrics([one], failures=0)
    assert {key: value for key, value in metrics.items() if "reward/" in key} == {
        "reward/right": 0.5,
        "reward/brief": -4,
    }


def test_a_broken_problem_never_ends_a_run_and_a_broken_verifier_soon_does():
    broken = scored(group(1, response([9, STOP]), response([9, 1, STOP])))
    sound = scored(group(2, response([7, STOP]), response([9, STOP])))
    failing = Failing()
    for step in range(1, 1000):
        failing = failing.after(step, sound if step % ENOUGH_GROUPS == 0 else broken)
        assert not failing.ends_run
    failing = Failing().after(1, sound).after(2, broken).after(3, Scored([], []))
    assert failing == Failing(groups=1, responses=2, since=2, cause="nine"), "a step that scores nothing says nothing"
    failing = failing.after(4, together([broken] * (ENOUGH_GROUPS - 2)))
    assert not failing.ends_run
    failing = failing.after(5, broken)
    assert failing == Failing(ENOUGH_GROUPS, 2 * ENOUGH_GROUPS, since=2, cause="nine")
    assert failing.ends_run
    assert Failing().after(1, together([broken] * 50 + [sound])) == Failing()
    assert Failing().after(1, together([broken] * ENOUGH_GROUPS)).ends_run


def episode(tokens, reward=None, ending="answered"):
    """A response of one turn, whose environment gave this reward for its only step."""
    made = response(tokens)
    nothing = {"at": 0, "tokens": 0, "text": "", "over": False, "reward": None}
    made.answers = [nothing, nothing | {"at": len(tokens), "over": True, "reward": reward}, nothing]
    made.ending, made.versions = ending, [0] * len(tokens)
    return made


def test_an_environments_reward_comes_before_the_verifiers():
    found = scored(group(0, episode([3, 4, 0], 0.5), episode([3, 4, 0]), episode([9, 0], 2.0)))
    assert [t.reward for t in found.groups[0].trajectories] == [0.5, 1.0, 2.0]  # nobody asked about the 9
    assert found.failures == []


def test_a_group_of_episodes_is_scored_as_a_whole_or_leaves_with_its_cause():
    broken, sound = group(0, episode([3, 4, 0]), episode([9, 0]), episode([1, 0])), group(1, episode([3, 4, 0]))
    found = scored(broken, sound)
    assert [one.id for one in found.groups] == [1]
    assert [t.ending for t in broken.trajectories] == ["answered", "grader failed", "answered"]
    assert unscored([broken, sound], found) == {0: {"cause": "grader failed: nine"}}
    metrics = response_metrics([broken, sound], 1)
    assert (metrics["endings/answered"], metrics["endings/grader_failed"], metrics["turns"]) == (3, 1, 1)


def test_what_an_environment_said_is_in_no_length():
    one = episode([3], 1.0)
    one.observe([5, 6])
    assert {"length": 1, "observed": 2}.items() <= response_metrics(scored(group(0, one)).groups, 0).items()


def test_failures_of_environments_are_told_with_those_of_verifiers():
    lost = group(5, episode([1, 2, 0], ending="environment failed"), episode([1, 0], ending=""))
    rollout = Rollout([], [lost], SchedulerMetrics(), {5: "environment failed: it broke"})
    found = with_given_up(scored(), rollout, str)
    assert [(each.group, each.cause) for each in found.failures] == [(5, "environment failed: it broke")]
    assert (found.asked_groups, found.asked_responses) == (1, 1)
