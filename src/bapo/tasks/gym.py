"""Tasks of reasoning-gym: problems made by a program, scored by the same program.

    Gym({"countdown": {"min_numbers": 3, "max_numbers": 4}, "gcd": {}}, train_size=4096, test_size=512, seed=0)

Problems of several data sets take turns. Held-out problems come from a seed of their own, and a question that is held
out is never trained on; no question comes twice. The prompt asks for the answer in <answer> tags, and the last such
pair after the thinking is what the data set's own `score_answer` sees. Without one the reward is 0. Partial credit is
the data set's affair and passed on as it is.

Some of these scorers call `eval` on what they are given, or sympy's `parse_expr`, which is `eval`. They run in a
sandbox, but that has no walls, so no program of a model may be evaluated there. In the modules that call `eval` it is
`ast.literal_eval`: lists, numbers and texts, and nothing that runs. `parse_expr` sees an answer only if all of it is
numbers, operators, single letters and the names of `FUNCTIONS`, in ASCII; any other answer gets 0.

A problem is not sent to the sandbox but made there again, from its data set, seed and index: metadata needs no JSON
form, and a resumed run needs nothing but the problem. Problems are made in such a process as well, with the same fixed
hash seed, because a few data sets iterate over sets; a question that does not come out the same is a failure, not a
wrong score.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from bapo.tasks.verify.final import visible
from bapo.tasks.verify.sandbox import VerifierPool, call_once
from bapo.types import Message, Problem, Score

__all__ = ["INSTRUCTION", "Gym", "generate", "verify", "verify_thinking"]

INSTRUCTION = "Give your final answer between <answer> and </answer>, and nothing else there."
"""Follows every question."""
MAX_DRAWS = 20
"""Questions drawn for each one wanted, before we say that there are not enough different ones."""
GENERATE_SECONDS = 600.0
FUNCTIONS = (
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "exp", "log", "ln", "sqrt", "abs", "Abs", "pi", "erf", "erfi", "Si", "Ci", "Ei", "li"),
)
"""The names of more than one letter that a formula may hold, besides those in the data set's own answer."""


class Gym:
    """The task: one or several data sets by name, each with a configuration of its own."""

    train: Sequence[Problem]
    test: Sequence[Problem]

    def __init__(
        self,
        datasets: Mapping[str, Mapping[str, Any]],
        *,
        train_size: int = 4096,
        test_size: int = 512,
        seed: int = 0,
        chat: bool = True,
        workers: int | None = None,
        seconds: float = 5.0,
        memory_mb: int = 1024,
        thinking: bool = False,  # whether the prompt opens the thinking: then there is no answer before </think>
    ) -> None:
        if not datasets:
            raise ValueError("gym: no data set is named. Name at least one, such as countdown.")
        for key, size in (("train_size", train_size), ("test_size", test_size)):
            if size < 0:
                raise ValueError(f"gym.{key}={size} is negative; a number of problems is 0 or more.")
        for name, config in datasets.items():
            check_dataset(name, config)
        recipes = [[name, dict(config)] for name, config in datasets.items()]
        made = call_once("bapo.tasks.gym:generate", recipes, train_size, test_size, seed, seconds=GENERATE_SECONDS)
        self.train, self.test = ([_problem(item, chat) for item in made[split]] for split in ("train", "test"))
        verifier = f"bapo.tasks.gym:{'verify_thinking' if thinking else 'verify'}"
        self._pool = VerifierPool(verifier, workers=workers, seconds=seconds, memory_mb=memory_mb)

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """What the data set's own scorer says of each response, in order. Never raises over a text."""
        return self._pool.scores([(problem.answer, response) for problem, response in responses])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def check_dataset(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if reasoning-gym has no such data set or refuses its configuration."""
    if name not in DATASETS or name == "composite":
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {len(DATASETS)}, countdown among them."
        raise ValueError(f"gym: reasoning-gym has no data set {name!r}. {hint}")
    for key in ("seed", "size"):
        if key in config:
            raise ValueError(f"gym.{name}.{key} is set by the task, from its own seed and sizes. Leave it out.")
    try:
        reasoning_gym.create_dataset(name, seed=0, size=1, **config)
    except (TypeError, AssertionError, ValueError) as error:
        known = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
        raise ValueError(f"gym.{name}: {error or 'refused'}. Its keys are {', '.join(known)}.") from error


def generate(recipes: list[list[Any]], train_size: int, test_size: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The questions of both splits, with where each comes from. Called in a process with a fixed hash seed."""
    seen: set[str] = set()
    made: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for split, size in (("test", test_size), ("train", train_size)):
        for turn, (name, config) in enumerate(recipes):
            wanted = size // len(recipes) + (turn < size % len(recipes))
            if wanted == 0:
                continue  # some data sets refuse to be empty
            origin = {"name": name, "config": config, "seed": _seed(seed, split, name), "size": wanted * MAX_DRAWS}
            dataset = _dataset(**origin)
            found: list[dict[str, Any]] = []
            for index in range(wanted * MAX_DRAWS):
                if len(found) == wanted:
                    break
                question = dataset[index]["question"]
                if question not in seen:
                    seen.add(question)
                    found.append({"origin": {**origin, "index": index}, "question": question, "place": len(found)})
            if len(found) < wanted:
                raise ValueError(
                    f"{name} gave only {len(found)} new questions for the {split} problems in {wanted * MAX_DRAWS} "
                    f"draws, and {wanted} are wanted. Ask for fewer, or configure it for larger problems"
                )
            made[split] += found
        made[split].sort(key=lambda item: item["place"])  # the data sets take turns
    return made


def verify(answer: dict[str, Any], response: str) -> Score:
    """The score of a response to the problem that `answer` says how to make."""
    return _verify(answer, response, thinking=False)


def verify_thinking(answer: dict[str, Any], response: str) -> Score:
    """The same for models whose prompt already opens the thinking: without </think> there is no answer."""
    return _verify(answer, response, thinking=True)


def _verify(answer: dict[str, Any], response: str, *, thinking: bool) -> Score:
    *origin, index, question = (answer[key] for key in ("name", "config", "seed", "size", "index", "question"))
    dataset = _dataset(*origin)
    entry = dataset[index]
    if _fingerprint(entry["question"]) != question:
        raise RuntimeError(f"{answer['name']} did not make the same question again")
    final = extract_answer(visible(response, thinking=thinking))
    if final is None:
        return Score(0.0)
    parsed = evaluates(answer["name"]) == "parse_expr"
    reward = 0.0 if parsed and not is_formula(final, str(entry["answer"])) else dataset.score_answer(final, entry)
    return Score(float(reward), answer=final[:200].encode("utf-8", "replace").decode())


@functools.cache
def evaluates(name: str) -> str:
    """What the scorer of this data set runs the answer with: eval, parse_expr, or nothing. Disarms the first."""
    module = sys.modules[DATASETS[name][0].score_answer.__module__]
    called = re.search(r"\b(eval|parse_expr)\(answer", inspect.getsource(module))
    if called and called[1] == "eval":
        vars(module)["eval"] = ast.literal_eval
    return called[1] if called else ""


def is_formula(text: str, own: str = "") -> bool:
    """Whether a text is numbers, operators and names that are harmless: one letter, of `FUNCTIONS`, or in `own`."""
    return _formula(frozenset(re.findall(r"[A-Za-z]{2,}", own))).fullmatch(text) is not None


@functools.cache
def _formula(names: frozenset[str]) -> re.Pattern[str]:
    known = "|".join(sorted(names.union(FUNCTIONS)))
    number = r"\d++(?:\.\d*+)?+(?:[eE][+-]?\d++)?+|\.\d++"
    return re.compile(rf"(?:[\s+\-*/%^(),!]|{number}|(?<![A-Za-z])(?:{known}|[A-Za-z])(?![A-Za-z\d_]))*+", re.ASCII)


def _problem(item: dict[str, Any], chat: bool) -> Problem:
    origin, text = item["origin"], f"{item['question']}\n\n{INSTRUCTION}"
    messages: list[Message] = [{"role": "user", "content": text}]
    return Problem(
        id=f"{origin['name']}-{origin['seed']}-{origin['index']}",
        prompt=messages if chat else f"{text}\n",
        answer={**origin, "question": _fingerprint(item["question"])},
        source=origin["name"],
    )


def _dataset(name: str, config: dict[str, Any], seed: int, size: int) -> Any:
    return _made_dataset(name, json.dumps(config), seed, size)


@functools.lru_cache(maxsize=64)
def _made_dataset(name: str, config: str, seed: int, size: int) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))


def _seed(seed: int, split: str, name: str) -> int:
    """A seed for one data set of one split. Far from all others: item i of seed s is item i - 1 of seed s + 1."""
    return int.from_bytes(sha256(f"{seed}/{split}/{name}".encode()).digest()[:4], "big") // 2


def _fingerprint(question: str) -> str:
    return sha256(question.encode("utf-8", "replace")).hexdigest()[:16]
