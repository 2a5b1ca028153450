"""Conversations: every response of a run with the environment beside it, turn after turn.

A response that ended a turn is neither idle nor with an engine until its environment has answered. What the environment
said is then added as tokens that nobody sampled, and the policy goes on, or the episode is over:

    answered             the environment said so. Its task's verifier, or its own reward, says how well
    turns, context       the limit of turns or of tokens came first; as if the response was cut off
    environment failed   the environment could not answer, or answered differently when it was given the same turns
    grader failed        its own reward could not be computed

The last two are no fault of the policy. The environment is tried `retries` times more; then the whole group is given
up, with the cause. Nothing that failed on our side is trained on.

Every answer is recorded in its response, with the place that it has there. An environment that failed, or is not there
because the run was stopped and resumed, begins anew: it is given the recorded turns, its answers must be those that are
recorded, and then it goes on. So the state of a conversation is its response, and no environment needs to be saved. One
that cannot repeat itself may offer its state, which is recorded with its answers; it goes on from the last one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from bapo.environments.episode import Answer, Environments, Script
from bapo.types import Group, Status, Trajectory

ANSWERED, TURNS, CONTEXT = "answered", "turns", "context"
ENVIRONMENT_FAILED, GRADER_FAILED = "environment failed", "grader failed"
FAILED = (ENVIRONMENT_FAILED, GRADER_FAILED)
ENDINGS = (ANSWERED, TURNS, CONTEXT, *FAILED)
RETRIES = 2
"""How often an episode is tried again after its environment or its grader failed."""


@dataclass(eq=False)
class _Episode:
    """One response and its environment."""

    key: str
    group: Group
    trajectory: Trajectory
    given: int = 0
    """How many answers the environment that lives now has given."""
    asked: bool = False
    """Whether a question to it is open."""
    tries: int = 0
    """How often it failed."""
    cause: str = ""
    """Why it was given up."""


class Conversations:
    """The episodes of the groups in progress."""

    def __init__(
        self,
        environments: Environments,
        script: Script,
        *,
        ends: Iterable[int],  # tokens that end a turn: the model's stop tokens, and those of `turn_ends`
        max_tokens: int,  # of a response, with what the environment says
        max_turns: int | None = None,
        max_context: int | None = None,  # of prompt and response together
        retries: int = RETRIES,
    ) -> None:
        self.environments, self.script, self.ends = environments, script, frozenset(ends)
        self.max_tokens, self.max_turns, self.max_context, self.retries = max_tokens, max_turns, max_context, retries
        self._episodes: dict[str, _Episode] = {}
        self._of: dict[int, _Episode] = {}
        """By id() of the response."""

    def admit(self, groups: Iterable[Group]) -> None:
        """Begin the episodes of new groups, and go on with those of groups that come from a saved state."""
        for group in groups:
            for index, trajectory in enumerate(group.trajectories):
                episode = _Episode(f"{group.id}/{index}", group, trajectory)
                self._episodes[episode.key] = self._of[id(trajectory)] = episode
                if trajectory.status is Status.PARKED and self._is_due(trajectory):
                    self._ask(episode)

    def forget(self, groups: Iterable[Group]) -> None:
        """End the episodes of groups that are no longer in progress."""
        for group in groups:
            for trajectory in group.trajectories:
                episode = self._of.pop(id(trajectory))
                self.environments.end(episode.key)
                del self._episodes[episode.key]

    def restart(self, groups: Iterable[Group]) -> None:
        """Forget everything, and go on with these groups as they are."""
        for episode in self._episodes.values():
            self.environments.end(episode.key)
        self._episodes, self._of = {}, {}
        self.admit(groups)

    @property
    def causes(self) -> dict[int, str]:
        """Why groups were given up, by id: of the first response that was."""
        return {one.group.id: one.cause for one in reversed(self._episodes.values()) if one.cause}

    @property
    def busy(self) -> bool:
        """Whether an answer will come."""
        return any(self.waits(one.trajectory) for one in self._episodes.values())

    @property
    def at_once(self) -> bool:
        """Whether nobody has to wait for answers."""
        return self.environments.at_once

    def waits(self, trajectory: Trajectory) -> bool:
        """Whether a response waits for its environment, so that no engine can continue it."""
        return trajectory.status is Status.PARKED and self._of[id(trajectory)].asked

    def room(self, trajectory: Trajectory, more: int = 0, context: list[int] | None = None) -> int:
        """How many tokens a response may have, after so many more, and if it goes on from this context."""
        left = self.max_tokens - len(trajectory.tokens) - more
        if self.max_context is not None:
            read = len(trajectory.context) + more if context is None else len(context)
            left = min(left, self.max_context - read)
        return left

    def ended(self, trajectory: Trajectory) -> None:
        """The engine says that this response has ended, at a stop token or at the limit: its environment is asked."""
        if trajectory.status is Status.TRUNCATED:
            trajectory.ending = CONTEXT
        trajectory.status = Status.PARKED
        self._ask(self._of[id(trajectory)])

    def listen(self, timeout: float) -> None:
        """Take in what the environments have answered. Waits for the first answer at most this many seconds."""
        for key, answer in self.environments.collect(timeout):
            episode = self._episodes.get(key)
            if episode is not None and episode.asked:
                episode.asked = False
                if episode.trajectory.status is Status.PARKED:  # and its group was not given up meanwhile
                    self._take(episode, answer)

    # One episode.

    def _is_due(self, trajectory: Trajectory) -> bool:
        """Whether the environment is to be asked, and not the policy."""
        return not trajectory.answers or bool(trajectory.ending) or self._turn_is_over(trajectory)

    def _turn_is_over(self, trajectory: Trajectory) -> bool:
        """Whether the last token ended a turn that was not answered yet."""
        tokens = trajectory.tokens
        return len(tokens) > _read(trajectory.answers) and tokens[-1] in self.ends

    def _ask(self, episode: _Episode) -> None:
        """Ask what the environment has not answered yet: first what is recorded, then the last turn, then the grade."""
        key, trajectory, turn = episode.key, episode.trajectory, episode.given
        answers = trajectory.answers
        if turn == 0:
            self.environments.begin(key, episode.group.problem, _state(answers))
        elif turn < len(answers) or not trajectory.ending:
            begin = _read(answers[:turn])
            end = answers[turn]["at"] if turn < len(answers) else len(trajectory.tokens)
            self.environments.act(key, self.script.turn(trajectory.tokens[begin:end]))
        else:
            self.environments.grade(key)
        episode.asked = True

    def _take(self, episode: _Episode, answer: Answer) -> None:
        """Take in the answer to the open question."""
        trajectory, turn = episode.trajectory, episode.given
        if not answer.failure:
            answer = _checked(answer)
        grading = bool(turn and turn == len(trajectory.answers) and trajectory.ending)
        if answer.failure:
            self._failed(episode, GRADER_FAILED if grading else ENVIRONMENT_FAILED, answer.failure)
            return
        if turn == 0 and _state(trajectory.answers) is not None:
            episode.given = len(trajectory.answers) - 1  # it was restored
        elif turn < len(trajectory.answers):
            told = {name: getattr(answer, name) for name in ("text", "over", "reward")}
            before = {name: trajectory.answers[turn][name] for name in told}
            if told != before:
                self._give_up(episode, ENVIRONMENT_FAILED, f"{self.environments.name} {_differs(turn, before, told)}")
                return
        else:
            try:
                self._record(episode, answer)
            except ValueError as error:
                self._failed(episode, ENVIRONMENT_FAILED, str(error))
                return
        episode.given += 1
        again = episode.given < len(trajectory.answers)
        if trajectory.status is Status.PARKED and (again or self._is_due(trajectory)):
            self._ask(episode)

    def _record(self, episode: _Episode, answer: Answer) -> None:
        """Add a new answer to the response. Raises ValueError if it cannot be."""
        trajectory = episode.trajectory
        turn, said = len(trajectory.answers), list[int]()
        if turn == 0:
            prompt = self.script.prompt(episode.group.problem, answer.text)
            if self.max_context is not None and len(prompt) >= self.max_context:
                raise ValueError(f"the prompt has {len(prompt)} tokens then, which leaves no room for a response")
            if answer.over:
                raise ValueError("the episode was over before the first turn")
            trajectory.prompt = prompt
        elif trajectory.ending:
            self.environments.end(episode.key)
            trajectory.status = Status.STOPPED if trajectory.ending == ANSWERED else Status.TRUNCATED
        elif answer.over:
            trajectory.ending = ANSWERED
        else:
            said = self.script.observation(answer.text)
            context = self._context(episode, answer) if said else None
            if turn == self.max_turns:
                trajectory.ending, said = TURNS, []
            elif self.room(trajectory, len(said), context) <= 0:
                trajectory.ending, said = CONTEXT, []
        place = {"at": len(trajectory.tokens), "tokens": len(said)}
        kept = {} if answer.state is None else {"state": answer.state}
        trajectory.answers.append(place | {"text": answer.text, "over": answer.over, "reward": answer.reward} | kept)
        if said:
            as_it_stands = trajectory.context + said
            trajectory.observe(said)
            if context not in (None, as_it_stands):
                trajectory.contexts.append({"at": len(trajectory.tokens), "tokens": context})

    def _context(self, episode: _Episode, answer: Answer) -> list[int] | None:
        """What the policy would read next as its chat template writes it, if that may be something else."""
        trajectory = episode.trajectory
        opening, *answers = trajectory.answers
        ends = [(each["at"], each["text"]) for each in answers] + [(len(trajectory.tokens), answer.text)]
        begins = [_read(trajectory.answers[: index + 1]) for index in range(len(ends))]
        turns = [(trajectory.tokens[begin:end], said) for begin, (end, said) in zip(begins, ends, strict=True)]
        return self.script.context(episode.group.problem, opening["text"], turns)

    def _failed(self, episode: _Episode, ending: str, cause: str) -> None:
        """Try again, or give the group up."""
        episode.tries += 1
        if episode.tries > self.retries:
            self._give_up(episode, ending, cause)
            return
        self.environments.end(episode.key)
        episode.given = 0
        self._ask(episode)

    def _give_up(self, episode: _Episode, ending: str, cause: str) -> None:
        """Give up this response. Its group follows when the scheduler hears of it."""
        episode.trajectory.ending, episode.trajectory.status = ending, Status.DROPPED
        episode.cause = f"{ending}: {' '.join(cause.split())[:300]}"


def turns_of(trajectory: Trajectory) -> int:
    """How many turns the policy took; an unfinished last one counts."""
    asked = trajectory.answers[:-1] if trajectory.finished else trajectory.answers  # without the grade
    return max(0, len(asked) - 1) + (len(trajectory.tokens) > _read(asked))


def reward_of(answers: Sequence[dict[str, Any]]) -> float | None:
    """The environment's own reward for a graded episode: its grade, else the sum of its steps; None without either."""
    rewards: list[float | None] = [None, *(answer["reward"] for answer in answers)]
    *steps, grade = rewards
    given = [reward for reward in steps if reward is not None]
    return grade if grade is not None else math.fsum(given) if given else None


def _state(answers: Sequence[dict[str, Any]]) -> Any:
    """What an environment said last that it can go on from; None if it is given the turns again."""
    return answers[-1].get("state") if answers else None


def _read(answers: Sequence[dict[str, Any]]) -> int:
    """How many tokens of a response come before what the policy wrote after these answers."""
    return answers[-1]["at"] + answers[-1]["tokens"] if answers else 0


def _checked(answer: Answer) -> Answer:
    """The answer, or a failure in its place if it is none."""
    said, reward = answer.text, answer.reward
    if not isinstance(said, str) and not (isinstance(said, list) and all(isinstance(each, dict) for each in said)):
        return Answer(failure=f"it said {said!r:.60}, which is neither text nor messages")
    try:
        json.dumps(said)
    except (TypeError, ValueError) as error:
        return Answer(failure=f"it said something that cannot be recorded: {error}")
    if reward is None:
        return answer
    if not isinstance(reward, Real) or not math.isfinite(reward):
        return Answer(failure=f"its reward is {reward!r:.60}, which is no finite number")
    return replace(answer, reward=float(reward))


def _differs(turn: int, before: dict[str, Any], now: dict[str, Any]) -> str:
    name = next(name for name in before if before[name] != now[name])
    which = "when it began" if turn == 0 else f"to turn {turn}"
    return (
        f"answered differently {which}, given the same turns: {name} {now[name]!r:.80}, before {before[name]!r:.80}; "
        "if it cannot repeat itself, give it state() and restore()"
    )
