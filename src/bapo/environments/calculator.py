"""The embedded environment: a calculator for countdown, in this process.

    prompt      3,7,2=13:
    response    3+7+2=12;7+3*2=13.        the policy writes 3+7+2= and the calculator says 12

A turn ends with the sign =, and the answer is the value of the sum of whole numbers with + - * before it. If there is
none it says nothing, and the policy may write the value itself. A turn that ends otherwise is the last one. There is no
reward: the task's verifier reads the whole search.
"""

from __future__ import annotations

import math
import re
from typing import Any

from bapo.config.task import CALCULATOR
from bapo.environments.episode import Answer
from bapo.types import Problem

_SUM = re.compile(r"(?<![-+*0-9])[0-9]{1,9}(?:[-+*][0-9]{1,9})+=\Z", re.ASCII)


class Calculator:
    """Answers at once, and remembers nothing."""

    name = CALCULATOR
    at_once = True
    turn_ends = ("=",)

    def __init__(self) -> None:
        self._said: list[tuple[str, Answer]] = []

    def begin(self, key: str, problem: Problem, state: Any = None) -> None:
        """There is nothing to say about a problem."""
        self._said.append((key, Answer()))

    def act(self, key: str, turn: str) -> None:
        """The value of the sum at the end of the turn."""
        self._said.append((key, Answer(value(turn), over=not turn.endswith("="))))

    def grade(self, key: str) -> None:
        """It has no opinion."""
        self._said.append((key, Answer()))

    def collect(self, timeout: float) -> list[tuple[str, Answer]]:
        """All answers are there at once."""
        said, self._said = self._said, []
        return said

    def end(self, key: str) -> None:
        """Its answer, if there is one, is not read."""
        self._said = [each for each in self._said if each[0] != key]

    def close(self) -> None:
        """Nothing was started."""


def value(turn: str) -> str:
    """The value of the sum at the end of a turn, products first; empty if there is none."""
    found = _SUM.search(turn)
    if found is None:
        return ""
    terms = re.findall(r"([-+]?)([0-9*]+)", found[0])  # signs and products
    return str(sum((-1 if sign == "-" else 1) * math.prod(map(int, product.split("*"))) for sign, product in terms))
