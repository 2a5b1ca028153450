"""`bapo compare GRID`: objectives x settings x seeds, and a table of what came out.

Comparing knows runs only from outside: it starts `bapo train` and `bapo resume`, and reads the directories they write.
It never imports torch, so nothing here can disturb a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, TextIO

from tyro.conf import Positional, UseAppendAction, arg

from bapo.compare.grid import Grid, Job, State, load_grid
from bapo.compare.jobs import default_parallel, execute, make_plan, threads_for
from bapo.compare.progress import make_progress
from bapo.compare.results import collect, table_lines, write_json
from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.config.recipe import listing
from bapo.runs.files import check_kinds, held, is_held
from bapo.screen.terminal import say, write_line

__all__ = ["Arguments", "Grid", "compare", "load_grid", "run"]


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
    retry: bool = False
    """Set damaged runs aside and start them again."""
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
    chosen = {name: getattr(arguments, name) for name in ("steps", "parallel", "only", "retry", "dry_run")}
    return compare(arguments.grid, **chosen)


def compare(
    path: str | Path,
    *,
    steps: int | None = None,
    parallel: int | None = None,
    only: Sequence[str] = (),
    retry: bool = False,
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
        _say(stream, *([busy] if is_held(grid.out / "lock") else []))
        return 0
    grid.out.mkdir(parents=True, exist_ok=True)
    check_kinds(grid.out, files=("grid.json", "runs.jsonl", "results.json"))
    with held(grid.out / "lock", busy=busy) as lock:
        jobs = _chosen(make_plan(grid), only)  # again, now that no other process can change it
        write_json(grid.out / "grid.json", grid.record())
        with make_progress(grid, jobs, parallel, stream) as progress:
            stopped = execute(
                jobs,
                log=grid.out / "runs.jsonl",
                lock=lock,
                parallel=parallel,
                threads=threads_for(cells, parallel),
                retry=retry,
                progress=progress,
            )
    results = collect(grid)
    write_json(grid.out / "results.json", results)
    _say(stream, *table_lines(results))
    bad = [job for job in jobs if job.state is not State.FINISHED]
    _say(stream, *(f"{job.cell.name}: {job.describe()}" for job in bad))
    if any(job.state is State.DAMAGED for job in bad):
        _say(stream, "damaged runs are left alone; repair them as described above, or start them again with --retry")
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
