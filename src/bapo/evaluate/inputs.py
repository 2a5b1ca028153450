"""What goes into an evaluation: problems, what scores them, the model, and the identity that these give it.

The identity is everything that determines the result. Two evaluations with the same identity give the same bytes, so it
names the directory, and only the same identity continues it. Weights are identified by a hash of all their values,
problems by a hash of their ids, prompt tokens and answers.

The data set `countdown` is embedded and comes with its verifier. `bapo.tasks.data` reads everything else: benchmarks,
files, directories and hub data sets, each also as name=path.
"""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

import bapo
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.demo import MAX_RESPONSE_TOKENS
from bapo.evaluate.options import DEFAULT_MAX_TOKENS, Settings
from bapo.models import Policy, hush, load_policy
from bapo.models.bits import fingerprint, packed
from bapo.rollout.sittings import max_positions
from bapo.tasks.countdown import Countdown
from bapo.tasks.data.problems import load_problems
from bapo.tasks.data.sources import resolve
from bapo.tasks.task import Scorer
from bapo.tasks.verify.finding import find_function
from bapo.tasks.verify.scorers import MATH, open_scorer
from bapo.types import Problem


@dataclass(frozen=True)
class DataSet:
    """Problems to evaluate on."""

    name: str
    problems: list[Problem]
    own_scorer: Scorer | None = None
    """The verifier that comes with the problems."""
    note: str = ""
    """What the user should know about its rows; usually empty."""


def load_data_sets(settings: Settings) -> list[DataSet]:
    """All data sets, in order. Their names must differ, because results are stored by name."""
    found = [_load(name, settings) for name in settings.data]
    given, names = f"--data {','.join(settings.data)}", [data.name for data in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{given} has two data sets called {name!r}. Give one of them another name: name=path.")
    if "overall" in names:
        raise ValueError(
            f"{given} has a data set called 'overall', but the results use that name for all data sets together. Give "
            "the data set another name: name=path."
        )
    return found


def _load(name: str, settings: Settings) -> DataSet:
    if name == "countdown":
        task = Countdown()
        problems = list(task.test)
        return DataSet(name, problems[: settings.problems], task.scores, note=_short(name, problems, settings))
    problems, report = load_problems(
        [name],
        prompt_column=settings.prompt_column,
        answer_column=settings.answer_column,
        template=settings.template,
    )
    label = resolve(name).label
    notes = [f"{label}: {report}" if report.read > report.kept else "", _short(label, problems, settings)]
    return DataSet(label, problems[: settings.problems], note="\n".join(filter(None, notes)))


def _short(label: str, problems: Sequence[Problem], settings: Settings) -> str:
    """A note about a data set that has fewer problems than were asked for."""
    if settings.problems is None or len(problems) >= settings.problems:
        return ""
    return f"{label}: has {counted(len(problems), 'problem')}, fewer than --problems {settings.problems}"


@contextmanager
def open_scorers(
    data_sets: Sequence[DataSet], settings: Settings, *, opens_thinking: bool
) -> Iterator[dict[str, Scorer]]:
    """What scores each data set: its own verifier, or one for all others, whose processes end with the block.

    `opens_thinking`: whether a response begins in the middle of the model's thinking, see `bapo.tasks.verify.math`.
    """
    own = {data.name: data.own_scorer for data in data_sets if data.own_scorer and settings.reward is None}
    if len(own) == len(data_sets):
        yield own
        return
    try:
        scores, close = open_scorer(
            settings.reward or MATH,
            opens_thinking=opens_thinking,
            seconds=settings.reward_seconds,
            memory_mb=settings.reward_memory_mb,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        yield {data.name: own.get(data.name, scores) for data in data_sets}
    finally:
        close()


def load_model(settings: Settings) -> Policy:
    """Load the model without log output. Device, dtype and threads of `settings` must be decided."""
    hush()
    assert settings.threads is not None
    torch.set_num_threads(settings.threads)
    policy = load_policy(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        chat={"auto": None, "yes": True, "no": False}[settings.chat],
        system=settings.system,
        template_options=dict(settings.chat_options),
    )
    policy.model.eval()
    return policy


def identify(settings: Settings, policy: Policy, data_sets: Sequence[DataSet]) -> dict[str, Any]:
    """The identity, as JSON values. What is left to decide, such as the length limit, is decided here."""
    prompts = {data.name: [policy.encode(problem.prompt) for problem in data.problems] for data in data_sets}
    max_tokens = _max_tokens(settings, policy, max(len(ids) for listed in prompts.values() for ids in listed))
    fingerprints = {}
    for data in data_sets:
        digest = sha256()
        for problem, ids in zip(data.problems, prompts[data.name], strict=True):
            digest.update(json.dumps([problem.id, ids, problem.answer], sort_keys=True).encode() + b"\n")
        fingerprints[data.name] = digest.hexdigest()[:16]
    asked = asdict(settings)
    del asked["chunk"]
    decided = {
        **asked,
        "max_tokens": max_tokens,
        "chunk": settings.chunk_problems,
        "stop_ids": sorted(policy.stop_ids),
        "weights": fingerprint_of_weights(policy.model),
        "fingerprints": fingerprints,
        "versions": _versions(settings) | _versions_of_verifier(data_sets, settings),
    }
    identity: dict[str, Any] = json.loads(json.dumps(decided))
    return identity


def default_directory(identity: dict[str, Any]) -> Path:
    """evals/MODEL-IDENTITY, so that the same command finds its directory again and others do not use it."""
    path = Path(identity["model"])
    name = path.parent.name if path.name == "model" and path.parent.name else path.name
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".-") or "model"
    digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return Path("evals") / f"{name}-{digest}"


def fingerprint_of_weights(model: Any) -> str:
    """A hash of every value of every parameter."""
    return fingerprint(packed(name, values) for name, values in sorted(model.state_dict().items()))[:16]


def _max_tokens(settings: Settings, policy: Policy, longest: int) -> int:
    """The length asked for, which must fit the model; by default DEFAULT_MAX_TOKENS or what fits, if that is less."""
    positions = max_positions(policy.model)
    room = DEFAULT_MAX_TOKENS if positions is None else positions - longest
    if room < 1:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, but the model has only {positions} positions, which leaves no "
            "room for a response. Leave that problem out, or use a model with a longer context."
        )
    if settings.max_tokens is None:
        return min(room, MAX_RESPONSE_TOKENS if settings.model == "demo" else DEFAULT_MAX_TOKENS)
    if positions is not None and settings.max_tokens > room:
        raise ConfigError(
            f"--max-tokens {settings.max_tokens} and prompts of up to {longest} tokens exceed the model's {positions} "
            f"positions. Set --max-tokens {room} or less."
        )
    return settings.max_tokens


def _versions(settings: Settings) -> dict[str, str]:
    versions = {
        "bapo": bapo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return versions | ({"gpu": torch.cuda.get_device_name()} if settings.device == "cuda" else {})


def _versions_of_verifier(data_sets: Sequence[DataSet], settings: Settings) -> dict[str, str]:
    """What the rewards depend on besides the settings: the version of math-verify, or the file of a function."""
    if settings.reward is not None and settings.reward != MATH:
        file = inspect.getsourcefile(find_function(settings.reward))
        return {"reward_file": sha256(Path(file).read_bytes()).hexdigest()[:16]} if file else {}
    if settings.reward is None and all(data.own_scorer for data in data_sets):
        return {}
    try:
        return {"math_verify": version("math-verify"), "sympy": version("sympy")}
    except PackageNotFoundError:
        raise ValueError(
            "--reward math needs math-verify, which is not installed. Install it with `pip install 'bapo[math]'`, or "
            "give --reward module:function."
        ) from None
