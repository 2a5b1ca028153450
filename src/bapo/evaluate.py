"""How good a policy is on a set of problems: avg@k and pass@k, with intervals, and how it writes.

avg@k is the mean reward of k responses per problem. pass@k is the probability that at least one of k responses solves
the problem; from n >= k responses of which c solve it, the estimator without bias (arXiv:2107.03374, eq. 1) is

    pass@k = 1 - C(n - c, k) / C(n, k)        averaged over problems

The intervals are 95% intervals over problems: what another draw of as many problems of the same kind would give. So the
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
intervals suggest. `Evaluation.rewards` keeps what a paired comparison needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import comb, isfinite, sqrt
from statistics import NormalDist, fmean, variance

from bapo.rollout.engine import Engine, Request, Sampling, Segment
from bapo.rollout.scheduler import new_group
from bapo.tasks.task import Task
from bapo.types import Message, Problem, Score, Status

__all__ = ["SOLVED", "Estimate", "Evaluation", "avg_at_k", "evaluate", "pass_at_k"]

SOLVED = 0.5
"""A response with a reward above this solves its problem."""
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. A mean over nothing is None. Lengths count the stop token."""

    problems: int
    k: int
    avg: Estimate
    """avg@k: mean reward."""
    pass_k: Estimate
    """pass@k: share of problems solved by at least one of the k responses."""
    entropy: float | None
    """Mean over tokens of the entropy they were drawn with, in nats."""
    length: float
    """Mean tokens per response."""
    length_correct: float | None
    """The same over the responses that solve their problem."""
    length_wrong: float | None
    """The same over the others."""
    truncated: float
    """Share of responses ended by the length limit."""
    failures: int
    """Responses the verifier failed on. Nobody showed that they solve their problem: they count 0."""
    rewards: tuple[tuple[float, ...], ...]
    """Of every response, [problems][k], in the order of the problems."""

    def summary(self) -> dict[str, float]:
        """For the metrics log. A mean over nothing has no key, and no value is NaN."""
        values = {
            "eval/avg": self.avg.value,
            "eval/avg_low": self.avg.low,
            "eval/avg_high": self.avg.high,
            "eval/pass": self.pass_k.value,
            "eval/pass_low": self.pass_k.low,
            "eval/pass_high": self.pass_k.high,
            "eval/entropy": self.entropy,
            "eval/length": self.length,
            "eval/length_correct": self.length_correct,
            "eval/length_wrong": self.length_wrong,
            "eval/truncated": self.truncated,
            "eval/failures": float(self.failures),
        }
        return {key: value for key, value in values.items() if value is not None}


def avg_at_k(
    rewards: Sequence[Sequence[float]],  # [problems][samples]
) -> Estimate:
    """Mean over problems of their mean reward. Rewards outside [0, 1] stretch the interval's scale to themselves."""
    _check(rewards)
    floor = min(0.0, min(map(min, rewards)))
    ceiling = max(1.0, max(map(max, rewards)))
    unit = _interval([(fmean(row) - floor) / (ceiling - floor) for row in rewards], trials=sum(map(len, rewards)))
    low, high = (floor + edge * (ceiling - floor) for edge in (unit.low, unit.high))
    value = fmean([fmean(row) for row in rewards])
    return Estimate(value, min(low, value), max(high, value))


def pass_at_k(
    rewards: Sequence[Sequence[float]],  # [problems][samples], at least k samples each
    k: int,
    threshold: float = SOLVED,
) -> Estimate:
    """Mean over problems of 1 - C(n - c, k) / C(n, k), with c of the problem's n rewards above the threshold."""
    _check(rewards)
    if k < 1:
        raise ValueError(f"k={k}: pass@k asks about k responses. Set k >= 1.")
    shortest = min(map(len, rewards))
    if shortest < k:
        raise ValueError(
            f"k={k}, but a problem has only {shortest} samples: pass@k has no unbiased estimate from fewer than k. "
            f"Sample at least {k} per problem, or set k <= {shortest}."
        )
    values = []
    for row in rewards:
        wrong = sum(1 for reward in row if not reward > threshold)
        values.append(1 - comb(wrong, k) / comb(len(row), k))
    return _interval(values, trials=sum(map(len, rewards)))


def evaluate(
    engine: Engine,
    encode: Callable[[str | list[Message]], list[int]],
    decode: Callable[[list[int]], str],
    task: Task,
    problems: Sequence[Problem],
    *,
    k: int,
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    version: int,
) -> Evaluation:
    """Sample k responses to every problem in one engine call, score and count them.

    The random numbers of a response come from (seed, problem id, index): they do not depend on which other problems are
    evaluated, nor on their order.
    """
    if k < 1:
        raise ValueError(f"k={k}: an evaluation samples k responses per problem. Set k >= 1.")
    if not problems:
        raise ValueError("there are no problems to evaluate on. Give at least one, e.g. task.test.")
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError(
            "some problems occur twice; their responses would be the same, and the intervals too narrow. Give each "
            "problem once and set a larger k for more responses."
        )
    requests = [
        Request(context=response.prompt, position=0, seed=response.seed, max_new_tokens=max_tokens)
        for problem in problems
        for response in new_group(
            _number(problem), problem, encode(problem.prompt), responses=k, seed=seed
        ).trajectories
    ]
    segments = engine.generate(requests, sampling, version=version)
    if len(segments) != len(requests):
        raise RuntimeError(f"{type(engine).__name__} returned {len(segments)} segments for {len(requests)} requests.")

    asked = [problem for problem in problems for _ in range(k)]
    texts = [
        decode(_without_stop(segment, sampling, problem)) for segment, problem in zip(segments, asked, strict=True)
    ]
    scores = task.scores(list(zip(asked, texts, strict=True)))
    flat = [_reward(score, problem) for score, problem in zip(scores, asked, strict=True)]
    rewards = [tuple(flat[i : i + k]) for i in range(0, len(flat), k)]
    solved = [reward > SOLVED for row in rewards for reward in row]
    lengths = [len(segment.tokens) for segment in segments]
    return Evaluation(
        problems=len(problems),
        k=k,
        avg=avg_at_k(rewards),
        pass_k=pass_at_k(rewards, k),
        entropy=_mean(entropy for segment in segments for entropy in segment.entropies),
        length=fmean(lengths),
        length_correct=_mean(length for length, right in zip(lengths, solved, strict=True) if right),
        length_wrong=_mean(length for length, right in zip(lengths, solved, strict=True) if not right),
        truncated=fmean(segment.status is Status.TRUNCATED for segment in segments),
        failures=sum(score.reward is None for score in scores),
        rewards=tuple(rewards),
    )


def _number(problem: Problem) -> int:
    """A group number that depends on the problem's id only."""
    return int.from_bytes(sha256(problem.id.encode()).digest()[:8], "big")


def _without_stop(segment: Segment, sampling: Sampling, problem: Problem) -> list[int]:
    if segment.status not in (Status.STOPPED, Status.TRUNCATED):
        raise RuntimeError(
            f"a response to problem {problem.id!r} came back {segment.status} after {len(segment.tokens)} tokens, "
            "though the engine had no token budget; an evaluation without it would be biased. See the engine's own log."
        )
    if segment.status is Status.STOPPED and segment.tokens and segment.tokens[-1] in sampling.stop_ids:
        return segment.tokens[:-1]
    return segment.tokens


def _reward(score: Score, problem: Problem) -> float:
    if score.reward is None:
        return 0.0
    if not isfinite(score.reward):
        raise ValueError(f"the verifier gave {score.reward} for problem {problem.id!r}; a reward is a finite number.")
    return float(score.reward)


def _check(rewards: Sequence[Sequence[float]]) -> None:
    if not rewards:
        raise ValueError("there are no problems: rewards is empty. Give one row of rewards per problem.")
    for index, row in enumerate(rewards):
        if not row:
            raise ValueError(f"problem {index} has no samples. Give at least one reward per problem.")
        if not all(map(isfinite, row)):
            raise ValueError(f"problem {index} has the rewards {list(row)}; every reward must be a finite number.")


def _mean(values: Iterable[float]) -> float | None:
    """The mean, or None if there are no values or no finite mean (an engine that cannot tell entropies says NaN)."""
    listed = list(values)
    mean = fmean(listed) if listed else float("nan")
    return mean if isfinite(mean) else None


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
