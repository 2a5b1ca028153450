"""Tasks of reasoning-gym: problems made by a program, scored by the same program.

    Gym({"countdown": {"min_numbers": 3, "max_numbers": 4}, "gcd": {}}, train_size=4096, test_size=512, seed=0)

Problems of several data sets take turns. Held-out problems come from a seed of their own. No question comes twice, so
none that is held out is trained on. The prompt asks for the answer in <answer> tags, and the data set's own
`score_answer` sees the content of the last such pair after the thinking. Without one the reward is 0. Partial credit is
up to the data set and is passed on unchanged.

Some of these scorers call `eval` on the answer, or sympy's `parse_expr`, which calls `eval`. They run in a sandbox, but
the sandbox is not a jail, so a program that a model wrote must never be evaluated there. In the modules that call
`eval`, we replace it by `ast.literal_eval`, which reads lists, numbers and texts and runs nothing. `parse_expr` sees an
answer only if it consists of numbers, operators, single letters and the names in `FUNCTIONS`, in ASCII. Any other
answer gets 0.

A problem is not sent to the sandbox. It is made there again, from its data set, seed and index, so its metadata needs
no JSON form and a resumed run needs nothing but the problem. Problems are first made in such a process too, with the
same fixed hash seed, because a few data sets iterate over sets. If a question does not come out the same, the verifier
fails; it does not give a wrong score.
"""

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

from bapo.process.limited import call_once
from bapo.tasks.verify.final import visible
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.types import Message, Problem, Score

INSTRUCTION = "Give your final answer between <answer> and </answer>, and nothing else there."
"""The sentence after every question."""
MAX_DRAWS = 20
"""How many questions we draw per question wanted, before we report that there are too few different ones."""
GENERATE_SECONDS = 600.0
FUNCTIONS = (
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "exp", "log", "ln", "sqrt", "abs", "Abs", "pi", "erf", "erfi", "Si", "Ci", "Ei", "li"),
)
"""The names of more than one letter that a formula may hold, in addition to those in the data set's own answer."""


class Gym:
    """A task of one or several data sets, given by name, each with its own configuration."""

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
        thinking: bool = False,  # whether the prompt opens the thinking; if so, only text after </think> can answer
    ) -> None:
        for name, config in datasets.items():
            check_dataset(name, config)
        recipes = [[name, dict(config)] for name, config in datasets.items()]
        made = call_once("bapo.tasks.gym:generate", recipes, train_size, test_size, seed, seconds=GENERATE_SECONDS)
        self.train: Sequence[Problem] = [_problem(item, chat) for item in made["train"]]
        self.test: Sequence[Problem] = [_problem(item, chat) for item in made["test"]]
        verifier = f"bapo.tasks.gym:{'verify_thinking' if thinking else 'verify'}"
        self._pool = VerifierPool(verifier, workers=workers, seconds=seconds, memory_mb=memory_mb)

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score that the data set's own scorer gives each response, in order. No response text makes it raise."""
        return self._pool.scores([(problem.answer, response) for problem, response in responses])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def check_dataset(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if reasoning-gym has no such data set or refuses this configuration for it."""
    if name not in DATASETS or name == "composite":
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"It has {len(DATASETS)}; countdown is one of them."
        raise ValueError(f"gym names the data set {name!r}, which reasoning-gym does not have. {hint}")
    for key in ("seed", "size"):
        if key in config:
            raise ValueError(
                f"gym.{name}.{key}={config[key]} cannot be set: the task's seed and sizes decide. Leave it out."
            )
    try:
        reasoning_gym.create_dataset(name, seed=0, size=1, **config)
    except (TypeError, AssertionError, ValueError) as error:
        known = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
        raise ValueError(
            f"reasoning-gym refuses gym.{name}={dict(config)}: {error or 'it gives no reason'}. The keys of {name} are "
            f"{', '.join(known)}."
        ) from error


def generate(recipes: list[list[Any]], train_size: int, test_size: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The questions of both splits, each with its origin. Called in a process with a fixed hash seed."""
    seen: set[str] = set()
    made: dict[str, list[dict[str, Any]]] = {"test": [], "train": []}
    for split, size in (("test", test_size), ("train", train_size)):
        for turn, (name, config) in enumerate(recipes):
            wanted = size // len(recipes) + (turn < size % len(recipes))
            if wanted == 0:
                continue  # some data sets refuse to be empty
            origin = {"name": name, "config": config, "seed": _seed(seed, split, name), "size": wanted * MAX_DRAWS}
            dataset = _dataset(name, json.dumps(config), origin["seed"], origin["size"])
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
                    f"draws, but {wanted} are needed. Ask for fewer, or configure {name} for larger problems"
                )
            made[split] += found
        made[split].sort(key=lambda item: item["place"])  # the data sets take turns
    return made


def verify_thinking(answer: dict[str, Any], response: str) -> Score:
    """Like `verify`, for models whose prompt already opens the thinking: only text after </think> can answer."""
    return verify(answer, response, thinking=True)


def verify(answer: dict[str, Any], response: str, *, thinking: bool = False) -> Score:
    """The score of a response. `answer` says how to make the problem again."""
    dataset = _dataset(answer["name"], json.dumps(answer["config"]), answer["seed"], answer["size"])
    entry = dataset[answer["index"]]
    if _fingerprint(entry["question"]) != answer["question"]:
        raise RuntimeError(f"{answer['name']} did not make the same question again")
    final = extract_answer(visible(response, thinking=thinking))
    if final is None:
        return Score(0.0)
    parsed = evaluates(answer["name"]) == "parse_expr"
    reward = 0.0 if parsed and not is_formula(final, str(entry["answer"])) else dataset.score_answer(final, entry)
    return Score(float(reward), answer=final[:200].encode("utf-8", "replace").decode())


@functools.cache
def evaluates(name: str) -> str:
    """What this data set's scorer evaluates the answer with: eval (replaced here), parse_expr, or an empty text."""
    module = sys.modules[DATASETS[name][0].score_answer.__module__]
    called = re.search(r"\b(eval|parse_expr)\(answer", inspect.getsource(module))
    if called and called[1] == "eval":
        vars(module)["eval"] = ast.literal_eval
    return called[1] if called else ""


def is_formula(text: str, own: str = "") -> bool:
    """Whether a text holds only numbers, operators and harmless names: single letters, `FUNCTIONS`, names in `own`."""
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


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))


def _seed(seed: int, split: str, name: str) -> int:
    """A seed for one data set of one split. Seeds must lie far apart: item i of seed s is item i - 1 of seed s + 1."""
    return int.from_bytes(sha256(f"{seed}/{split}/{name}".encode()).digest()[:4], "big") // 2


def _fingerprint(question: str) -> str:
    return sha256(question.encode("utf-8", "replace")).hexdigest()[:16]
