"""Noisy searches for the countdown task: the demonstrations that the demo model learns from in its warm start.

A demonstration is what a careless solver would write. It tries expressions more or less at random and closes the first
one whose stated value is the target. Four kinds of chance shape the tries and leave reinforcement learning something to
do:

    careless     a try draws its numbers with replacement, so it may use one twice and another not at all
    near         a try comes from the few expressions of the right numbers whose values are nearest to the target;
                 otherwise any of them is drawn
    false stop   a try is closed whatever its value
    wrong sum    a try states a value that is a little off

A search that finds nothing reaches the length limit and stays unclosed. So wrong responses are longer than right ones,
which is the imbalance that BAPO addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from bapo.tasks.countdown import END_MARK, OPERATORS, SEPARATOR, evaluate, expressions
from bapo.types import Problem

__all__ = ["Noise", "demonstrate"]

LOWEST, HIGHEST = -50, 150
"""Expressions with values outside this range are not tried: the model need not learn such sums."""
NEAREST = 10
"""How many expressions a near try chooses from."""
SLIPS = (-10, -2, -1, 1, 2, 10)
"""The errors that a wrong sum can make."""


@dataclass(frozen=True)
class Noise:
    """How often each kind of noise occurs: a probability per try."""

    careless: float = 0.2
    near: float = 0.35
    """A probability among the tries that are not careless."""
    false_stop: float = 0.01
    wrong_sum: float = 0.02


def demonstrate(problem: Problem, rng: Random, noise: Noise, *, max_length: int) -> str:
    """One search: a closed chain, or the first `max_length` characters of a chain that is not closed by then."""
    numbers, target = tuple(problem.answer["numbers"]), problem.answer["target"]
    text = ""
    while len(text) < max_length:
        expression, value = _one_try(numbers, target, rng, noise)
        if rng.random() < noise.wrong_sum:
            value += rng.choice(SLIPS)
        closed = value == target or rng.random() < noise.false_stop
        text += f"{expression}={value}{END_MARK if closed else SEPARATOR}"
        if closed:
            break
    return text[:max_length]


def _one_try(numbers: tuple[int, ...], target: int, rng: Random, noise: Noise) -> tuple[str, int]:
    if rng.random() < noise.careless:
        while True:
            first, second, third = (rng.choice(numbers) for _ in numbers)
            operator, other_operator = rng.choice(OPERATORS), rng.choice(OPERATORS)
            value = evaluate((first, second, third), operator + other_operator)
            if LOWEST <= value <= HIGHEST:
                return f"{first}{operator}{second}{other_operator}{third}", value
    right = _tried_expressions(tuple(sorted(numbers)))
    if rng.random() < noise.near:
        return rng.choice(sorted(right, key=lambda found: (abs(found[1] - target), rng.random()))[:NEAREST])
    return rng.choice(right)


@cache
def _tried_expressions(numbers: tuple[int, ...]) -> list[tuple[str, int]]:
    return [found for found in expressions(numbers) if LOWEST <= found[1] <= HIGHEST]
