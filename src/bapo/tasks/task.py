"""The Task protocol: where problems come from and how a response is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bapo.types import Problem


class Task(Protocol):
    """Problems and their verifier. Knows nothing about models."""

    train: Sequence[Problem]
    """Problems to train on."""
    test: Sequence[Problem]
    """Held-out problems; none of them is in `train`."""

    def score(self, problem: Problem, response: str) -> float:
        """Reward of one complete response text, without the stop token. Pure: the same text always scores the same."""
        ...
