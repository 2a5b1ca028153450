"""Reads run directories: a finished run becomes a `Run`, and anything else a `Defect` that says what is wrong.

    for path in find_runs("runs/quick"):
        run = read_run(path)
        if isinstance(run, Defect):
            print(run)          # which directory, what is wrong with it, what to do
        else:
            run.summary["after"]["eval/avg"], run.series("grad_norm"), run.config["objective"]["name"]

A comparison reads many directories. Some of their runs were killed, are still running, or have lost a file. Reading
never raises and never repairs anything. Values are plain lists, dicts and floats under the keys that
`bapo.runs.metrics` explains. A run of `bapo sft` is a Run, too: its `updates` are the lines of kind imitation, its
`evals` those of kind held_out, and it has no rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from bapo.config.errors import ConfigError, PlaceError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.config.sections import renamed
from bapo.config.sft import SftConfig
from bapo.runs import files

STOP_REASONS = ("start", "raising_high", "raising_low", "end", "no_signal")
"""Names of the values of the metric `stop`, in order: `bapo.core.bounds.StopReason`, without importing torch."""
LINE_KINDS: dict[str | None, tuple[str, str | None, str]] = {
    None: ("update", "rollout", "eval"),
    "sft": ("imitation", None, "held_out"),
}
"""For each kind of run, the kinds of its lines in metrics.jsonl: updates, rollouts and evaluations."""
LOGS = ("metrics.jsonl", "timing.jsonl")
SCORED = ("before", "after")  # training: the evaluations that a summary has


@dataclass(frozen=True)
class Run:
    """The contents of a run directory. Every line is a dict of metrics; lines are in the order they were logged."""

    path: Path
    config: dict[str, Any]
    """The resolved configuration, nested as in config.json; keys that the file lacks have their defaults."""
    updates: list[dict[str, Any]]
    """One per optimizer step: grad_norm, entropy, share, clip_low, clip_high, stop (bapo only), staleness_mean, …"""
    rollouts: list[dict[str, Any]]
    """One per step: reward (absent if no response finished), length, truncated, rollout/…, buffer/…"""
    evals: list[dict[str, Any]]
    """eval/avg, eval/pass, eval/entropy, …; step 0 is before training. eval/problems: on how many problems.
    eval/temperature marks the temperatures of eval.also_at."""
    timing: list[dict[str, Any]]
    """One per step: seconds, rollout_seconds, learn_seconds, tokens_per_second."""
    summary: dict[str, Any]
    """before and after (eval lines on all problems), also_at, updates, training_seconds, staleness_max. Empty for an
    unfinished run, which only `read_run(…, finished=False)` returns."""
    planned: int
    """Steps the run will have when it is finished; 0 if that is not known yet."""
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """One per update that was skipped because its numbers were not finite."""

    @property
    def sft(self) -> bool:
        """Whether this is a run of `bapo sft`."""
        return self.config.get("kind") == "sft"

    def series(self, key: str) -> list[float]:
        """One metric over the updates that logged it."""
        return logged(self.updates, key)


@dataclass(frozen=True)
class Defect:
    """Why a directory is not a finished run."""

    path: Path
    kind: Literal["missing", "unfinished", "damaged", "duplicate"]
    """missing: there is no run. unfinished: the run is going on, or was stopped and can be resumed. damaged: its files
    contradict each other or cannot be read. duplicate: a copy of another run (never returned by `read_run`)."""
    message: str
    """A sentence that says which file is concerned and what is wrong with it."""
    files: tuple[str, ...] = field(default=())
    """Names of the files concerned."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration of an unfinished run."""

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.message}"


def logged(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values of one metric in those lines that have it."""
    return [float(line[key]) for line in lines if isinstance(line.get(key), int | float)]


class _Damage(Exception):  # noqa: N818
    """Raised while reading; becomes a Defect."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason.rstrip('.')}.")
        self.name = name


def _require(sound: bool, name: str, otherwise: str) -> None:
    """Raise what is wrong with a file unless it is sound."""
    if not sound:
        raise _Damage(name, otherwise)


def read_run(path: str | Path, *, finished: bool = True) -> Run | Defect:
    """The run in a directory, or what is wrong with it. Nothing on the disk makes this raise.

    With `finished=False` a run that is going on, or was stopped, is a Run, too: its summary is empty, and a
    half-written last line is left out.
    """
    path = Path(path)
    try:
        if not (path / "config.json").is_file():
            reason = "there is no config.json in it" if path.is_dir() else "there is no such directory"
            return Defect(path, "missing", f"not a run directory: {reason}.", ("config.json",))
        if is_evaluation(path):
            message = f"this is an evaluation, not a run; its report is {path / 'report.html'}."
            return Defect(path, "missing", message, ("config.json",))
        config = _read_config(path)
        complete = (path / "summary.json").exists()
        planned = _planned(path, config, complete=complete)
        if finished and not complete:
            done = last_step(path)
            message = (
                f"it has no summary.json; {done} of {planned} steps are logged. Continue it: `bapo resume {path}`."
            )
            return Defect(path, "unfinished", message, ("summary.json",), config)
        summary = _parse(files.read(path / "summary.json"), "summary.json") if complete else {}
        metrics, timing = (_read_lines(path / name, whole=complete) for name in LOGS)
        kinds = (*LINE_KINDS[config.get("kind")], "skipped")
        updates, rollouts, evals, skipped = ([line for line in metrics if line.get("kind") == kind] for kind in kinds)
        run = Run(path, config, updates, rollouts, evals, timing, summary, planned, skipped)
        _check_lines(run, len(metrics))
        if complete:
            _check_summary(run)
    except _Damage as damage:
        return Defect(path, "damaged", str(damage), (damage.name,))
    except PlaceError as error:
        return Defect(path, "damaged", str(error), (Path(error.filename).name,))
    except OSError as error:
        return Defect(path, "damaged", f"cannot be read: {error.strerror or error}.")
    return run


def find_runs(root: str | Path) -> list[Path]:
    """Every run directory at or below a directory, sorted, also those that lost a file. Evaluations are left out."""
    root, names = Path(root), ("config.json", "metrics.jsonl")
    if any((root / name).is_file() for name in names):
        return [root]
    found = {file.parent for name in names for file in root.rglob(name)}
    # Trained models have a config.json, too, and checkpoints have a copy of it.
    found = {path for path in found if path.name != "model" and path.parent.name != "checkpoints"}
    return sorted(path for path in found if not is_evaluation(path))


def is_evaluation(path: Path) -> bool:
    """Whether a directory holds an evaluation of `bapo eval`; False if it cannot be read."""
    try:
        return str(files.read_object(path / "config.json").get("format")).startswith("bapo eval ")
    except (OSError, ValueError):
        return False


def last_step(path: Path) -> int:
    """Steps that a run has logged so far. Cheap, because it reads only the end of the log."""
    step = tail(path / "timing.jsonl").get("step")
    return step if isinstance(step, int) else 0


def tail(path: Path, size: int = 8192) -> dict[str, Any]:
    """The last complete line of a log that may be growing; empty if there is none yet."""
    try:
        with files.opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is incomplete
        return next((value for line in reversed(lines) if isinstance(value := json.loads(line), dict)), {})
    except (OSError, ValueError, RecursionError):
        return {}


def logged_steps(
    path: Path, sizes: Mapping[str, int] | None = None
) -> list[tuple[int, dict[str, float], dict[str, float]]]:
    """The numbers that the logs of a run have of each step so far: its metrics and its timing.

    Of several updates in a step, the last one counts, as on the screen. `sizes` limits how many bytes are read of each
    log. ValueError if they hold something else.
    """
    metrics: dict[int, dict[str, float]] = {}
    try:
        logs = [_read_lines(path / name, whole=False, size=(sizes or {}).get(name)) for name in LOGS]
        for name, lines in zip(LOGS, logs, strict=True):
            _require(all(type(line.get("step")) is int for line in lines), name, "has a line without its step")
    except _Damage as damage:
        raise ValueError(str(damage)) from None
    for line in logs[0]:
        if line.get("kind") in ("rollout", "update", "imitation"):
            metrics.setdefault(line["step"], {}).update(_numbers(line))
    return [(line["step"], metrics.get(line["step"], {}), _numbers(line)) for line in logs[1]]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in line.items() if type(value) in (int, float)}


def _read_config(path: Path) -> dict[str, Any]:
    values = _parse(files.read(path / "config.json"), "config.json")
    if isinstance(values.get("objective"), dict):
        values["objective"] = renamed(values["objective"])
    if isinstance(task := values.get("task"), dict) and "test_share" in task:
        task["holdout"] = task.pop("test_share")
    schema: type[Config] | type[SftConfig] = SftConfig if values.get("kind") == "sft" else Config
    try:
        config: dict[str, Any] = parse(schema, values, source="config.json").model_dump(mode="json")
    except ConfigError as error:
        reason = str(error).splitlines()[-1].strip()
        raise _Damage("config.json", f"is not a configuration of this version: {reason}") from None
    return config


def _planned(path: Path, config: dict[str, Any], *, complete: bool) -> int:
    """Steps of the whole run. Those of a supervised run depend on its data; data.json says how many."""
    if config.get("kind") != "sft":
        return int(config["steps"])
    if not complete and not (path / "data.json").exists():
        return 0
    planned = _parse(files.read(path / "data.json"), "data.json").get("updates")
    if not isinstance(planned, int):
        raise _Damage("data.json", "does not say how many updates there are")
    return planned


def _read_lines(path: Path, *, whole: bool, size: int | None = None) -> list[dict[str, Any]]:
    _require(path.exists() or not whole, path.name, "is missing")
    *lines, rest = files.read(path)[:size].split(b"\n") if path.exists() else [b""]
    _require(not (rest and whole), path.name, f"ends in the middle of line {len(lines) + 1}")
    return [_parse(line, path.name, f"line {number} ") for number, line in enumerate(lines, start=1)]


def _parse(data: bytes, name: str, where: str = "") -> dict[str, Any]:
    try:
        value = json.loads(data, parse_int=_integer, parse_float=_float)
    except (ValueError, RecursionError) as error:
        raise _Damage(name, f"{where}is not JSON ({error})") from None
    _require(isinstance(value, dict), name, f"{where}is not a JSON object")
    return dict(value)


def _integer(text: str) -> int:
    if len(text) > files.DIGITS:
        raise ValueError(f"an integer of {len(text)} digits cannot be a metric")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if isfinite(value) and abs(value) > 10.0**files.DIGITS:
        raise ValueError(f"{value:g} is too large for a metric")
    return value


def _check_lines(run: Run, lines: int) -> None:
    """Check that all kinds are known, and that steps are in order without a gap."""
    known = (*run.updates, *run.rollouts, *run.evals, *run.skipped)
    _require(len(known) == lines, "metrics.jsonl", "has a line of unknown kind")
    _require(all(isinstance(line.get("step"), int) for line in known), "metrics.jsonl", "has a line without its step")
    for name, steps in _steps(run).items():
        _require(steps == list(range(1, len(steps) + 1)), name, "skips or repeats a step")


def _steps(run: Run) -> dict[str, list[Any]]:
    """For each log, the steps of those lines that come once per step."""
    lines = sorted([*run.updates, *run.skipped], key=lambda line: line["step"]) if run.sft else run.rollouts
    logs = {"metrics.jsonl": lines, "timing.jsonl": run.timing}
    return {name: [line.get("step") for line in listed] for name, listed in logs.items()}


def _check_summary(run: Run) -> None:
    """Check that a finished run has every step, and that its summary agrees with its log."""
    summary, others = run.summary, run.summary.get("also_at", [])
    unscored = run.sft and not run.evals and all(summary.get(when, "") is None for when in SCORED)  # nothing held out
    scored = all(_is_scored(summary.get(when), run) and summary[when] in run.evals for when in SCORED)
    apart = isinstance(others, list) and all(
        _has_numbers(pair, "temperature") and all(_is_scored(pair.get(when), run) for when in SCORED) for pair in others
    )
    _require(unscored or scored, "summary.json", "lacks a score before or after training that metrics.jsonl has")
    _require(apart, "summary.json", "has an entry in also_at that is not a pair of evaluations")
    for name, steps in _steps(run).items():
        done = f"{len(steps)} of {run.planned} steps"
        _require(len(steps) == run.planned, name, f"has {done}, though the run is complete")
    timed, updates = _has_numbers(summary, "training_seconds"), summary.get("updates")
    _require(timed, "summary.json", "has training_seconds that are not a number")
    _require(updates == len(run.updates), "metrics.jsonl", f"has {len(run.updates)} updates, summary.json {updates}")


def _is_scored(line: Any, run: Run) -> bool:
    """Whether a line has the numbers of an evaluation. Some engines know no entropy."""
    if run.sft:
        return _has_numbers(line, "held_out/loss", "held_out/perplexity", "held_out/accuracy")
    wanted = ("eval/avg", "eval/avg_low", "eval/avg_high", "eval/pass", "eval/length", "eval/problems")
    return _has_numbers(line, *wanted) and isinstance(line.get("eval/entropy"), int | float | None)


def _has_numbers(line: Any, *keys: str) -> bool:
    return isinstance(line, dict) and all(isinstance(line.get(key), int | float) for key in keys)
