"""From run directories to arms. An arm is one configuration; its runs differ in their seeds only.

An arm has two names: its setting (where stale data comes from) and its objective. Runs of `bapo compare` are in
SETTING/OBJECTIVE/seed-N below a grid.json, and take their names from there. Other runs are named after the keys in
which their configurations differ. A copy of a run is not a further seed: it is reported as a defect and not counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from bapo.config.words import flat
from bapo.runs import files
from bapo.runs.read import Defect, Run, find_runs, read_run
from bapo.runs.statistics import mean
from bapo.types import LOG_RATIO_EDGES, USE_EDGES

NOT_THE_EXPERIMENT = {
    *("seed", "out", "device", "threads", "checkpoint_every", "checkpoint_minutes", "checkpoint_keep", "sample_every"),
    "learn.micro_tokens",
}
"""Keys in which the runs of one arm may differ: the seed, and keys that do not change what is trained."""
BINNED: tuple[tuple[tuple[str, ...], int | None], ...] = (
    (("staleness_histogram",), None),
    (("ratio_histogram", "ratio_prob", "ratio_entropy"), len(LOG_RATIO_EDGES) + 1),
    (("use_histogram", "use_positive", "use_negative", "use_retained", "use_below"), len(USE_EDGES) + 1),
)
"""Metrics that are lists with one entry per bin: those logged together, and the number of bins if it is fixed."""


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration."""

    setting: str
    objective: str  # sft for a supervised run
    runs: list[Run]

    @property
    def sft(self) -> bool:
        """Whether these are runs of `bapo sft`."""
        return self.runs[0].sft

    @property
    def config(self) -> dict[str, Any]:
        """The configuration they share."""
        return self.runs[0].config

    @property
    def staleness(self) -> float:
        """Mean number of updates between sampling and use, over the updates of all runs."""
        values = [value for run in self.runs for value in run.series("staleness_mean")]
        return mean(values) if values else 0.0


@dataclass(frozen=True)
class Found:
    """What was found at some paths."""

    arms: list[Arm]
    """Arms of reinforcement learning first, then supervised ones."""
    defects: list[Defect]
    """Directories that cannot be shown, unfinished runs that are shown as far as they got, and copies."""


def find_arms(paths: Sequence[Path]) -> Found:
    """Every run at or below the paths, gathered into arms. An unreadable directory is a defect, not an error."""
    runs, defects = [], []
    for directory in run_directories(paths):
        run = read_run(directory, finished=False)
        if isinstance(run, Run) and (wrong := _unusable(run)):
            run = Defect(directory, "damaged", f"metrics.jsonl {wrong}.", ("metrics.jsonl",))
        runs += [run] if isinstance(run, Run) else []
        defects += [run] if isinstance(run, Defect) else []
    shown, copies = _once_per_seed(runs)
    for run in shown:
        if not run.summary:
            done = f"{len(run.timing)} of {run.planned} steps are logged and shown"
            defects.append(Defect(run.path, "unfinished", f"it is still running, or was stopped: {done}."))
    arms = [arm for kind in (False, True) for arm in arms_of(run for run in shown if run.sft is kind)]
    return Found(arms, sorted([*defects, *copies], key=lambda defect: str(defect.path)))


def run_directories(paths: Sequence[Path]) -> list[Path]:
    """Every run directory at or below the paths, each once."""
    found = [directory for path in paths for directory in find_runs(path) or [path]]
    return list({directory.resolve(): directory for directory in reversed(found)}.values())[::-1]


def _unusable(run: Run) -> str | None:
    """What is wrong with a log that parses but cannot be shown; None if it can."""
    if not all(isinstance(line.get("version"), int) for line in (*run.updates, *run.evals)):
        return "has a line without its version"
    for keys, bins in BINNED:
        logged = any(key in line for line in run.updates for key in keys)
        for key in keys if logged else ():
            lengths = {_length(line.get(key)) for line in run.updates}
            if len(lengths) > 1 or None in lengths or bins not in (None, *lengths):
                return f"has updates whose {key} is missing or of another length"
    return None


def _length(row: Any) -> int | None:
    """The length of a list of numbers; None if it is something else."""
    return len(row) if isinstance(row, list) and all(isinstance(entry, int | float) for entry in row) else None


def _once_per_seed(runs: Sequence[Run]) -> tuple[list[Run], list[Defect]]:
    """For each arm and seed the run that got furthest, and the others as copies."""
    kept: dict[str, Run] = {}
    copies = []
    for run in sorted(runs, key=lambda run: (not run.summary, -len(run.timing))):
        first = kept.setdefault(json.dumps([_arm_key(run), run.config["seed"]]), run)
        if first is not run:
            message = f"it has the same configuration and seed as {first.path}, which is shown instead."
            copies.append(Defect(run.path, "duplicate", message))
    return [run for run in runs if any(run is one for one in kept.values())], copies


def arms_of(runs: Iterable[Run]) -> list[Arm]:
    """Arms sorted by the staleness of their setting, then by objective with bapo first."""
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        gathered.setdefault(_arm_key(run), []).append(run)
    groups = [sorted(group, key=lambda run: (run.config["seed"], str(run.path))) for group in gathered.values()]
    configs = [_experiment(group[0]) for group in groups]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    arms: list[Arm] = []
    for group in groups:
        setting, objective = _from_directory(group[0]) or _from_keys(group[0], differing)
        taken = {arm.objective for arm in arms if arm.setting == setting}
        names = (f"{objective} ({number})" if number > 1 else objective for number in count(1))
        arms.append(Arm(setting, next(name for name in names if name not in taken), group))

    def order(arm: Arm) -> tuple[Any, ...]:
        age = mean([other.staleness for other in arms if other.setting == arm.setting])
        known = age if math.isfinite(age) else math.inf
        return known, arm.setting, not arm.objective.startswith("bapo"), arm.objective

    return sorted(arms, key=order)


def _experiment(run: Run) -> dict[str, Any]:
    return {key: value for key, value in flat(run.config) if key not in NOT_THE_EXPERIMENT}


def _arm_key(run: Run) -> str:
    return json.dumps([_from_directory(run), _experiment(run)], sort_keys=True)


def _from_directory(run: Run) -> tuple[str, str] | None:
    """Setting and objective of a run of `bapo compare`, which lies below its grid.json."""
    path = run.path.resolve()
    if path.name != f"seed-{run.config['seed']}" or _grid_file(run) is None:
        return None
    return path.parts[-3], path.parts[-2]


def run_name(run: Run) -> str:
    """The name of its directory; in a grid, its place there."""
    path = run.path.resolve()
    return "/".join(path.parts[-3:]) if _from_directory(run) else path.name


def _grid_file(run: Run) -> Path | None:
    above = run.path.resolve().parents
    file = above[2] / "grid.json" if len(above) > 2 else None
    return file if file is not None and file.is_file() else None


def grid_record(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """The grid.json that all these runs belong to; None if there is no such file."""
    beside = {_grid_file(run) for arm in arms for run in arm.runs}
    file = beside.pop() if len(beside) == 1 else None
    try:
        return files.read_object(file) if file else None
    except (OSError, ValueError):
        return None


def _from_keys(run: Run, differing: list[str]) -> tuple[str, str]:
    config = dict(flat(run.config))
    said = {key: f"{key.rsplit('.', 1)[-1]} {config[key]}" for key in differing if config.get(key) is not None}
    if run.sft:
        return ", ".join(said.values()) or Path(config["model.path"]).name, "sft"
    said.pop("objective.name", None)
    of_objective = [text for key, text in said.items() if key.startswith("objective.")]
    others = [text for key, text in said.items() if not key.startswith("objective.")]
    return ", ".join(others) or sources(run.config), " ".join([config["objective.name"], *of_objective])


def sources(config: dict[str, Any]) -> str:
    """Where a run's stale data comes from, in a few words."""
    off = config["offpolicy"]
    parts = [f"reuse {off['reuse']}"]
    if off["replay_fraction"]:
        parts.append(f"replay {off['replay_fraction']:g}")
    if off["partial_budget"] is not None:
        parts.append(f"partial {off['partial_budget']}")
    return ", ".join(parts)


def samples_per_problem(arms: Sequence[Arm]) -> str:
    """The k of avg@k and pass@k; the letter k if arms differ in it."""
    ks = {arm.config["eval"]["k"] for arm in arms}
    return str(ks.pop()) if len(ks) == 1 else "k"
