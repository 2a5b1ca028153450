"""How good a policy is on a set of problems, and how it writes: sample k responses to each, score and count them.

`sample` makes the responses, `evaluate` the figures; `estimates.py` says what the figures mean. Which problems, which
model and what becomes of the responses is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bapo.environments.conversations import Conversations, reward_of, turns_of
from bapo.evaluate.estimates import SOLVED, Estimate, avg_at_k, mean, pass_at_k
from bapo.rollout.engine import Engine, Request, Sampling, Segment, generate
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.screen.watch import Tell
from bapo.tasks.task import Scorer, following
from bapo.types import Group, Problem, ResponseText, Score, Status

if TYPE_CHECKING:
    from bapo.models.policy import Policy


EVALUATED = 1 << 40
"""Where the numbers of groups begin that are evaluated beside those in training."""


@dataclass(frozen=True)
class Response:
    """One response, sampled and scored."""

    segment: Segment  # its tokens, with the stop token
    text: str  # without it
    score: Score
    turns: int = 1
    ending: str = ""
    """How its episode ended; empty without an environment."""

    @property
    def reward(self) -> float:
        """Of the verifier; 0 if it failed, because nobody showed that the problem is solved."""
        return 0.0 if self.score.reward is None else float(self.score.reward)


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. A mean over nothing is None. Lengths count the stop token."""

    problems: int
    k: int
    avg: Estimate
    """Avg@k: mean reward."""
    pass_k: Estimate
    """Pass@k: share of problems solved by at least one of the k responses."""
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
    first_failure: str
    """Why it failed the first time; empty if it never did."""
    rewards: tuple[tuple[float, ...], ...]
    """Of every response, [problems][k], in the order of the problems: what a paired comparison needs."""

    def summary(self) -> dict[str, float]:
        """For the metrics log. A mean over nothing has no key, and no value is NaN."""
        values: dict[str, float | None] = {}
        for name, found in (("avg", self.avg), ("pass", self.pass_k)):
            values |= {f"eval/{name}": found.value, f"eval/{name}_low": found.low, f"eval/{name}_high": found.high}
        for name in ("entropy", "length", "length_correct", "length_wrong", "truncated"):
            values[f"eval/{name}"] = getattr(self, name)
        values["eval/failures"] = float(self.failures)
        return {key: value for key, value in values.items() if value is not None}


def evaluate(engine: Engine, policy: Policy, scorer: Scorer, problems: Sequence[Problem], **how: Any) -> Evaluation:
    """Sample k responses to every problem, as `sample` does with the same arguments, and count them."""
    rows = sample(engine, policy, scorer, problems, **how)
    responses = [response for row in rows for response in row]
    rewards = tuple(tuple(response.reward for response in row) for row in rows)
    lengths = [(len(response.segment.tokens), response.reward > SOLVED) for response in responses]
    k = len(rows[0])
    return Evaluation(
        problems=len(problems),
        k=k,
        avg=avg_at_k(rewards),
        pass_k=pass_at_k(rewards, k),
        entropy=mean(entropy for response in responses for entropy in response.segment.entropies),
        length=fmean(length for length, _ in lengths),
        length_correct=mean(length for length, right in lengths if right),
        length_wrong=mean(length for length, right in lengths if not right),
        truncated=fmean(response.segment.status is Status.TRUNCATED for response in responses),
        failures=sum(response.score.reward is None for response in responses),
        first_failure=next((r.score.failure for r in responses if r.score.reward is None), ""),
        rewards=rewards,
    )


def sample(
    engine: Engine,
    policy: Policy,
    scorer: Scorer,
    problems: Sequence[Problem],
    *,
    k: int,
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    tell: Tell | None = None,
    conversations: Conversations | None = None,
) -> list[list[Response]]:  # [problems][k]
    """k responses to every problem, sampled with the weights that the engine has, and scored.

    With `conversations`, responses have turns, and environments may have rewards of their own.

    The random numbers of a response come from (seed, problem id, index): they do not depend on which other problems are
    evaluated, nor on their order.
    """
    groups = []
    for problem in problems:
        number = int.from_bytes(sha256(problem.id.encode()).digest()[:8], "big")
        prompt, opened = policy.encode(problem.prompt), conversations is None
        groups.append(new_group(number, problem, prompt, responses=k, seed=seed, opened=opened))
    if conversations is not None:
        scheduler = Scheduler(sampling, max_response_tokens=max_tokens, conversations=conversations)
        return _played(scheduler, engine, policy, scorer, groups, tell)
    requests = [
        Request(one.prompt, position=0, seed=one.seed, max_new_tokens=max_tokens)
        for group in groups
        for one in group.trajectories
    ]
    segments = generate(engine, requests, sampling, tell=tell)

    asked = [problem for problem in problems for _ in range(k)]
    for segment, problem in zip(segments, asked, strict=True):
        _refuse_unfinished(segment, problem)
    texts = [ResponseText(policy.transcript(segment.tokens), segment.tokens) for segment in segments]
    with following(len(asked), tell):
        scores = scorer(list(zip(asked, texts, strict=True)))
    if len(scores) != len(asked):
        raise RuntimeError(f"the verifier returned {len(scores)} scores for {len(asked)} responses.")
    for problem, score in zip(asked, scores, strict=True):
        if score.reward is not None and not isfinite(score.reward):
            raise ValueError(f"the verifier gave {score.reward} for problem {problem.id!r}, which is not finite.")
    responses = [Response(*parts) for parts in zip(segments, texts, scores, strict=True)]
    return [responses[i : i + k] for i in range(0, len(responses), k)]


def _played(
    scheduler: Scheduler, engine: Engine, policy: Policy, scorer: Scorer, groups: Sequence[Group], tell: Tell | None
) -> list[list[Response]]:  # [problems][k]
    """The responses of groups that environments answer. An episode that fails on our side has no score."""
    alone = [(group.problem, one) for group in groups for one in group.trajectories]
    scheduler.admit(Group(EVALUATED + index, problem, [one]) for index, (problem, one) in enumerate(alone))
    causes = scheduler.run(engine, tell=tell).causes
    texts = [ResponseText(policy.transcript(one.tokens), one.tokens) for _, one in alone]
    failed = [causes.get(EVALUATED + index, "") for index in range(len(alone))]
    scores = [Score(None if why else reward_of(one.answers), why) for why, (_, one) in zip(failed, alone, strict=True)]
    left = [index for index, score in enumerate(scores) if score.reward is None and not score.failure]
    with following(len(left), tell):
        given = scorer([(alone[index][0], texts[index]) for index in left])
    found = (dict(enumerate(scores)) | dict(zip(left, given, strict=True))).values()
    responses = []
    for (_, t), text, score in zip(alone, texts, found, strict=True):
        segment = Segment(t.own, t.behavior_logprobs, t.entropies, t.versions, t.status)
        responses.append(Response(segment, text, score, turns_of(t), t.ending))
    k = len(groups[0].trajectories)
    return [responses[i : i + k] for i in range(0, len(responses), k)]


def _refuse_unfinished(segment: Segment, problem: Problem) -> None:
    if segment.status not in (Status.STOPPED, Status.TRUNCATED):
        raise RuntimeError(
            f"a response to problem {problem.id!r} came back {segment.status} after {len(segment.tokens)} tokens, "
            "though the engine had no token budget; an evaluation without it would be biased. See the engine's own log."
        )
