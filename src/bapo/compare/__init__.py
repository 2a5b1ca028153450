"""`bapo compare GRID`: objectives x settings x seeds, and what came out: one table per setting, one row per objective.

Comparing knows runs only from outside: it starts `bapo train` and `bapo resume`, and reads the directories they write.
It never imports torch, so nothing here can disturb a run. Only finished runs count, and each row says how many there
are. `bapo.runs.comparison` has the numbers and the words of the verdict, which the report uses, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, TextIO

from tyro.conf import Positional, UseAppendAction, arg

from bapo.compare.grid import Cell, Grid, Job, State, load_grid
from bapo.compare.jobs import default_parallel, execute, make_plan, threads_for
from bapo.compare.progress import GridView
from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.config.recipe import listing
from bapo.runs import files
from bapo.runs.comparison import Rows, compare_arms, difference_cells, judge, measure_names, meeting_by, scores, shared
from bapo.runs.read import STOP_REASONS, Run, read_run
from bapo.runs.statistics import FEWEST_SEEDS, estimate, measures
from bapo.screen.terminal import aligned, say, write_line

__all__ = ["Arguments", "Grid", "collect", "compare", "load_grid", "run", "table_lines", "write_json"]

WIDTH = 110
"""Characters in a line of the verdict."""
Row = Mapping[str, Any]  # seeds, and measures -> {"mean", "half_width"}


@dataclass(frozen=True)
class Arguments:
    """Compare objectives and settings over several seeds.

    Starts the runs of a grid that are missing, several at a time, continues those that were stopped, and prints a table
    of all of them.
    """

    grid: Annotated[Positional[Path | None], arg(metavar="GRID", help_behavior_hint="(required)")] = None
    """The objectives, settings and seeds: a TOML file, or the name of a grid that comes with bapo, such as quick."""
    steps: Annotated[int | None, option(default="those of the grid", metavar="N")] = None
    """Steps of every run."""
    parallel: Annotated[int | None, option(default="one per core; 4 on a GPU", metavar="N")] = None
    """How many runs at a time."""
    only: Annotated[tuple[str, ...], UseAppendAction, option(default="all runs", metavar="PATTERN")] = ()
    """Run only the runs whose SETTING/OBJECTIVE/seed-N matches, e.g. 'reuse-16/*' or '*/grpo/seed-0'. May be given more
    than once."""
    dry_run: bool = False
    """Check the grid and print what would be done."""
    list: bool = False
    """Print the grids that come with bapo."""


def run(arguments: Arguments) -> int:
    """Carry out the command; returns its exit code."""
    if arguments.list:
        say(listing("bapo compare"))
        return 0
    if arguments.grid is None:
        raise ConfigError("no grid given. Try `bapo compare quick`; `bapo compare --list` shows all of them.")
    chosen = {name: getattr(arguments, name) for name in ("steps", "parallel", "only", "dry_run")}
    return compare(arguments.grid, **chosen)


def compare(
    path: str | Path,
    *,
    steps: int | None = None,
    parallel: int | None = None,
    only: Sequence[str] = (),
    dry_run: bool = False,
    stream: TextIO | None = None,
) -> int:
    """Run what is missing of a grid, then print and write its results. Returns the exit code.

    `only`: shell patterns of the names of runs; others are neither started nor asked for, but shown where they exist.
    0: every run asked for is finished. 1: some failed or are damaged. 130: stopped by the user.
    """
    stream = stream or sys.stdout
    grid = load_grid(path, steps=steps)
    if parallel is not None and parallel < 1:
        raise ConfigError(f"--parallel {parallel}: give at least one run at a time, or leave it out for the default.")
    jobs = _chosen(make_plan(grid), only)
    cells = [job.cell for job in jobs]
    parallel = parallel or default_parallel(cells)
    busy = f"another `bapo compare`, or a run that it started, is still at work in {grid.out}. Wait for it, or stop it."
    if dry_run:
        _say(stream, f"{counted(len(jobs), 'run')} in {grid.out}, {parallel} at a time")
        _say(stream, *(f"{job.cell.name:<40} {job.describe()}" for job in jobs))
        if (grid.out / "lock").exists():
            with suppress(ConfigError), files.held(grid.out / "lock", busy=busy):
                return 0
            _say(stream, busy)
        return 0
    grid.out.mkdir(parents=True, exist_ok=True)
    files.check_kinds(grid.out, files=("grid.json", "runs.jsonl", "results.json"))
    with files.held(grid.out / "lock", busy=busy) as lock:
        jobs = _chosen(make_plan(grid), only)  # again, now that no other process can change it
        write_json(grid.out / "grid.json", grid.record())
        with GridView(grid, jobs, parallel, stream) as progress:
            stopped = execute(
                jobs,
                log=grid.out / "runs.jsonl",
                lock=lock,
                parallel=parallel,
                threads=threads_for(cells, parallel),
                progress=progress,
            )
    results = collect(grid)
    write_json(grid.out / "results.json", results)
    _say(stream, *table_lines(results))
    bad = [job for job in jobs if job.state is not State.FINISHED]
    _say(stream, *(f"{job.cell.name}: {job.describe()}" for job in bad))
    if any(job.state is State.DAMAGED for job in bad):
        _say(
            stream,
            "damaged runs are left alone; repair them as described above, or remove their directories to start again",
        )
    _say(stream, f"results   {grid.out / 'results.json'}", f"next      bapo report {grid.out}")
    if stopped:
        again = f"bapo compare {path}" + ("" if steps is None else f" --steps {steps}")
        _say(stream, f"stopped; the same command continues: {again}")
        return 130
    return 1 if bad else 0


def _chosen(jobs: list[Job], only: Sequence[str]) -> list[Job]:
    """The jobs whose name matches a pattern; all of them if there are none."""
    for pattern in only:
        if not any(fnmatchcase(job.cell.name, pattern) for job in jobs):
            raise ConfigError(
                f"--only {pattern!r} matches no run of the grid. Runs are named SETTING/OBJECTIVE/seed-N, e.g. "
                f"{jobs[0].cell.name!r}; --dry-run lists them all."
            )
    return [job for job in jobs if not only or any(fnmatchcase(job.cell.name, pattern) for pattern in only)]


def _say(stream: TextIO, *lines: str) -> None:
    for line in lines:
        write_line(stream, line)


# What came out.


def collect(grid: Grid) -> dict[str, Any]:
    """The contents of results.json: the measures of every run, and setting -> objective -> measure -> mean, half_width.

    The same for the differences from the first objective, over the seeds that both have; and the verdict.
    `across_settings`: objective -> setting -> the same, if there is only one objective, so that settings are compared.
    """
    runs, missing = [], []
    for cell in grid.cells:
        found = read_run(cell.path)
        if isinstance(found, Run):
            runs.append(_place(cell) | {"measures": measures(found)})
        else:
            missing.append(_place(cell) | {"kind": found.kind, "why": found.message})
    settings = compare_arms(runs, grid.settings, grid.objectives)
    by = meeting_by(grid.settings, grid.objectives)
    across = compare_arms(runs, grid.objectives, grid.settings, by) if by[0] == "objective" else None
    configs: dict[str, list[dict[str, Any]]] = {}
    for cell in grid.cells:
        configs.setdefault(getattr(cell, by[0]), []).append(cell.values)
    verdict = judge(across or settings, configs, missing=len(missing))
    return {
        "name": grid.name,
        "k": shared(configs, "eval.k"),
        "verdict": [*verdict.lines, *verdict.details, *verdict.notes],
        "settings": settings,
        "across_settings": across,
        "runs": runs,
        "missing": missing,
    }


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The tables and the verdict, as lines of text."""
    lines: list[str] = []
    k = results["k"] or "k"
    for setting, rows in results["settings"].items():
        columns = _columns(k, measure_names(rows))
        cells = [["", "seeds", *columns]]
        for objective, row in rows.items():
            cells.append([objective, str(row["seeds"]), *(_text(row, name) for name in columns.values())])
        lines += ["", f"{results['name']}, {setting}: {_means(max(row['seeds'] for row in rows.values()))}"]
        lines += (f"  {line}" for line in aligned(cells))
        lines += _difference_lines(rows, k)
    for objective, rows in (results["across_settings"] or {}).items():
        if found := _difference_lines(rows, k):
            lines += ["", f"{results['name']}, {objective}: the settings against each other", *found[1:]]
    if any("stop_start" in row["measures"] for rows in results["settings"].values() for row in rows.values()):
        reasons = ", ".join(name.replace("_", " ") for name in STOP_REASONS)
        lines += ["", f"stops: % of updates whose search for bounds ended with {reasons}"]
    if results["verdict"]:
        lines += ["", *(line for text in results["verdict"] for line in wrap(text, WIDTH))]
    return [*lines, ""]


def _difference_lines(rows: Rows, k: int | str) -> list[str]:
    """The table of differences from the first row; empty if no row shares two seeds with it."""
    cells = difference_cells(rows, k)
    if not cells:
        return []
    title = f"difference from {next(iter(rows))}, seed by seed"
    if max(int(seeds) for _, seeds, *_ in cells[1:]) >= FEWEST_SEEDS:
        title += ", ± half width of its 95% interval; * if the interval excludes 0"
    return ["", f"  {title}", *(f"  {line}" for line in aligned(cells))]


def _means(seeds: int) -> str:
    """What the numbers of a table are, if its rows have at most so many seeds."""
    if seeds >= FEWEST_SEEDS:
        return f"mean over seeds ± half width of its 95% interval, from {FEWEST_SEEDS} seeds on"
    return f"mean over seeds; an interval needs {FEWEST_SEEDS}"


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all. Numbers that are not finite become null."""
    files.write(path, json.dumps(files.strict(value), indent=2, allow_nan=False) + "\n")


def _place(cell: Cell) -> dict[str, Any]:
    return {"setting": cell.setting, "objective": cell.objective, "seed": cell.seed, "path": str(cell.path)}


def _columns(k: int | str, names: set[str]) -> dict[str, str]:
    """Heading -> measure, for the measures that there are. All reasons to stop share a column."""
    listed = scores(k, names) | {"before": "entropy_before", "max grad norm": "max_grad_norm"}
    listed |= {"positive share": "share", "responses": "responses"}
    return listed | ({"stops": "stop"} if "stop_start" in names else {})


def _text(row: Row, name: str) -> str:
    measured = row["measures"]
    if name == "stop":
        shares = [measured[f"stop_{reason}"]["mean"] for reason in STOP_REASONS if f"stop_{reason}" in measured]
        return " ".join(f"{100 * share:.0f}" for share in shares) or "–"
    if name not in measured:
        return "–"
    mean, half = measured[name]["mean"], measured[name]["half_width"]
    return f"{mean:.0f}" if name == "responses" else estimate(name, mean, half, row["seeds"])
