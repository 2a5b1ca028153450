"""Countdown by search: find an expression of three numbers that gives the target, by trying.

    prompt      3,7,2=13:
    response    3+7+2=12;7*2-3=11;7+3*2=13.

A response is a chain of tries, `expression=value`, joined by `;`. The end mark `.` closes the chain, and the last try
is the answer. An expression is three numbers and two of the operators + - *, without brackets or signs. It is read with
the usual precedence, products first and then from left to right, so that 7+3*2 is 13 and 7-3-2 is 2.

The reward is 1 if the last try uses each given number exactly once, states the target as its value, and really has that
value; otherwise it is 0. The tries before it are thinking and may hold anything but the end mark. A chain that was
never closed scores 0, so a policy must notice that it has found the answer before its tokens run out. The end mark is
part of the text and comes before the model's own stop token, because a verifier sees only the text and must tell a
closed chain from a truncated one.

A problem is one (numbers, target) pair, with the numbers in any order. All solvable pairs are enumerated and sorted by
a hash of the pair and the seed. The first ones are held out, and the next ones are for training. So the two sets are
disjoint, and the order depends on nothing but the seed.
"""

import operator
import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from itertools import combinations_with_replacement, permutations, product

from bapo.types import Problem, Score

MAX_NUMBER = 15
"""Given numbers lie between 1 and this."""
MAX_TARGET = 99
"""Targets lie between 1 and this."""
APPLY: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "".join(APPLY)
SEPARATOR = ";"
END_MARK = "."
ALPHABET = "0123456789" + OPERATORS + ",=:" + SEPARATOR + END_MARK
"""Every character of a prompt or a well-formed response."""

_NUMBER = "([1-9][0-9]{0,2})"  # ASCII digits, no leading zero; short, so that int() is cheap on any text
_TRY = re.compile(f"{_NUMBER}([-+*]){_NUMBER}([-+*]){_NUMBER}={_NUMBER}")

_Pair = tuple[tuple[int, ...], int]  # sorted numbers, target


class Countdown:
    """The countdown task: problems drawn from a seed, and their verifier."""

    def __init__(self, *, train_size: int = 4096, test_size: int = 512, seed: int = 0) -> None:
        problems = _problems(seed)
        self.test: Sequence[Problem] = problems[:test_size]
        self.train: Sequence[Problem] = problems[test_size : test_size + train_size]

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The rewards of many responses. This verifier cannot fail."""
        return [Score(self.score(problem, response)) for problem, response in responses]

    def score(self, problem: Problem, response: str) -> float:
        """1.0 if the chain is closed and its last try solves the problem, otherwise 0.0. No text makes it raise."""
        chain, end_mark, rest = response.partition(END_MARK)
        parts = _TRY.fullmatch(chain.rpartition(SEPARATOR)[2])
        if not end_mark or rest or parts is None:
            return 0.0
        first, one, second, other, third, value = parts.groups()
        used, target = (int(first), int(second), int(third)), problem.answer["target"]
        solved = int(value) == target == evaluate(used, one + other)
        return float(solved and sorted(used) == sorted(problem.answer["numbers"]))


def evaluate(numbers: Sequence[int], operators: str) -> int:
    """Value of `a op b op c`: products first, then from left to right."""
    a, b, c = numbers
    first, second = (APPLY[name] for name in operators)
    return first(a, b * c) if operators[1] == "*" != operators[0] else second(first(a, b), c)


def expressions(numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Every expression that uses each number exactly once, with its value. Each text comes once, in a fixed order."""
    values = {
        f"{a}{first}{b}{second}{c}": evaluate((a, b, c), first + second)
        for a, b, c in permutations(numbers)
        for first, second in product(OPERATORS, repeat=2)
    }
    return list(values.items())


@cache
def _problems(seed: int) -> list[Problem]:
    """All problems in the order of this seed. A process draws them once."""
    pairs: list[_Pair] = [
        (numbers, target)  # every pair that some expression reaches
        for numbers in combinations_with_replacement(range(1, MAX_NUMBER + 1), 3)
        for target in {value for _, value in expressions(numbers)}
        if 1 <= target <= MAX_TARGET
    ]
    return [_problem(*pair, seed) for pair in sorted(pairs, key=lambda pair: _draw(seed, "order", *pair))]


def _problem(numbers: tuple[int, ...], target: int, seed: int) -> Problem:
    """The problem of one pair. The prompt shows the numbers in a shuffled order, so that the order reveals nothing."""
    shown = min(permutations(numbers), key=lambda order: _draw(seed, "shown", order, target))
    return Problem(
        id=f"countdown-{'-'.join(map(str, numbers))}-{target}",
        prompt=f"{','.join(map(str, shown))}={target}:",
        answer={"numbers": list(shown), "target": target},
    )


def _draw(seed: int, *key: object) -> bytes:
    """A random-looking value that depends only on the arguments: the same on every machine and in every Python."""
    return sha256(repr((seed, *key)).encode()).digest()
