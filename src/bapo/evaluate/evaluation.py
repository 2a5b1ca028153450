"""The work of `bapo eval`: read problems and model, then sample, score and save chunk by chunk, then write the figures.

The identity is everything that determines the result. Two evaluations with the same identity give the same bytes, so it
names the directory, and only the same identity continues it. Weights are identified by a hash of all their values,
problems by a hash of their ids, prompt tokens and answers.

The data set `countdown` is embedded and comes with its verifier. `bapo.tasks.data` reads everything else: benchmarks,
files, directories and hub data sets, each also as name=path. Only the engine samples, so any `Engine` will do.
Everything but the chunk in progress is already on the disk.
"""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers

import bapo
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.config.placement import placed
from bapo.config.task import CALCULATOR, EpisodeConfig, TaskConfig
from bapo.demo import MAX_RESPONSE_TOKENS
from bapo.environments.conversations import Conversations
from bapo.environments.played import PlayedTask, conversations_of
from bapo.evaluate.directory import opened
from bapo.evaluate.estimates import Row, mean, results
from bapo.evaluate.options import COUNTDOWN, DEFAULT_MAX_TOKENS, LEAVES_OUT_NOTHING, Settings, sampling_of
from bapo.evaluate.progress import EvaluationView
from bapo.evaluate.results_page import page
from bapo.evaluate.sampling import Response, sample
from bapo.models.bits import fingerprint, packed
from bapo.models.loading import hush, load_policy
from bapo.models.policy import Policy, prompt_text
from bapo.process import stops
from bapo.rollout.engine import Engine
from bapo.rollout.local.engine import engine_for
from bapo.rollout.sittings import max_positions
from bapo.screen.terminal import write_line
from bapo.screen.watch import Tell
from bapo.tasks.countdown import Countdown
from bapo.tasks.data.problems import load_problems, load_rows, smallest
from bapo.tasks.data.sources import resolve
from bapo.tasks.task import Scorer
from bapo.tasks.verify.finding import file_of, find_function, judged
from bapo.tasks.verify.scorers import MATH, Verifier, open_scorer
from bapo.types import Problem

EPISODES = 128
"""How many episodes are played of an environment that makes its own problems, unless --problems says so."""


@dataclass(frozen=True)
class DataSet:
    """Problems to evaluate on."""

    name: str
    problems: list[Problem]
    own_scorer: Scorer | None = None  # the verifier that comes with the problems
    note: str = ""  # what the user should know about its rows; usually empty


@dataclass(frozen=True)
class Prepared:
    """What an evaluation is made of."""

    settings: Settings
    policy: Policy
    data_sets: list[DataSet]
    identity: dict[str, Any]
    played: PlayedTask | None
    """The environments that answer the model's turns, unless there are none, or only the embedded one."""
    conversations: Conversations | None


def evaluate_model(settings: Settings, out: Path | None, stream: TextIO) -> tuple[Path, dict[str, Any]]:
    """Do what an evaluation still lacks; returns its directory and its results."""
    try:
        made = _prepared(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    settings, data_sets = made.settings, made.data_sets
    for note in filter(None, (data.note for data in data_sets)):
        write_line(stream, note)
    engine = engine_for(made.policy.model, slots=settings.slots)
    engine.load(made.policy.model.named_parameters(), version=0)
    path = out or default_directory(made.identity)
    stops.enter(stops.Phase.RAISE)
    size, total = settings.chunk_problems, sum(len(data.problems) for data in data_sets)
    chunks = [(d.name, d.problems[i : i + size]) for d in data_sets for i in range(0, len(d.problems), size)]
    with opened(path, made.identity) as directory:
        rows = directory.complete([(name, [problem.id for problem in problems]) for name, problems in chunks])
        with (
            EvaluationView(settings, path, total, rows, stream) as progress,
            open_scorers(made, needed=len(rows) < total) as scorers,
        ):
            done = 0
            for name, problems in chunks:
                done += len(problems)
                if done <= len(rows):
                    continue
                with progress.sampling(name) as tell:
                    given = _sampled(made, engine, scorers[name], problems, tell)
                new = [_row(name, problem, responses) for problem, responses in zip(problems, given, strict=True)]
                directory.append(new)
                rows += new
                progress.saved(new)
        found = results(rows, made.identity)
        directory.write("report.html", page(rows, found))
        directory.write("results.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
        stops.done()
    if made.played is not None:
        made.played.close()
    return path, found


def _prepared(settings: Settings) -> Prepared:
    device, dtype, threads = placed(settings.device, settings.dtype, settings.threads)
    settings = replace(settings, device=device, dtype=dtype, threads=threads)
    data_sets = load_data_sets(settings)
    policy = load_model(settings)
    played = play(settings, policy, data_sets)
    if played is not None:
        data_sets = data_sets or [DataSet(str(settings.episodes.environment), list(played.test))]
        own = played.scores if played.graded else None
        data_sets = [replace(data, own_scorer=own) for data in data_sets]
    identity = identify(settings, policy, data_sets)
    conversations = conversations_of(played, settings.episodes, policy, identity["max_tokens"])
    return Prepared(settings, policy, data_sets, identity, played, conversations)


def _sampled(
    made: Prepared, engine: Engine, scorer: Scorer, problems: Sequence[Problem], tell: Tell
) -> list[list[Response]]:
    identity = made.identity
    how = {key: identity[key] for key in ("k", "max_tokens", "seed")}
    how |= {"sampling": replace(sampling_of(identity), stop_ids=made.policy.stop_ids)}
    try:
        return sample(engine, made.policy, scorer, problems, conversations=made.conversations, tell=tell, **how)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--slots {identity['slots']} and --max-tokens {identity['max_tokens']} need more memory than the device "
            f"has ({str(error).splitlines()[0].rstrip('.')}). Lower one of them and choose another --out, because both "
            "are part of an evaluation's identity."
        ) from None


def _row(name: str, problem: Problem, responses: Sequence[Response]) -> Row:
    """The line of responses.jsonl for a problem of this data set."""
    return {
        "data": name,
        "id": problem.id,
        "source": problem.source,
        "prompt": prompt_text(problem.prompt),
        "reference": problem.answer,
        "responses": [
            {
                "text": response.text,
                "tokens": len(response.segment.tokens),
                "status": str(response.segment.status),
                "reward": None if response.score.reward is None else float(response.score.reward),
                "failure": response.score.failure,
                "answer": response.score.answer,
                "entropy": mean(response.segment.entropies),
                **({"turns": response.turns, "ending": response.ending} if response.ending else {}),
            }
            for response in responses
        ],
    }


# Problems, model and identity


def load_data_sets(settings: Settings) -> list[DataSet]:
    """All data sets, in order. Their names must differ, because results are stored by name."""
    found = [_load(name, settings) for name in settings.data]
    if settings.holdout:
        kept = smallest({one.id for data in found if not data.own_scorer for one in data.problems}, settings.holdout)
        found = [data if data.own_scorer else _among(data, kept) for data in found]
    found = [_cut(data, settings.problems) for data in found]
    names = [data.name for data in found]
    twice = [f"two data sets called {name!r}" for name in names if names.count(name) > 1]
    if "overall" in names:
        twice.append("a data set called 'overall', but the results use that name for all of them together")
    if twice:
        raise ValueError(f"--data {','.join(settings.data)} has {twice[0]}. Give it another name: name=path.")
    return found


def _load(name: str, settings: Settings) -> DataSet:
    if name == COUNTDOWN:
        task = Countdown()
        label, problems, scores, notes = name, list(task.test), task.scores, []
    elif settings.episodes.plays:
        problems = load_rows([name], settings.prompt_column, settings.answer_column, settings.template)
        return DataSet(resolve(name).label, problems)
    else:
        columns = {key: getattr(settings, key) for key in ("prompt_column", "answer_column", "template")}
        functions = [one for one in settings.rewards if one != MATH]
        whole_rows = any(judged(one, find_function(one)).style != "ours" for one in functions)
        problems, report = load_problems([name], **columns, whole_rows=whole_rows)
        label, scores = resolve(name).label, None
        notes = [f"{label}: {report}"] if report.read > report.kept else []
    return DataSet(label, problems, scores, "\n".join(notes))


def _among(data: DataSet, kept: set[str]) -> DataSet:
    """The problems of a data set with these ids."""
    return replace(data, problems=[problem for problem in data.problems if problem.id in kept])


def _cut(data: DataSet, most: int | None) -> DataSet:
    """The first problems of a data set."""
    note, has = data.note, len(data.problems)
    if not has:
        raise ValueError(f"--holdout holds out no problem of {data.name!r}. Raise it, or give more problems.")
    if most is not None and has < most:
        note = "\n".join(
            filter(None, (note, f"{data.name}: has {counted(has, 'problem')}, fewer than --problems {most}"))
        )
    return replace(data, problems=data.problems[:most], note=note)


def play(settings: Settings, policy: Policy, data_sets: Sequence[DataSet]) -> PlayedTask | None:
    """The environments that answer the model's turns; None if there are none, or only the embedded one."""
    chosen = settings.episodes
    if not chosen.plays or chosen.environment == CALCULATOR:
        return None
    values: dict[str, Any] = {key: getattr(chosen, key) for key in chosen.changed()}
    values |= {"test": settings.data} if settings.data else {"environment_test": settings.problems or EPISODES}
    values |= {"reward": settings.rewards, "reward_weights": settings.reward_weights} if settings.rewards else {}
    problems = [problem for data in data_sets for problem in data.problems]
    return PlayedTask(TaskConfig(**values), policy, partial(_verifier, settings, policy), test=problems)


def _verifier(settings: Settings, policy: Policy) -> Verifier:
    return open_scorer(
        settings.rewards or (MATH,),
        opens_thinking=policy.opens_thinking,
        weights=settings.reward_weights,
        seconds=settings.reward_seconds,
        memory_mb=settings.reward_memory_mb,
    )


@contextmanager
def open_scorers(made: Prepared, *, needed: bool) -> Iterator[dict[str, Scorer]]:
    """What scores each data set: its own verifier, or one for all others, whose processes end with the block."""
    scores: Scorer | None = None
    close: Callable[[], None] | None = None
    data_sets = made.data_sets if needed else []
    own = {data.name: data.own_scorer for data in data_sets if made.settings.reward is None}
    try:
        if made.played is not None:
            scores = made.played.scores
        elif not all(own.get(data.name) for data in data_sets):
            scores, close, *_ = _verifier(made.settings, made.policy)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        yield {data.name: found for data in data_sets if (found := own.get(data.name) or scores)}
    finally:
        if close is not None:
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
            row = [problem.extra] if settings.episodes.plays else []  # environments read all of it
            digest.update(json.dumps([problem.id, ids, problem.answer, *row], sort_keys=True).encode() + b"\n")
        fingerprints[data.name] = digest.hexdigest()[:16]
    decided = {
        **{
            key: value
            for key, value in asdict(settings).items()
            if key not in ("chunk", "holdout", "episodes")
            and (key, value) not in {**LEAVES_OUT_NOTHING, "reward_weights": ()}.items()
        },
        **_episodes(settings.episodes),
        "max_tokens": max_tokens,
        "chunk": settings.chunk_problems,
        "stop_ids": sorted(policy.stop_ids),
        "weights": fingerprint_of_weights(policy.model),
        "fingerprints": fingerprints,
        "versions": {
            "bapo": bapo.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **({"gpu": torch.cuda.get_device_name()} if settings.device == "cuda" else {}),
            **_versions_of_verifier(data_sets, settings),
        },
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
            f"the longest prompt has {longest} tokens, and the model only {positions} positions, so no response fits. "
            "Leave that problem out, or use a model with a longer context."
        )
    if settings.max_tokens is None:
        return min(room, MAX_RESPONSE_TOKENS if settings.model == "demo" else DEFAULT_MAX_TOKENS)
    if positions is not None and settings.max_tokens > room:
        raise ConfigError(
            f"--max-tokens {settings.max_tokens} and prompts of up to {longest} tokens exceed the model's {positions} "
            f"positions. Set --max-tokens {room} or less."
        )
    return settings.max_tokens


def _episodes(chosen: EpisodeConfig) -> dict[str, Any]:
    """What answers the model's turns, and a hash of the files that say so; nothing if responses have one turn."""
    named = [name for name in (chosen.environment, *chosen.tools, chosen.tool_format) if name and ":" in name]
    files = [file for name in named if (file := file_of(name))]
    known = {key: getattr(chosen, key) for key in chosen.changed()}
    known |= {"files": sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]} if files else {}
    return {"episodes": known} if chosen.plays else {}


def _versions_of_verifier(data_sets: Sequence[DataSet], settings: Settings) -> dict[str, str]:
    """What the rewards depend on besides the settings: the files of functions, and the version of math-verify."""
    functions = [one for one in settings.rewards if one != MATH]
    files = [file for one in functions if (file := inspect.getsourcefile(find_function(one)))]
    found = (
        {"reward_file": sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]} if files else {}
    )
    if functions and len(functions) == len(settings.rewards):
        return found
    if settings.reward is None and all(data.own_scorer for data in data_sets):
        return {}
    try:
        return found | {"math_verify": version("math-verify"), "sympy": version("sympy")}
    except PackageNotFoundError:
        install = "Install it with `pip install 'bapo[math]'`, or give --reward module:function."
        raise ValueError(f"--reward math needs math-verify, which is not installed. {install}") from None
