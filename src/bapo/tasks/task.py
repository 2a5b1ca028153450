"""What a task is: problems, a verifier for the responses to them, and the order in which the problems are drawn.

    Task             the protocol. Countdown and Gym make their own problems
    DataTask         problems from data, with a scorer for their answers
    Following        whoever waits for scores: is told of each as soon as it is known, and may stop between two
    ProblemStream    draws problems in a shuffled order that a single number can resume

Nothing here knows anything about models.
"""

import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar, Protocol

from bapo.process import stops
from bapo.types import Problem, Score, refuse

Scorer = Callable[[Sequence[tuple[Problem, str]]], list[Score]]
"""Scores many responses, in order. No response text makes it raise."""
STOP_SECONDS = 3.0
"""A stop waits for the scores that are missing if they are likely to be there within this time."""
LONGEST_CAUSE = 100
"""How many characters of the cause of a failure are shown while responses are scored."""


class Task(Protocol):
    """Problems and their verifier."""

    train: Sequence[Problem]
    """Problems to train on."""
    test: Sequence[Problem]
    """Held-out problems; none of them is in `train`."""

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score of each response, given as its complete text without the stop token, in order.

        No response text makes it raise. The same text always gets the same score, unless the verifier itself fails.
        Several threads may call it at once, as a cluster does: they share what the verifier can do at a time.
        """


@dataclass(frozen=True)
class Rewarded:
    """How far scoring is."""

    responses: int
    asked: int
    each: float
    """Seconds per response."""
    failures: Counter[str]
    """Responses that the verifier failed on, by cause."""
    every: ClassVar[float] = 5.0
    """The least time between two lines about it in a log: a function of the user may hang in any call."""

    def line(self, what: str, seconds: float) -> str:
        """`scoring: 12 of 32 responses, 5.0 s each; no reward for 2 responses; the cause: timeout after 5 s`."""
        pace = f", {self.each:.1f} s each" if self.responses else ""
        told = f"; {told_failures(self.failures)}" if self.failures else ""
        return f"scoring: {self.responses} of {self.asked} responses{pace}{told}"


def told_failures(causes: Counter[str]) -> str:
    """`no reward for 5 responses; the most frequent cause (4 times): …`: how often the verifier failed, and why."""
    count = causes.total()
    return f"no reward for {count} response{'s' if count > 1 else ''}; {mostly_why(causes)}"


def mostly_why(causes: Counter[str]) -> str:
    """`the most frequent cause (4 times): ValueError: …`; `the cause: …` if there is no other one."""
    ((cause, most),) = causes.most_common(1)
    cause = " ".join(cause.split())
    shown = cause if len(cause) <= LONGEST_CAUSE else cause[: LONGEST_CAUSE - 1] + "…"
    return f"the most frequent cause ({most} times): {shown}" if len(causes) > 1 else f"the cause: {shown}"


class Following:
    """Counts scores as they come, tells how far scoring is, and raises StopAsked if a stop should not wait for it."""

    def __init__(self, asked: int, tell: Callable[[Rewarded], None] | None) -> None:
        self.asked, self.tell = asked, tell
        self._done, self._causes, self._began = 0, Counter[str](), time.monotonic()
        self._report(0.0)

    def known(self, score: Score) -> Score:
        """Called by a scorer, maybe in a thread, between two responses. Returns the score."""
        self._done += 1
        self._causes += Counter([score.failure] if score.reward is None else [])
        each = (time.monotonic() - self._began) / self._done
        self._report(each)
        if stops.may_leave() and each * (self.asked - self._done) > STOP_SECONDS:
            raise stops.StopAsked
        return score

    def _report(self, each: float) -> None:
        if self.tell is not None:
            self.tell(Rewarded(self._done, self.asked, each, self._causes))


_FOLLOWING: ContextVar[Following | None] = ContextVar("following", default=None)


@contextmanager
def following(asked: int, tell: Callable[[Rewarded], None] | None = None) -> Iterator[None]:
    """Inside, the scorers that this thread calls say how far they are with so many responses."""
    token = _FOLLOWING.set(Following(asked, tell))
    try:
        yield
    finally:
        _FOLLOWING.reset(token)


def listener() -> Callable[[Rewarded], None] | None:
    """Who is told how far this thread's scoring is, for a scorer that asks several others."""
    return found.tell if (found := _FOLLOWING.get()) else None


def followed(asked: int) -> Following:
    """Who follows this thread's scoring, which is of so many responses: a scorer tells them each score."""
    found = _FOLLOWING.get() or Following(asked, None)
    found.asked = asked
    return found


@dataclass(eq=False)
class ProblemStream:
    """Endless draws from a set of problems. Every problem comes once per epoch.

    With n problems, draw i is position i mod n of epoch i div n. Each epoch has its own order, drawn from (seed,
    epoch). So the cursor is all the state there is.
    """

    problems: Sequence[Problem]
    seed: int
    cursor: int = 0

    def __post_init__(self) -> None:
        refuse((not self.problems, "the task has no training problems, so nothing can be drawn. Check its data."))
        self._epoch, self._order = -1, array("q")

    def draw(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        drawn = [self._at(self.cursor + i) for i in range(count)]
        self.cursor += count
        return drawn

    def _at(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self.problems))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, array("q", range(len(self.problems)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)  # noqa: S311
        return self.problems[self._order[position]]
