"""`bapo compare GRID`: objectives x settings x seeds, and a table of what came out.

Comparing knows runs only from outside: it starts `bapo train` and `bapo resume`, and reads the directories they write.
It never imports torch, so nothing here can disturb a run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO

from bapo.compare.execute import State, execute
from bapo.compare.grid import Grid, load_grid
from bapo.compare.plan import Job, default_parallel, make_plan, threads_for
from bapo.compare.progress import make_progress
from bapo.compare.results import collect, table_lines, write_json
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.runs.files import check_kinds
from bapo.runs.lock import held, is_held
from bapo.screen.terminal import write_line

__all__ = ["Grid", "compare", "load_grid"]


def compare(
    path: str | Path,
    *,
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
    grid = load_grid(path)
    if parallel is not None and parallel < 1:
        raise ConfigError(
            f"--parallel {parallel}: it must be at least one run at a time. Leave it out to use the default."
        )
    jobs = _chosen(make_plan(grid), only)
    cells = [job.cell for job in jobs]
    parallel = parallel or default_parallel(cells)
    busy = f"another `bapo compare`, or a run that it started, is still at work in {grid.out}. Wait for it, or stop it."
    if dry_run:
        _say(stream, f"{counted(len(jobs), 'run')} in {grid.out}, {parallel} at a time")
        for job in jobs:
            _say(stream, f"{job.cell.name:<40} {job.describe()}")
        if is_held(grid.out / "lock"):
            _say(stream, busy)
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
    for job in bad:
        _say(stream, f"{job.cell.name}: {job.describe()}")
    if any(job.state is State.DAMAGED for job in bad):
        _say(stream, "damaged runs are left alone; repair them as described above, or start them again with --retry")
    _say(stream, f"results   {grid.out / 'results.json'}", f"next      bapo report {grid.out}")
    if stopped:
        _say(stream, f"stopped; the same command continues: bapo compare {path}")
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
