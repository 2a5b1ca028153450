"""avg@k, pass@k and maj@k from rewards and answers, each with its interval, and the figures of results.json.

Pure arithmetic: no model, no verifier.

avg@k is the mean reward of k responses per problem. pass@k is the probability that at least one of k responses solves
the problem; from n >= k responses of which c solve it, the estimator without bias (arXiv:2107.03374, eq. 1) is

    pass@k = 1 - C(n - c, k) / C(n, k)        averaged over problems

maj@k is the probability that the most frequent answer is right (self-consistency, arXiv:2203.11171). With n_a of a
problem's k responses giving the answer a, and s_a of those solving the problem,

    M = {a : n_a = max n}        maj@k = mean over a in M of s_a / n_a        averaged over problems

so a tie is settled by lot. s_a / n_a is 0 or 1 if the verifier judges equal answers equally. A response without an
answer does not vote; a problem without votes counts 0.

The intervals are 95% intervals over problems: they hold the mean over all problems of this kind. So the
unit is the problem, one value v each; k responses to one problem are not k independent trials. Evaluations that matter
sit near 0 or 1, and there the usual intervals fail: when every problem is solved they have no width. We take Wilson's
score interval (1927) for a proportion with the effective number of trials e of survey statistics:

    p = mean of v      e = p (1 - p) / (var(v) / problems)      the number of coin flips that would be as noisy
    centre = (p + z²/2e) / (1 + z²/e)      half width = z √(p (1 - p)/e + z²/4e²) / (1 + z²/e)      z = 1.96

If all v are 0 or all 1, e is the number of problems; e never exceeds the number of responses. Simulated evaluations of
32 problems and k = 8, solve rates from four Beta distributions from hard to easy, 20,000 each: this interval covers the
true avg@8 and pass@8 in 92% to 100% of them. Student's t and the bootstrap cover as few as 88% for avg@8, and almost
none for pass@8 near 1. With 8 problems ours still covers 92%, with 4 only 86%. A test repeats a part of this.

Two policies evaluated on the same problems share the luck of the draw: their difference is surer than two overlapping
intervals suggest.

`results` computes the figures of every data set and of all. `overall` gives every problem the same weight, so a large
data set outweighs a small one; `mean_over_data_sets` gives every data set the same weight. Both lack maj@k if a data
set lacks it: a problem whose responses cannot vote is not a problem whose responses vote wrongly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import comb, isfinite, sqrt
from statistics import NormalDist, fmean, variance
from typing import Any

SOLVED = 0.5  # a response with a reward above this solves its problem
Row = dict[str, Any]  # a line of responses.jsonl: a problem with its responses
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95% interval."""

    value: float
    low: float
    high: float


def avg_at_k(
    rewards: Sequence[Sequence[float]],  # [problems][samples]
) -> Estimate:
    """Mean over problems of their mean reward. Rewards outside [0, 1] stretch the interval's scale to themselves."""
    floor = min(0.0, min(map(min, rewards)))
    ceiling = max(1.0, max(map(max, rewards)))
    unit = _interval([(fmean(row) - floor) / (ceiling - floor) for row in rewards], trials=sum(map(len, rewards)))
    low, high = (floor + edge * (ceiling - floor) for edge in (unit.low, unit.high))
    value = fmean([fmean(row) for row in rewards])
    return Estimate(value, min(low, value), max(high, value))


def pass_at_k(
    rewards: Sequence[Sequence[float]],  # [problems][samples], at least k samples each
    k: int,
) -> Estimate:
    """Mean over problems of 1 - C(n - c, k) / C(n, k), with c of the problem's n rewards above SOLVED."""
    wrong = [sum(not reward > SOLVED for reward in row) for row in rewards]
    values = [1 - comb(count, k) / comb(len(row), k) for count, row in zip(wrong, rewards, strict=True)]
    return _interval(values, trials=sum(map(len, rewards)))


def maj_at_k(
    rewards: Sequence[Sequence[float]],  # [problems][k]
    answers: Sequence[Sequence[str | None]],  # the same shape; None: the response gives no answer
) -> Estimate:
    """Mean over problems of the chance that an answer drawn from the most frequent ones is right."""
    values = [_majority(row, given) for row, given in zip(rewards, answers, strict=True)]
    return _interval(values, trials=sum(map(len, rewards)))


def _majority(rewards: Sequence[float], answers: Sequence[str | None]) -> float:
    """The mean over a in M of s_a / n_a of the module's docstring."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    solved = Counter(answer for answer, reward in zip(answers, rewards, strict=True) if reward > SOLVED)
    return fmean(solved[answer] / most for answer, count in votes.items() if count == most)


def _interval(
    values: Sequence[float],  # one per problem, in [0, 1]
    *,
    trials: int,  # responses in all
) -> Estimate:
    """Mean with the interval of the module's docstring."""
    mean = min(max(fmean(values), 0.0), 1.0)
    spread = mean * (1 - mean)
    noise = variance(values) / len(values) if len(values) > 1 else 0.0
    effective = float(len(values))
    if spread > 0 and len(values) > 1:
        effective = min(spread / noise, trials) if noise > 0 else trials
    scale = 1 + _Z**2 / effective
    centre = (mean + _Z**2 / (2 * effective)) / scale
    half = _Z * sqrt(spread / effective + _Z**2 / (4 * effective**2)) / scale
    return Estimate(mean, max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean)))


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None if there are no values or no finite mean (an engine that cannot tell entropies says NaN)."""
    listed = list(values)
    value = fmean(listed) if listed else float("nan")
    return value if isfinite(value) else None


def results(rows: Sequence[Row], identity: dict[str, Any]) -> dict[str, Any]:
    """The contents of results.json. They depend on configuration and responses only, not on times or paths."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    by_name = {name: figures([row for row in rows if row["data"] == name]) for name in names}
    values = {
        key: [found[key] and found[key]["value"] for found in by_name.values()] for key in ("avg", "pass_k", "maj")
    }
    means = {key: None if None in found else fmean(found) for key, found in values.items()}
    return {
        **identity,
        "data_sets": by_name,
        "overall": figures(rows) | ({"maj": None} if means["maj"] is None else {}),
        "mean_over_data_sets": means,
        "problem_table": [problem_figures(row) for row in rows],
    }


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of some problems, as JSON values. Lengths count the stop token; a mean over nothing is null."""
    listed = [row["responses"] for row in rows]
    responses = [response for row in listed for response in row]
    rewards = [[_reward(response) for response in row] for row in listed]
    answers = [[response["answer"] for response in row] for row in listed]
    truncated = [[float(response["status"] == "truncated") for response in row] for row in listed]
    k = min(map(len, rewards))
    voted = any(answer is not None for row in answers for answer in row)
    right = [response["tokens"] for response in responses if _reward(response) > SOLVED]
    wrong = [response["tokens"] for response in responses if not _reward(response) > SOLVED]
    causes = Counter(response["failure"] for response in responses if response["reward"] is None)
    return {
        "problems": len(rows),
        "responses": len(responses),
        "avg": asdict(avg_at_k(rewards)),
        "pass": {str(j): asdict(pass_at_k(rewards, j)) for j in powers_up_to(k)},
        "pass_k": asdict(pass_at_k(rewards, k)),
        "maj": asdict(maj_at_k(rewards, answers)) if voted else None,
        "truncated": asdict(avg_at_k(truncated)),
        "length": mean(response["tokens"] for response in responses),
        "length_correct": mean(right),
        "length_wrong": mean(wrong),
        "entropy": _entropy(responses),
        "answered": fmean(answer is not None for row in answers for answer in row) if voted else None,
        "failures": causes.total(),
        "failure_causes": dict(causes.most_common()),
        **_episodes([response for response in responses if response.get("ending")]),
    }


def _episodes(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean turns, and how often episodes ended in which way; nothing if nothing answered the model."""
    endings = Counter(response["ending"] for response in responses)
    return {"turns": mean(r["turns"] for r in responses), "endings": dict(endings.most_common())} if endings else {}


def problem_figures(row: Row) -> dict[str, Any]:
    """One line of the per-problem table."""
    responses = row["responses"]
    rewards = [_reward(response) for response in responses]
    answers = [response["answer"] for response in responses]
    votes = Counter(answer for answer in answers if answer is not None)
    return {
        "data": row["data"],
        "id": row["id"],
        "source": row["source"],
        "avg": fmean(rewards),
        "solved": sum(reward > SOLVED for reward in rewards),
        "verdicts": "".join("×" if r["reward"] is None else "■" if _reward(r) > SOLVED else "□" for r in responses),
        "maj": maj_at_k([rewards], [answers]).value if votes else None,
        "most_frequent": votes.most_common(1)[0][0] if votes else None,
        "length": fmean(response["tokens"] for response in responses),
        "truncated": sum(response["status"] == "truncated" for response in responses),
        "failures": sum(response["reward"] is None for response in responses),
    }


def powers_up_to(k: int) -> list[int]:
    """1, 2, 4, … below k, and k."""
    return [*(2**i for i in range(k.bit_length()) if 2**i < k), k]


def _reward(response: dict[str, Any]) -> float:
    """0 if the verifier failed, because nothing shows that the problem is solved."""
    return float(response["reward"] or 0.0)


def _entropy(responses: Sequence[dict[str, Any]]) -> float | None:
    """Mean over tokens, in nats."""
    known = [(r["entropy"], r["tokens"]) for r in responses if r["entropy"] is not None]
    tokens = sum(count for _, count in known)
    return sum(value * count for value, count in known) / tokens if tokens else None


def by_data_set(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of every data set, and of all together if there are several."""
    found: dict[str, dict[str, Any]] = results["data_sets"]
    return found | ({"overall": results["overall"]} if len(found) > 1 else {})
