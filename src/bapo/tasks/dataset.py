"""A task made of data: problems from anywhere, and a scorer for their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from bapo.tasks.data.problems import without_overlap
from bapo.types import Problem, Score

__all__ = ["DataTask", "Scorer"]

Scorer = Callable[[Sequence[tuple[Problem, str]]], list[Score]]
"""Scores many responses, in order. No response text makes it raise."""


class DataTask:
    """Problems to train on, problems to test on, and a scorer for the responses."""

    train: Sequence[Problem]
    test: Sequence[Problem]

    def __init__(self, train: Sequence[Problem], test: Sequence[Problem], scorer: Scorer) -> None:
        _, shared = without_overlap(train, test)
        if shared:
            shown = str(shared[0].prompt)[:80]
            raise ValueError(
                f"{len(shared)} of {len(train)} training problems are test problems too. The first is {shared[0].id} "
                f"({shared[0].source}): {shown!r}. Scores on them would measure memory, not skill. Remove them from "
                "one side; bapo.tasks.data.problems.without_overlap removes them from the training side."
            )
        for name, problems in (("training", train), ("test", test)):
            counts = Counter(problem.id for problem in problems)
            if len(counts) < len(problems):
                repeated, _ = counts.most_common(1)[0]
                raise ValueError(
                    f"two {name} problems have the same id {repeated!r}. Ids must be unique within a task; give each "
                    "problem its own."
                )
        self.train, self.test, self._scorer = train, test, scorer

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score of each response, in order."""
        return self._scorer(responses)
