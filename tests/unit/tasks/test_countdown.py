"""The countdown task: its verifier by hand and against Python's own arithmetic, its problems by brute force."""

import ast
import re
from collections import Counter
from fractions import Fraction
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo.tasks import countdown
from bapo.tasks.countdown import ALPHABET, MAX_NUMBER, MAX_TARGET, Countdown, evaluate, expressions
from bapo.tasks.task import Task
from bapo.types import Problem

TASK = Countdown()
PROBLEM = Problem(id="by-hand", prompt="3,7,2=13:", answer={"numbers": [3, 7, 2], "target": 13})
TWINS = Problem(id="twins", prompt="4,4,12=4:", answer={"numbers": [4, 4, 12], "target": 4})


def true_value(expression: str) -> Fraction:
    """Value by Python's own grammar: parsed by `ast`, computed in exact fractions."""

    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]

    return walk(ast.parse(expression, mode="eval").body)


def test_countdown_is_a_task():
    task: Task = TASK
    assert task.score(PROBLEM, "7+3*2=13.") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "7+3*2=13.",
        "3*2+7=13.",
        "2*3+7=13.",
        "3+7+2=12;7*2-3=11;7+3*2=13.",
        "3+7+2=99;7+3*2=13.",  # a wrong sum on the way
        "3*3+2=11;7+3*2=13.",  # a number misused on the way
        "7+3*2=13;7+3*2=13.",  # a solution passed by
        "hm, é\n;7+3*2=13.",  # thinking may hold anything
        ";7+3*2=13.",
    ],
)
def test_a_closed_solution_scores_one(response):
    assert TASK.score(PROBLEM, response) == 1.0


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("", "empty"),
        (".", "closes nothing"),
        ("7+3*2=13", "never closed"),
        ("7+3*2=13;", "never closed"),
        ("7+3*2=13;7*2-", "ran out while trying on"),
        ("7+3*2=13..", "text after the end mark"),
        ("7+3*2=13.7", "text after the end mark"),
        ("7+3*2=13.\n", "text after the end mark"),
        ("3+7+2=12.;7+3*2=13.", "closed twice"),
        ("7+3*2=13;3+7+2=12.", "closed another try"),
        ("3+7+2=12.", "gives 12, says 12"),
        ("3+7+2=13.", "gives 12, says 13"),
        ("7+3*2=14.", "gives 13, says 14"),
        ("7+3*2=013.", "leading zero in the value"),
        ("07+3*2=13.", "leading zero in a number"),
        ("7+3*2=+13.", "signed value"),
        ("+7+3*2=13.", "unary sign"),
        ("7+-3*2=13.", "unary sign"),
        ("7+3+3=13.", "3 reused, 2 missing"),
        ("6+7=13.", "a number not given, two missing"),
        ("7+3*2*1=13.", "a fourth number"),
        ("15-2=13.", "numbers not given"),
        ("7+(3*2)=13.", "brackets"),
        ("7 + 3*2=13.", "spaces"),
        ("7+3×2=13.", "not an operator"),
        ("7+3*2=13。", "not the end mark"),
        ("７+3*2=13.", "full-width digit"),
        ("٧+٣*٢=١٣.", "Arabic-Indic digits"),
        ("7+3*2==13.", "doubled equals"),
        ("13=7+3*2.", "turned round"),
        ("7+3*2.", "no value"),
        ("7*2-1=13.", "a number not given"),
        ("73*2=13.", "numbers run together"),
        ("7+3*2=13<eos>.", "a token's name is not the end mark"),
        ("7+3*2=" + "1" * 10_000 + ".", "too long for int()"),
        ("1" * 10_000 + "+3*2=13.", "too long for int()"),
    ],
)
def test_anything_else_scores_zero(response, why):
    assert TASK.score(PROBLEM, response) == 0.0, why


def test_products_come_first_and_the_rest_goes_left_to_right():
    assert [evaluate((7, 3, 2), operators) for operators in ("++", "+-", "+*", "-+", "--", "-*", "*+", "*-", "**")] == [
        12, 8, 13, 6, 2, 1, 23, 19, 42,
    ]  # fmt: skip
    twenty = Problem(id="p", prompt="", answer={"numbers": [7, 3, 2], "target": 20})
    assert TASK.score(twenty, "7+3*2=20.") == 0.0  # (7+3)*2 cannot be written
    six = Problem(id="p", prompt="", answer={"numbers": [7, 3, 2], "target": 6})
    assert TASK.score(six, "7-3+2=6.") == 1.0


def test_a_number_given_twice_is_used_twice():
    assert TASK.score(TWINS, "12-4-4=4.") == 1.0
    assert TASK.score(TWINS, "4*4-12=4.") == 1.0
    assert TASK.score(TWINS, "4+12-12=4.") == 0.0


@given(st.text())
def test_score_never_raises_on_any_text(text):
    assert TASK.score(PROBLEM, text) in (0.0, 1.0)


@given(st.text(alphabet=ALPHABET, max_size=80), st.text(alphabet=ALPHABET, max_size=3))
def test_near_misses_of_a_solution_score_zero_unless_they_only_think_first(prefix, suffix):
    score = TASK.score(PROBLEM, prefix + "7+3*2=13." + suffix)
    only_thinks_first = suffix == "" and "." not in prefix and (prefix == "" or prefix.endswith(";"))
    assert score == float(only_thinks_first)


def test_scorer_agrees_with_an_independent_derivation_on_random_expressions():
    rng = Random(1)
    right = 0
    for _ in range(20_000):
        problem = rng.choice(TASK.test)
        numbers, target = problem.answer["numbers"], problem.answer["target"]
        used = rng.sample(numbers, 3) if rng.random() < 0.8 else rng.choices(numbers, k=3)
        expression = f"{used[0]}{rng.choice('+-*')}{used[1]}{rng.choice('+-*')}{used[2]}"
        stated = rng.choice([target, target, true_value(expression)])
        uses_each_once = Counter(map(int, re.findall(r"\d+", expression))) == Counter(numbers)
        expected = float(uses_each_once and true_value(expression) == target == stated)
        assert TASK.score(problem, f"{expression}={stated}.") == expected, (problem, expression, stated)
        right += expected == 1.0
    assert 1_000 < right < 10_000  # both answers were put to the test


def test_expressions_are_complete_and_true():
    for numbers in ((2, 3, 7), (1, 1, 15), (5, 5, 5)):
        listed = expressions(numbers)
        texts = {f"{a}{p}{b}{q}{c}" for a, b, c in permutations(numbers) for p, q in product("+-*", repeat=2)}
        assert sorted(text for text, _ in listed) == sorted(texts)
        assert all(true_value(text) == value for text, value in listed)


def test_every_problem_is_well_formed_and_solvable():
    for problem in [*TASK.train, *TASK.test]:
        numbers, target = problem.answer["numbers"], problem.answer["target"]
        assert problem.prompt == f"{numbers[0]},{numbers[1]},{numbers[2]}={target}:"
        assert set(problem.prompt) <= set(ALPHABET)
        assert all(1 <= number <= MAX_NUMBER for number in numbers)
        assert 1 <= target <= MAX_TARGET
        solutions = [text for text, value in expressions(numbers) if value == target]
        assert solutions, problem
        assert TASK.score(problem, f"{solutions[0]}={target}.") == 1.0


def test_training_and_held_out_problems_are_disjoint_and_unique():
    def keys(problems):
        return {(tuple(sorted(problem.answer["numbers"])), problem.answer["target"]) for problem in problems}

    assert (len(TASK.train), len(TASK.test)) == (4096, 512)
    assert (len(keys(TASK.train)), len(keys(TASK.test))) == (4096, 512)
    assert not keys(TASK.train) & keys(TASK.test)
    assert len({problem.id for problem in [*TASK.train, *TASK.test]}) == 4096 + 512


def test_problems_depend_on_the_seed_and_on_nothing_else():
    first = Countdown(seed=3).train
    countdown._problems.cache_clear()
    assert first == Countdown(seed=3).train
    assert first != Countdown(seed=4).train
    assert Countdown(train_size=10).test == TASK.test
    assert [problem.prompt for problem in TASK.test[:2]] == ["13,3,7=17:", "15,4,14=25:"]
