"""examples/countdown_searches.py: what it writes is what it promises, and its verifier cannot be fooled."""

import ast
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from bapo.tasks.data.problems import load_demonstrations, load_problems
from bapo.tasks.verify.functions import FunctionReward
from bapo.tasks.verify.scorers import DataTask
from examples.countdown_searches import (
    HITS,
    SIZES,
    TRIES,
    operations,
    problems,
    reward,
    search,
    share_of_hits,
    steps_from,
)

ROOT = Path(__file__).parents[2]
FILES = ("solved.jsonl", "train.jsonl", "test.jsonl")
GIVEN = {"numbers": [3, 4, 4, 7], "target": 37}


def write(directory, *options):
    command = [sys.executable, str(ROOT / "examples/countdown_searches.py"), str(directory), *options]
    subprocess.run(command, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("searches"))


@pytest.fixture(scope="module")
def solved(directory):
    return [json.loads(line) for line in (directory / "solved.jsonl").read_text().splitlines()]


def true_value(expression):
    """The value of `a+b`, by Python's own parser."""
    tree = ast.parse(expression, mode="eval").body
    left, right = tree.left.value, tree.right.value
    return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(tree.op)]


def test_every_search_that_is_labelled_right_is_accepted_and_no_other(solved):
    assert len(solved) == 3 * SIZES["solved"]
    for row in solved:
        last = row["response"].splitlines()[-1]
        assert reward(row["response"], row["answer"]) == float(row["right"]) == float(last != "no answer")
    assert 0.3 < mean(row["right"] for row in solved) < 0.6


def test_all_that_a_search_says_is_true(solved):
    for row in solved[::40]:
        target = row["answer"]["target"]
        tries = [line for line in row["response"].splitlines() if ";" in line]
        for line in row["response"].splitlines():
            for step in line.replace("answer ", "").replace(";", " ").replace(":", " ").split():
                if "=" in step:
                    expression, value = step.split("=")
                    assert true_value(expression) == int(value), line
        for line in tries:
            two, values = line.rpartition(":")[0].rpartition(";")[2], line.rpartition(":")[2].split(",")
            a, b = map(int, two.split(","))
            expected = [str(value) if value <= 99 else "big" for value in (a + b, abs(a - b), a * b)]
            assert values == expected[: len(values)], line
            assert (str(target) in values) == (line is tries[-1] and row["right"]), line
        assert len(tries) <= TRIES[1]


def test_a_search_that_fails_is_longer(solved):
    """In characters: SmolLM2's tokens of digits and signs are single characters."""
    found, failed = ([len(row["response"]) for row in solved if row["right"] == right] for right in (True, False))
    assert mean(found) > 200
    assert mean(failed) > 1.5 * mean(found)
    assert max(found + failed) < 600


def test_the_answer_is_reached_by_steps_that_can_be_taken(solved):
    """The same verdict by another way: the steps of an answer lead through what `steps_from` allows."""
    for row in [row for row in solved if row["right"]][::20]:
        first, second, third = row["response"].splitlines()[-1].split()[1:]
        three = steps_from(tuple(row["answer"]["numbers"]))[first]
        a, b = steps_from(three)[second]
        assert operations(a, b)[third.split("=")[0]] == row["answer"]["target"]


@pytest.mark.parametrize(
    "response",
    [
        "answer 3*7=21 4*4=16 16+21=37",
        "answer 4*4=16 3*7=21 21+16=37",
        "3,4,4,7:3*7=21\nanswer 1*1=1 1*1=1 1*1=1\nanswer 3*7=21 4*4=16 16+21=37",
    ],
)
def test_a_right_answer_is_accepted(response):
    assert reward(response, GIVEN) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no answer",
        "answer",
        "answer 3*7=21 4*4=16",  # does not use up the numbers
        "answer 3*7=21 4*4=16 16+21=38",  # wrong value
        "answer 3*7=22 4*4=16 16+22=38",  # wrong value on the way
        "answer 3*7=21 4*4=16 21-16=5",  # another target
        "answer 3*7=21 3*7=21 16+21=37",  # a number twice
        "answer 3*7=21 4*4=16 30+7=37",  # numbers that are not there
        "answer 7*5=35 4-3=1 35+2=37",
        "answer 3*7=21 4*4=16 16+21=37.",
        "answer 3*7=21 4*4=16 16+21=37\n",  # more follows the answer
        "answer 3*7=21 4*4=16 16+21=37\nno answer",
        "answer 3*7=21 4*4=16 16+21=37 37*1=37",
        "answer  3*7=21 4*4=16 16+21=37",
        "answer 3*7=21 4*4=16 __import__('os')",
        "answer 3**7=21 4*4=16 16+21=37",
        "answer ٣*7=21 4*4=16 16+21=37",  # a digit of another script
        "37",
    ],
)
def test_a_wrong_answer_is_refused(response):
    assert reward(response, GIVEN) == 0.0


def test_the_answer_of_another_problem_is_refused(solved):
    right = [row for row in solved if row["right"]]
    for row, other in zip(right, right[3:], strict=False):
        if sorted(row["answer"]["numbers"]) != sorted(other["answer"]["numbers"]):
            assert reward(row["response"], other["answer"]) == 0.0


def test_problems_are_as_hard_as_promised():
    """The share of hits, counted by making every try."""
    for numbers, target in random.Random(0).sample(problems(), 20):
        chance = 0.0
        firsts = steps_from(numbers)
        for three in firsts.values():
            seconds = steps_from(three)
            hits = [two for two in seconds.values() if target in operations(*two).values()]
            chance += len(hits) / len(seconds) / len(firsts)
        assert HITS[0] <= chance <= HITS[1]
        assert chance == pytest.approx(share_of_hits(numbers)[target])


def test_a_seed_decides_everything(directory, tmp_path):
    again = write(tmp_path / "again")
    assert all((directory / name).read_bytes() == (again / name).read_bytes() for name in FILES)
    assert search((8, 2, 6, 5), 14, random.Random(3)) != search((8, 2, 6, 5), 14, random.Random(4))


def test_the_files_load_as_data_and_no_problem_is_in_two(directory, monkeypatch):
    monkeypatch.chdir(ROOT)
    train, test = (load_problems([str(directory / name)])[0] for name in ("train.jsonl", "test.jsonl"))
    demonstrations, _ = load_demonstrations([str(directory / "solved.jsonl")])
    assert (len(train), len(test)) == (SIZES["train"], SIZES["test"])
    rows = [json.loads(line) for name in FILES for line in (directory / name).read_text().splitlines()]
    pairs = {(*sorted(row["answer"]["numbers"]), row["answer"]["target"]) for row in rows}
    assert len(pairs) == sum(SIZES.values())
    scorer = FunctionReward("examples.countdown_searches:reward")
    task = DataTask(train, test, scorer.scores)
    problem = task.train[0]
    assert problem.prompt.endswith(":\n")
    assert scorer.scores([(problem, "no answer")])[0].reward == 0.0
    assert demonstrations[0].response.splitlines()[-1].startswith(("answer ", "no answer"))
