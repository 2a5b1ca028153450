"""Rewards for finished responses, and the metrics of a rollout.

A verifier may fail: it may run out of time or memory, crash, or raise. Then the response has no reward, which is
different from a reward of 0: it leaves its group, is logged with the cause and is never trained on. A group with fewer
than two responses left has nothing to compare and is left out as a whole. So is a group of episodes if one of them has
no reward: a group of conversations is scored as a whole, or not at all.

An environment may have given an episode a reward of its own. Otherwise the task's verifier scores the transcript.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

from bapo.environments.conversations import ENDINGS, FAILED, GRADER_FAILED, reward_of, turns_of
from bapo.rollout.scheduler import Rollout
from bapo.runs.metrics import EACH_REWARD
from bapo.tasks.task import Rewarded, Task, following, mostly_why
from bapo.types import Group, ResponseText, Score, Status


@dataclass(frozen=True)
class Failure:
    """A response without a reward."""

    group: int
    problem: str
    response: str
    cause: str


@dataclass(frozen=True)
class Scored:
    """Groups with rewards, and the responses without one."""

    groups: list[Group]
    failures: list[Failure]
    asked_groups: int = 0
    """How many groups the verifier was asked about."""
    asked_responses: int = 0
    """How many responses they have."""
    judged: tuple[int, int] = (0, 0)
    """Tokens that a judge read and wrote for these rewards."""

    @property
    def causes(self) -> Counter[str]:
        """How often the verifier failed for which reason."""
        return Counter(failure.cause for failure in self.failures)


def together(parts: Sequence[Scored]) -> Scored:
    """What was scored in several parts."""
    return Scored(
        [group for part in parts for group in part.groups],
        [failure for part in parts for failure in part.failures],
        sum(part.asked_groups for part in parts),
        sum(part.asked_responses for part in parts),
        (sum(part.judged[0] for part in parts), sum(part.judged[1] for part in parts)),
    )


ENOUGH_GROUPS = 8
"""If the verifier fails on all responses of so many groups in a row, it is not the problems that are broken."""


@dataclass(frozen=True)
class Failing:
    """The groups in a row, up to the last step, on which the verifier failed altogether, however many steps they took.

    A step may finish a single group, and its problem may be broken. So a step alone says nothing about the verifier.
    """

    groups: int = 0
    responses: int = 0
    since: int = 0
    """The step in which the first of them was scored."""
    cause: str = ""
    """Why the verifier failed on the first response."""

    def after(self, step: int, scored: Scored) -> Failing:
        """The same, after a step in which these groups were scored. One reward ends the row."""
        if not scored.asked_responses:
            return self
        if len(scored.failures) < scored.asked_responses:
            return Failing()
        return Failing(
            self.groups + scored.asked_groups,
            self.responses + scored.asked_responses,
            self.since or step,
            self.cause or scored.failures[0].cause,
        )

    @property
    def ends_run(self) -> bool:
        """Whether nothing can be learned with this verifier."""
        return self.groups >= ENOUGH_GROUPS


def score(
    groups: Sequence[Group],  # finished
    task: Task,
    transcript: Callable[[list[int]], str],  # the text of a response, without a stop token
    overlong: Callable[[int], float],  # length in tokens -> what it adds to the reward for learning; at most 0
    tell: Callable[[Rewarded], None] | None = None,  # is told how far it is
) -> Scored:
    """Score every response by its text without the stop token. Raises StopAsked if a stop should not wait for it."""
    asked = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    texts = [ResponseText(transcript(trajectory.tokens), trajectory.tokens) for _, trajectory in asked]
    own = [reward_of(trajectory.answers) for _, trajectory in asked]
    left = [(g.problem, text) for (g, _), text, reward in zip(asked, texts, own, strict=True) if reward is None]
    with following(len(left), tell):
        given = iter(task.scores(left))
    scores = [next(given) if reward is None else Score(reward) for reward in own]
    failures = []
    for (group, trajectory), text, result in zip(asked, texts, scores, strict=True):
        trajectory.reward, trajectory.rewards = result.reward, result.rewards
        trajectory.shaping = overlong(len(trajectory.tokens))
        if result.reward is None:
            trajectory.ending = trajectory.ending and GRADER_FAILED
            failures.append(Failure(group.id, group.problem.id, str(text), result.failure))
    whole = [rewarded for group in groups if (rewarded := _rewarded(group))]
    judged = (sum(result.read for result in scores), sum(result.written for result in scores))
    return Scored(whole, failures, len(groups), len(asked), judged)


def with_given_up(scored: Scored, rollout: Rollout, decode: Callable[[list[int]], str]) -> Scored:
    """What was scored, with the failures of groups that were given up because an environment or a grader failed."""
    causes = rollout.causes
    given_up = [group for group in rollout.dropped if group.id in causes]
    failures = [
        Failure(group.id, group.problem.id, decode(trajectory.tokens), causes[group.id])
        for group in given_up
        for trajectory in group.trajectories
        if trajectory.ending in FAILED
    ]
    return together([scored, Scored([], failures, len(given_up), len(failures))])


def unscored(groups: Sequence[Group], scored: Scored) -> dict[int, dict[str, Any]]:
    """The groups that were left out because too few of their responses have a reward, and what the ledger is told."""
    kept, causes = {group.id for group in scored.groups}, {failure.group: failure.cause for failure in scored.failures}
    left = [group for group in groups if group.id not in kept]
    played = {group.id for group in left if any(t.ending for t in group.trajectories)}
    return {g.id: {"cause": f"{GRADER_FAILED}: {causes[g.id][:300]}"} if g.id in played else {} for g in left}


def _rewarded(group: Group) -> Group | None:
    """The group with only those responses that have a reward; None if they are too few to compare."""
    left = [trajectory for trajectory in group.trajectories if trajectory.reward is not None]
    if len(left) == len(group.trajectories):
        return group
    whole = any(trajectory.ending for trajectory in group.trajectories)
    return replace(group, trajectories=left) if len(left) > 1 and not whole else None


def warning(
    rollouts: Sequence[Mapping[str, Any]],  # the lines of a run
    responses: int,  # in a group
    causes: Counter[str],  # for which the verifier failed
    *,
    shaped: bool,  # whether rewards for learning may differ where rewards do not
) -> str:
    """What is wrong with the rewards of a whole run, in a sentence; empty if they could teach something."""
    means = [line["reward"] for line in rollouts if "reward" in line]
    asked = responses * sum(line["rollout/finished_groups"] for line in rollouts)
    kept = rollouts[-1]["buffer/added"] if rollouts else 0
    look = "Read some of them in rollouts.jsonl, and ask the reward function about a right answer"
    if causes.total() > asked / 2:
        return f"the verifier failed on {causes.total()} of {asked} responses; {mostly_why(causes)}"
    if len(set(means)) == 1 and (not kept or (shaped and means[0] == 0)):
        equal = f"the reward was 0 for all of {asked} responses"
        if means[0]:
            equal = f"no group's rewards differed, and their mean was {means[0]:g} in every step ({asked} responses)"
        return f"{equal}. {look}"
    return ""


def response_metrics(
    groups: Sequence[Group],
    failures: int,
    judged: tuple[int, int] = (0, 0),
    dropped: Sequence[Group] = (),
) -> dict[str, Any]:
    """Rewards and lengths of the finished responses, and how episodes ended. A mean over no responses has no key."""
    scored = [(t.reward, t) for group in groups for t in group.trajectories if t.reward is not None]
    right = [len(t.versions) for reward, t in scored if reward > 0.5]
    wrong = [len(t.versions) for reward, t in scored if reward <= 0.5]
    named = scored[0][1].rewards if scored else ()
    means: dict[str, list[Any]] = {
        "reward": [reward for reward, _ in scored],
        "length": [*right, *wrong],
        "length_correct": right,
        "length_wrong": wrong,
        "truncated": [t.status is Status.TRUNCATED for _, t in scored],
        "turns": [turns_of(t) for _, t in scored if t.ending],
        "observed": [len(t.tokens) - len(t.versions) for _, t in scored if t.ending],
        "kept_mass": [exp(mass) for _, t in scored for mass in t.log_kept],
        **{
            f"{EACH_REWARD}{name}": [value for _, t in scored if (value := t.rewards[name]) is not None]
            for name in named
        },
    }
    endings = Counter(t.ending for group in (*groups, *dropped) for t in group.trajectories if t.ending)
    return {name: sum(values) / len(values) for name, values in means.items() if values} | {
        **({f"endings/{name.replace(' ', '_')}": endings[name] for name in ENDINGS} if endings else {}),
        "reward_failures": failures,
        **({"judge_read": judged[0], "judge_written": judged[1]} if any(judged) else {}),
    }
