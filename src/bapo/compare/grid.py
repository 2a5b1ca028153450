"""The grid file: what to compare, and the job that each run of it is. All of it is checked before anything starts.

    name = "reuse"                 # name of the tables
    out = "runs/reuse"             # directory of everything; runs are in out/SETTING/OBJECTIVE/seed-N
    seeds = 3                      # 0, 1, 2; or a list

    [base]                         # keys of a recipe, for every run
    recipe = "offpolicy.toml"      # optional: a recipe beside this file, or the name of one; other keys override it
    steps = 60

    [[objective]]                  # a label, and the keys that make this row
    label = "grpo"
    objective.name = "grpo"

    [[setting]]                    # a label, and the keys that make this table
    label = "reuse-16"
    offpolicy.reuse = 16

The configuration of a cell is base, then setting, then objective, then seed; later keys override earlier ones, and
--steps overrides all. All cells are validated, and one error lists everything that is wrong with any of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

from bapo.config.base import possible_path
from bapo.config.errors import ConfigError
from bapo.config.recipe import KINDS, check, command_for, listed, read_recipe
from bapo.config.run import Config
from bapo.config.words import flat, merged

KEYS = ("name", "out", "seeds", "base", "objective", "setting")
MOST_SEEDS = 10_000
LONGEST_LABEL = 80
_LABEL = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+-]{{,{LONGEST_LABEL - 1}}}")


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    setting: str
    objective: str
    seed: int
    path: Path
    """Its run directory."""
    config: Config

    @property
    def name(self) -> str:
        """Its place in the grid, which is also its path below the grid's directory."""
        return f"{self.setting}/{self.objective}/seed-{self.seed}"

    @property
    def values(self) -> dict[str, Any]:
        """Its configuration, under dotted keys."""
        return dict(flat(self.config.model_dump(mode="json")))


@dataclass(frozen=True)
class Grid:
    """All runs, in the order in which they start."""

    name: str
    out: Path
    settings: tuple[str, ...]
    objectives: tuple[str, ...]
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]

    def record(self) -> dict[str, Any]:
        """The contents of grid.json: which directory belongs to which place in the grid."""
        runs = [{"setting": c.setting, "objective": c.objective, "seed": c.seed, "path": c.name} for c in self.cells]
        labels = {"settings": list(self.settings), "objectives": list(self.objectives), "seeds": list(self.seeds)}
        return {"name": self.name, **labels, "runs": runs}


class State(StrEnum):
    """Where a run of the grid stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped by a signal and saved; the same command continues it."""
    FAILED = "failed"
    DAMAGED = "damaged"


@dataclass
class Job:
    """A cell of the grid, and what to do about it."""

    cell: Cell
    state: State
    action: Literal["train", "resume"] = "train"
    """The command that will start it."""
    note: str = ""
    """Why it failed, or what is damaged."""
    before: int = 0
    """Steps it had logged when this comparison began."""
    step: int = 0
    """Steps it has logged."""

    @property
    def log(self) -> Path:
        """File with the output of its process."""
        return self.cell.path.with_name(f"{self.cell.path.name}.log")

    @property
    def recipe(self) -> Path:
        """File with the configuration given to its process."""
        return self.cell.path.with_name(f"{self.cell.path.name}.json")

    def describe(self) -> str:
        """Its state in a few words, and why."""
        reached = f"step {self.step} of {self.cell.config.steps}"
        told = {
            State.WAITING: "will start" if self.action == "train" else f"will resume at {reached}",
            State.RUNNING: reached if self.step else "starting",
            State.FINISHED: "finished",
            State.STOPPED: f"stopped at {reached}",
        }
        return told.get(self.state, f"{self.state}: {self.note}")


def load_grid(path: str | Path, *, steps: int | None = None) -> Grid:
    """The grid in a TOML file, or one ConfigError that lists all that is wrong with it. `steps`: of every run."""
    values, path = read_recipe(path), Path(path)
    right = command_for(values)
    if right not in (None, "bapo compare"):
        raise ConfigError(f"{path} is {KINDS[right]}, and not a grid of runs. Run it with `{right} {path}`.")
    wrong = [f"{key} is not a key of a grid. Its keys are {', '.join(KEYS)}." for key in values if key not in KEYS]
    name, out = values.get("name", path.stem), values.get("out", f"runs/{path.stem}")
    wrong += [f"{key} = {value!r}: give a string." for key, value in (("name", name), ("out", out)) if not _text(value)]
    if _text(out) and not possible_path(out):
        wrong.append(f"out = {out[:40]!r}… is too long for a path, or holds a NUL. Give a shorter one.")
    elif _text(out) and Path(out).exists() and not Path(out).is_dir():
        wrong.append(f"out = {out!r} exists and is not a directory. Give the runs a directory of their own.")
    seeds = _seeds(values.get("seeds", 1), wrong)
    settings = _entries(values.get("setting", [{"label": "default"}]), "setting", wrong)
    objectives = _entries(values.get("objective", []), "objective", wrong)
    base = _base(values.get("base", {}), path.parent, wrong)
    configs = _configs(base, settings, objectives, {} if steps is None else {"steps": steps}, wrong)
    if wrong:
        raise listed(f"{path}: nothing was started", wrong)
    cells = tuple(_cells(Path(out), configs, seeds))
    return Grid(name, Path(out), tuple(settings), tuple(objectives), seeds, cells)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _seeds(value: Any, wrong: list[str]) -> tuple[int, ...]:
    seeds = list(range(min(value, MOST_SEEDS + 1))) if type(value) is int else value
    known = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not known or not 0 < len(seeds) <= MOST_SEEDS or len(set(seeds)) < len(seeds):
        most = f"{MOST_SEEDS:,} at most"
        wrong.append(f"seeds = {value!r}: give a count such as 3, or a list of different whole numbers from 0, {most}.")
        return ()
    return tuple(seeds)


def _entries(value: Any, kind: str, wrong: list[str]) -> dict[str, dict[str, Any]]:
    """The [[objective]] or [[setting]] entries: label -> keys."""
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        needs = f"a grid needs a list of them: write [[{kind}]], with two brackets, a label and the keys that make it"
        wrong.append(f"[[{kind}]]: give at least one; {needs}.")
        return {}
    found: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(value, start=1):
        label, place = entry.get("label"), f"[[{kind}]] {number}"
        if not isinstance(label, str) or not _LABEL.fullmatch(label) or label in found:
            own = f"give a label of its own, of letters, digits and . _ + -, at most {LONGEST_LABEL} of them"
            wrong.append(f"{place}: label = {label!r} cannot name a directory beside the others: {own}.")
            label = place
        found[label] = {key: value for key, value in entry.items() if key != "label"}  # checked, whatever its label
        wrong += [f"{place}: {_owned(key)}" for key in ("seed", "out") if key in entry]
    return found


def _base(value: Any, directory: Path, wrong: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        wrong.append(f"base = {value!r}: give a table of keys, as in a recipe.")
        return {}
    wrong += [f"[base]: {_owned(key)}" for key in ("seed", "out") if key in value]
    own = {key: kept for key, kept in value.items() if key != "recipe"}
    if "recipe" not in value:
        return own
    try:
        beside = directory / str(value["recipe"])
        recipe = read_recipe(beside if beside.is_file() else str(value["recipe"]))
    except ConfigError as error:
        wrong.append(f"base.recipe = {value['recipe']!r}: {error}")
        return own
    return merged({key: kept for key, kept in recipe.items() if key not in ("seed", "out")}, own)


def _owned(key: str) -> str:
    return f"{key} differs from run to run. Set {'seeds' if key == 'seed' else 'out'} at the top of the grid instead."


def _configs(
    base: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    objectives: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Any],  # keys that override all others
    wrong: list[str],
) -> dict[tuple[str, str], Config]:
    """The configuration of every pair of a setting and an objective; adds what is wrong with any of them."""
    errors: dict[str, list[str]] = {}  # message -> cells that have it
    configs: dict[tuple[str, str], Config] = {}
    for setting, objective in product(settings, objectives):
        config, mistakes = check(Config, merged(merged(merged(base, settings[setting]), objectives[objective]), own))
        if config is not None:
            configs[setting, objective] = config
        for line in mistakes:
            errors.setdefault(line, []).append(f"{setting}/{objective}")
    total = len(settings) * len(objectives)
    wrong += [
        f"{'every run' if len(where) == total > 1 else ', '.join(where)}: {message}"
        for message, where in errors.items()
    ]
    wrong += [
        f"{'/'.join(one)} and {'/'.join(other)} have the same keys, so their runs would be copies. Make them differ, "
        "or remove one of them."
        for one, other in combinations(configs, 2)
        if configs[one] == configs[other]
    ]
    return configs


def _cells(out: Path, configs: Mapping[tuple[str, str], Config], seeds: tuple[int, ...]) -> Iterator[Cell]:
    """Every run, seed by seed, so that every cell soon has a run."""
    for seed, ((setting, objective), config) in product(seeds, configs.items()):
        path = out / setting / objective / f"seed-{seed}"
        yield Cell(setting, objective, seed, path, config.model_copy(update={"seed": seed, "out": str(path)}))
