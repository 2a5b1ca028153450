"""avg@k and pass@k against hand numbers, enumeration and simulation; `evaluate` on a fake and on the shipped model."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from math import inf, isfinite, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.demo import MAX_RESPONSE_TOKENS, model_path
from bapo.evaluate import avg_at_k, evaluate, maj_at_k, pass_at_k
from bapo.models import Policy
from bapo.rollout.engine import Sampled, Sampling, Segment
from bapo.rollout.local.engine import LocalEngine
from bapo.tasks.countdown import Countdown
from bapo.tasks.task import Rewarded
from bapo.types import Problem, Score, Status

STOP = 0
bits = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7)
tables = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=6)

# Statistics


def test_avg_is_the_mean_of_problem_means():
    assert avg_at_k([[1, 0], [0, 0], [1, 1, 1, 0]]).value == pytest.approx((0.5 + 0 + 0.75) / 3)


def test_pass_at_k_by_hand():
    rewards = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1]]
    assert pass_at_k(rewards, 1).value == pytest.approx((0.25 + 0 + 0.75) / 3)
    assert pass_at_k(rewards, 2).value == pytest.approx((0.5 + 0 + 1) / 3)  # C(3,2)/C(4,2) = 1/2 miss the one success
    assert pass_at_k(rewards, 4).value == pytest.approx(2 / 3)


@given(bits, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(row, data):
    k = data.draw(st.integers(1, len(row)))
    subsets = list(combinations(row, k))
    assert pass_at_k([row], k).value == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_pass_at_one_is_avg_for_rewards_of_0_and_1():
    rewards = [[1, 0, 1], [0, 0, 1], [1, 1, 1]]
    assert pass_at_k(rewards, 1).value == pytest.approx(avg_at_k(rewards).value)


def test_pass_at_k_counts_rewards_above_the_threshold():
    assert pass_at_k([[0.5, 0.4]], 2).value == 0
    assert pass_at_k([[0.5, 0.6]], 2).value == 1
    assert pass_at_k([[0.0] * 999 + [1.0]], 500).value == pytest.approx(0.5)  # binomials of 299 digits


def test_maj_at_k_by_hand():
    right = maj_at_k([[1, 1, 0, 0, 1]], [["7", "7", "8", None, "7"]])
    assert right.value == 1
    assert maj_at_k([[1, 0, 0]], [["7", "8", "8"]]).value == 0
    # 7 and 8 have two votes each, 9 has one: a tie of a right and a wrong answer
    tied = ["7", "8", "7", "8", "9"]
    assert maj_at_k([[1, 0, 1, 0, 0]], [tied]).value == pytest.approx(1 / 2)
    # three answers with one vote each, one of them right
    assert maj_at_k([[0, 1, 0, 0]], [["a", "b", "c", None]]).value == pytest.approx(1 / 3)
    # one right answer against three without an answer: those do not vote
    assert maj_at_k([[1, 0, 0, 0]], [["7", None, None, None]]).value == 1
    assert maj_at_k([[0, 0]], [[None, None]]).value == 0
    # a verifier that likes one of two equal answers: s_a / n_a = 1/2
    assert maj_at_k([[1, 0, 0]], [["7", "7", "8"]]).value == pytest.approx(1 / 2)
    both = maj_at_k([[1, 0, 1, 0, 0], [1, 1, 0, 0, 1]], [tied, ["7", "7", "8", None, "7"]])
    assert both.value == pytest.approx((1 / 2 + 1) / 2)


def test_maj_at_k_has_the_interval_of_its_problem_values():
    # values 1, 1, 0, 1: the same as one response each
    unanimous = maj_at_k(
        [[1, 1, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1]], [["a"] * 3, ["a", "a", "b"], ["c", "c", "a"], ["a"] * 3]
    )
    assert unanimous == avg_at_k([[1], [1], [0], [1]])


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=9))
def test_maj_at_k_is_the_mean_over_tie_breaks(votes):
    verdict = {answer: float(right) for answer, right in votes}  # a verifier that judges equal answers equally
    answers = [answer for answer, _ in votes]
    most = max(answers.count(answer) for answer in answers)
    winners = [answer for answer in set(answers) if answers.count(answer) == most]
    expected = sum(verdict[answer] for answer in winners) / len(winners)
    assert maj_at_k([[verdict[answer] for answer in answers]], [answers]).value == pytest.approx(expected)


def test_one_sample_per_problem_gives_wilsons_interval_by_hand():
    # 3 of 4; var = 1/4, so e = (3/16) / (1/16) = 3
    z, p, e = 1.959963985, 0.75, 3
    centre = (p + z * z / (2 * e)) / (1 + z * z / e)
    half = z * sqrt(p * (1 - p) / e + z * z / (4 * e * e)) / (1 + z * z / e)
    estimate = avg_at_k([[1], [1], [0], [1]])
    assert (estimate.low, estimate.high) == pytest.approx((centre - half, centre + half))
    assert (estimate.low, estimate.high) == pytest.approx((0.2561, 0.9632), abs=1e-4)


def test_certain_looking_results_keep_their_doubt():
    perfect = pass_at_k([[1.0] * 8] * 32, 8)
    assert perfect.high == 1.0
    assert perfect.low == pytest.approx(32 / (32 + 1.959964**2))  # n / (n + z^2), about 0.893
    hopeless = avg_at_k([[0.0] * 8] * 32)
    assert (hopeless.value, hopeless.low, hopeless.high) == pytest.approx((0, 0, 1 - perfect.low))
    even = avg_at_k([[1.0, 0.0]] * 10)  # problems agree exactly: 20 responses are worth at most 20 trials
    assert even.high - even.low == pytest.approx(2 * 1.959964 / sqrt(20 + 1.959964**2) / 2)


def test_agreement_between_the_responses_to_a_problem_widens_the_interval():
    spread_out = avg_at_k([[1, 0, 1, 0]] * 8 + [[1, 1, 0, 0]] * 8)
    clustered = avg_at_k([[1] * 4] * 8 + [[0] * 4] * 8)
    assert clustered.value == spread_out.value
    assert clustered.high - clustered.low > 1.8 * (spread_out.high - spread_out.low)


def test_rewards_on_another_scale_move_the_interval_along():
    unit = avg_at_k([[1, 0], [1, 1], [0, 0]])
    signed = avg_at_k([[1, -1], [1, 1], [-1, -1]])
    for name in ("value", "low", "high"):
        assert getattr(signed, name) == pytest.approx(2 * getattr(unit, name) - 1)


@given(tables)
def test_intervals_are_finite_and_contain_their_value(rewards):
    for estimate in (avg_at_k(rewards), pass_at_k(rewards, 1)):
        assert isfinite(estimate.low)
        assert isfinite(estimate.high)
        assert estimate.low <= estimate.value <= estimate.high


@pytest.mark.parametrize(("a", "b"), [(0.7, 1.0), (8.0, 0.4), (0.3, 8.0)])
def test_intervals_cover_the_truth_as_often_as_they_claim(a, b):
    rng = np.random.default_rng(0)
    rates = rng.beta(a, b, (1000, 32))
    rewards = (rng.random((1000, 32, 4)) < rates[..., None]).astype(float).tolist()
    true_pass = (1 - (1 - rng.beta(a, b, 1_000_000)) ** 4).mean()

    def coverage(estimates, truth):
        return np.mean([estimate.low <= truth <= estimate.high for estimate in estimates])

    assert coverage(map_list(avg_at_k, rewards), a / (a + b)) > 0.915
    assert coverage(map_list(lambda table: pass_at_k(table, 4), rewards), true_pass) > 0.915


def map_list(function, values):
    return [function(value) for value in values]


# evaluate, with an engine that says what it is told


@dataclass
class Scripted:
    """Gives the same segments whatever is asked, one at a time, and remembers what was."""

    segments: list
    calls: list = field(default_factory=list)
    left: list = field(default_factory=list)
    resting = False

    def submit(self, requests, sampling, *, token_budget=None, turns=False):
        self.calls.append((list(requests), sampling, token_budget))
        self.left = list(zip((request.id for request in requests), self.segments, strict=False))

    def collect(self, timeout=None):
        return [self.left.pop(0)] if self.left else []

    def park(self):
        self.left = []


class Spelled:
    """A task: the response must be the answer, letter by letter."""

    train = ()
    test = (Problem("first", "p", "ab"), Problem("second", "qq", "c"))

    def scores(self, responses):
        return [Score(float(response == problem.answer)) for problem, response in responses]


class Letters:
    """A policy whose tokens are letters."""

    stop_ids = (STOP,)
    transcript = Policy.transcript

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def said(text, status=Status.STOPPED, entropy=0.5):
    tokens = Letters().encode(text) + ([STOP] if status is Status.STOPPED else [])
    return Segment(tokens, [-1.0] * len(tokens), [entropy] * len(tokens), [7] * len(tokens), status)


def run(engine, *, problems=Spelled.test, k=2, seed=0, task=None, tell=None):
    return evaluate(
        engine,
        Letters(),
        (task or Spelled()).scores,
        problems,
        k=k,
        sampling=Sampling(stop_ids=frozenset({STOP})),
        max_tokens=4,
        seed=seed,
        tell=tell,
    )


def test_evaluate_by_hand():
    engine = Scripted([said("ab"), said("abab", Status.TRUNCATED, entropy=1.0), said("d"), said("ab")])
    result = run(engine)
    assert (result.problems, result.k) == (2, 2)
    assert result.rewards == ((1.0, 0.0), (0.0, 0.0))
    assert result.avg == avg_at_k(result.rewards)
    assert result.pass_k == pass_at_k(result.rewards, 2)
    assert result.avg.value == 0.25
    assert result.pass_k.value == 0.5
    assert result.length == (3 + 4 + 2 + 3) / 4
    assert result.length_correct == 3
    assert result.length_wrong == 3
    assert result.truncated == 0.25
    assert result.entropy == pytest.approx((8 * 0.5 + 4 * 1.0) / 12)


def test_evaluate_asks_once_with_a_seed_of_its_own_for_every_response():
    engine = Scripted([said("ab")] * 4)
    run(engine)
    ((requests, sampling, token_budget),) = engine.calls
    assert [request.context for request in requests] == [[112], [112], [113, 113], [113, 113]]
    assert all((request.position, request.max_new_tokens) == (0, 4) for request in requests)
    assert len({request.seed for request in requests}) == 4
    assert (sampling.stop_ids, token_budget) == ({STOP}, None)

    backwards, other_seed = Scripted([said("ab")] * 4), Scripted([said("ab")] * 4)
    run(backwards, problems=Spelled.test[::-1])
    assert [r.seed for r in backwards.calls[0][0]] == [r.seed for r in requests[2:] + requests[:2]]
    run(other_seed, seed=1)
    assert not {r.seed for r in other_seed.calls[0][0]} & {r.seed for r in requests}


def test_a_watch_hears_of_every_response_asked_for():
    told = []
    segments = [said("ab"), said("x"), said("c"), said("c")]
    assert run(Scripted(segments), tell=told.append) == run(Scripted(segments))
    assert told[:-1] == [Sampled(n, 4, tokens) for n, tokens in ((0, 0), (1, 3), (2, 5), (3, 7), (4, 9))]
    assert told[-1] == Rewarded(0, 4, 0.0, Counter())


def test_a_stop_token_is_stripped_only_where_it_stopped_the_response():
    truncated = Segment([97, 98], [-1.0] * 2, [0.0] * 2, [7] * 2, Status.TRUNCATED)
    assert run(Scripted([said("ab"), truncated]), problems=Spelled.test[:1]).rewards == ((1.0, 1.0),)


def test_summary_has_every_key_and_leaves_out_means_over_nothing():
    keys = {"avg", "avg_low", "avg_high", "pass", "pass_low", "pass_high", "entropy", "length", "truncated", "failures"}
    keys = {f"eval/{key}" for key in keys}
    mixed = run(Scripted([said("ab"), said("x"), said("c"), said("c")])).summary()
    assert set(mixed) == keys | {"eval/length_correct", "eval/length_wrong"}
    assert mixed["eval/avg"] == 0.75
    assert all(isfinite(value) for value in mixed.values())
    assert set(run(Scripted([said("ab")] * 2 + [said("c")] * 2)).summary()) == keys | {"eval/length_correct"}
    assert set(run(Scripted([said("x")] * 4)).summary()) == keys | {"eval/length_wrong"}
    assert "eval/entropy" not in run(Scripted([said("x", entropy=nan)] * 4)).summary()
    assert "eval/entropy" not in run(Scripted([said("", Status.TRUNCATED)] * 4)).summary()


def test_evaluate_refuses_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.QUIET_SECONDS", 0)
    with pytest.raises(RuntimeError, match="Scripted has sampled nothing"):
        run(Scripted([said("ab")]))
    with pytest.raises(RuntimeError, match=r"'second' came back parked"):
        run(Scripted([said("ab")] * 3 + [said("c", Status.PARKED)]))


def test_a_reward_that_is_no_number_is_an_error():
    class Broken(Spelled):
        def scores(self, responses):
            return [Score(inf) for _ in responses]

    with pytest.raises(ValueError, match=r"the verifier gave inf for problem 'first'"):
        run(Scripted([said("ab")] * 4), task=Broken())


def test_a_verifier_that_fails_counts_nothing_and_is_counted():
    class Slow(Spelled):
        def scores(self, responses):
            return [Score(None, "timeout"), *super().scores(responses)[1:]]

    result = run(Scripted([said("ab"), said("ab"), said("c"), said("c")]), task=Slow())
    assert result.rewards == ((0.0, 1.0), (1.0, 1.0))
    assert result.failures == 1
    assert result.summary()["eval/failures"] == 1.0


# The shipped model


@pytest.mark.usefixtures("one_thread")
def test_the_shipped_model_evaluates_the_same_whatever_the_slots_and_the_company():
    task = Countdown()
    tokenizer = AutoTokenizer.from_pretrained(model_path(), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_path(), local_files_only=True)
    sampling = Sampling(stop_ids=frozenset({tokenizer.eos_token_id}))

    def measured(*, slots=128, seed=0, problems=task.test[:32]):
        engine = LocalEngine(model, slots=slots)
        engine.load(model.named_parameters(), version=0)
        return evaluate(
            engine,
            Policy(model, tokenizer, sampling.stop_ids),
            task.scores,
            problems,
            k=8,
            sampling=sampling,
            max_tokens=MAX_RESPONSE_TOKENS,
            seed=seed,
        )

    result = measured()
    assert measured() == result
    assert measured(slots=37, problems=task.test[16:32]).rewards == result.rewards[16:]
    assert measured(seed=1, problems=task.test[:8]).rewards != result.rewards[:8]

    assert 0.25 < result.avg.value < 0.55
    assert result.avg.low > 0.15
    assert result.avg.high < 0.65
    assert result.pass_k.value > 0.75
    assert 0.40 < result.entropy < 0.60
    assert 40 < result.length < 56
    assert result.length_wrong > 1.5 * result.length_correct
    assert 0.2 < result.truncated < 0.7
    assert len(result.summary()) == 12
