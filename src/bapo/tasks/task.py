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
        """What each complete response text, without its stop token, is worth; in order. Never raises over a text.

        Pure: the same text always scores the same, unless the verifier itself fails.
        """
        ...
