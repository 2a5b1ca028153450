"""Problems in a shuffled order that a single number can resume.

With n problems, draw i is position i mod n of epoch i div n. Each epoch has its own order, drawn from (seed, epoch). So
the cursor is all the state there is.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from bapo.types import Problem


class ProblemStream:
    """Endless draws from a set of problems. Every problem comes once per epoch."""

    def __init__(self, problems: Sequence[Problem], *, seed: int, cursor: int = 0) -> None:
        if not problems:
            raise ValueError("the task has no training problems, so nothing can be drawn. Check its size or its data.")
        self.problems = problems
        self.seed = seed
        self.cursor = cursor
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
