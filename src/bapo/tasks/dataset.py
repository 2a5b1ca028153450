"""A task made of data: problems from anywhere, and a scorer for their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bapo.tasks.data.problems import without_overlap
from bapo.types import Problem, Score

__all__ = ["DataTask", "Scorer"]

Scorer = Callable[[Sequence[tuple[Problem, str]]], list[Score]]
"""Scores many responses, in order, and never raises over a text."""


class DataTask:
    """Problems to train on, problems to test on, and what says how good a response is."""

    train: Sequence[Problem]
    test: Sequence[Problem]

    def __init__(self, train: Sequence[Problem], test: Sequence[Problem], scorer: Scorer) -> None:
        _, shared = without_overlap(train, test)
        if shared:
            shown = str(shared[0].prompt)[:80]
            raise ValueError(
                f"{len(shared)} of {len(train)} training problems are test problems too, first {shared[0].id} "
                f"({shared[0].source}): {shown!r}. Scores on them would show memory, not skill. Remove them from one "
                "side; bapo.tasks.data.problems.without_overlap does it for the training side."
            )
        for name, problems in (("training", train), ("test", test)):
            if len({problem.id for problem in problems}) < len(problems):
                raise ValueError(f"two {name} problems have the same id. Ids must be unique within a task.")
        self.train, self.test, self._scorer = train, test, scorer

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """What each response is worth, in order."""
        return self._scorer(responses)
