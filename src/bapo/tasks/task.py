"""What a task is: problems, a verifier for the responses to them, and the order in which the problems are drawn.

    Task             the protocol. Countdown and Gym make their own problems
    DataTask         problems from data, with a scorer for their answers
    ProblemStream    draws problems in a shuffled order that a single number can resume

Nothing here knows anything about models.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bapo.tasks.data.problems import without_overlap
from bapo.types import Problem, Score, refuse

Scorer = Callable[[Sequence[tuple[Problem, str]]], list[Score]]
"""Scores many responses, in order. No response text makes it raise."""
LARGEST_REWARD = 3.4e38
"""The largest reward allowed, in absolute value: float32 cannot hold more."""


class Task(Protocol):
    """Problems and their verifier."""

    train: Sequence[Problem]
    """Problems to train on."""
    test: Sequence[Problem]
    """Held-out problems; none of them is in `train`."""

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score of each response, given as its complete text without the stop token, in order.

        No response text makes it raise. The same text always gets the same score, unless the verifier itself fails.
        """


def check_sizes(task: str, **sizes: int) -> None:
    """Refuse a negative number of problems."""
    for key, size in sizes.items():
        if size < 0:
            raise ValueError(f"{task}.{key}={size} is negative. A number of problems must be 0 or more.")


class DataTask:
    """Problems to train on, problems to test on, and a scorer for the responses."""

    def __init__(self, train: Sequence[Problem], test: Sequence[Problem], scorer: Scorer) -> None:
        _, shared = without_overlap(train, test)
        if shared:
            raise ValueError(
                f"{len(shared)} of {len(train)} training problems are test problems too. The first is {shared[0].id} "
                f"({shared[0].source}): {str(shared[0].prompt)[:80]!r}. Scores on them would measure memory, not "
                "skill. Remove them, as bapo.tasks.data.problems.without_overlap does."
            )
        for name, problems in (("training", train), ("test", test)):
            counts = Counter(problem.id for problem in problems)
            twice = [id for id, count in counts.items() if count > 1][:1]
            refuse((twice, f"two {name} problems have the same id {twice}. Give each problem of a task its own id."))
        self.train, self.test, self.scores = train, test, scorer


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
