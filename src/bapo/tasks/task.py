"""The Task protocol: where problems come from and how a response is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bapo.types import Problem, Score


class Task(Protocol):
    """Problems and their verifier. Knows nothing about models."""

    train: Sequence[Problem]
    """Problems to train on."""
    test: Sequence[Problem]
    """Held-out problems; none of them is in `train`."""

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score of each response, given as its complete text without the stop token, in order.

        No response text makes it raise. The same text always gets the same score, unless the verifier itself fails.
        """
        ...
