"""Rewards for finished responses; a failed verifier is not a reward of 0."""

from bapo.train.scoring import ENOUGH_GROUPS, Failing, Scored, response_metrics, score, together
from bapo.types import Group, Problem, Score, Status, Trajectory

STOP = 0


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
    return score(groups, Sums(), lambda ids: "".join(map(str, ids)), overlong)


def test_the_text_is_scored_without_its_stop_token_and_a_truncated_one_whole():
    one = group(1, response([3, 4, STOP]), response([3, 4], Status.TRUNCATED), response([3, STOP]))
    result = scored(one)
    assert [t.reward for t in result.groups[0].trajectories] == [1.0, 1.0, 0.0]
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
