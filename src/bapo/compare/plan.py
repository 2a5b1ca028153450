"""Which runs of a grid are done, which can start or continue, and which must not be touched.

    nothing, or a run without a complete checkpoint      start
    stopped, with the configuration of the grid          resume, even if lines after its last checkpoint are damaged
    finished, with the configuration of the grid         finished
    files that contradict each other                     damaged: left alone, unless asked to retry
    another configuration                                an error: somebody changed the grid after its runs were made

Threads, and a device or dtype that the grid leaves to `auto`, depend on the machine and do not count as differences.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from bapo.compare.grid import Cell, Grid
from bapo.config.errors import ConfigError
from bapo.config.placement import available_cores
from bapo.runs import files
from bapo.runs.read import Defect, read_run
from bapo.runs.write import unused

GPU_PARALLEL = 4
"""Runs at a time on one GPU. A small model leaves most of it idle, and each run needs a few GiB of its memory."""


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
        total = self.cell.config.steps
        match self.state:
            case State.WAITING:
                return "will start" if self.action == "train" else f"will resume at step {self.step} of {total}"
            case State.RUNNING:
                return f"step {self.step} of {total}" if self.step else "starting"
            case State.FINISHED:
                return "finished"
            case State.STOPPED:
                return f"stopped at step {self.step} of {total}"
        return f"{self.state}: {self.note}"


def make_plan(grid: Grid) -> list[Job]:
    """A job per cell; a ConfigError if there are runs with another configuration than the grid's."""
    jobs, changed = [], []
    for cell in grid.cells:
        job, different = _examine(cell)
        jobs.append(job)
        changed += [f"  {cell.name}: {line}" for line in different]
    if changed:
        raise ConfigError(
            f"some runs in {grid.out} were made with another configuration, so nothing was started.\n"
            + "\n".join(changed)
            + "\nPut the keys back, or give the changed grid another `out`."
        )
    return jobs


def default_parallel(cells: Sequence[Cell]) -> int:
    """Runs at a time: one per core, or GPU_PARALLEL on a GPU; never more than there are."""
    cores = available_cores()
    on_gpu = all(cell.config.device != "cpu" for cell in cells) and (
        any(cell.config.device == "cuda" for cell in cells) or gpu_present()
    )
    own = max(cell.config.threads for cell in cells)
    return max(1, min(GPU_PARALLEL if on_gpu else cores // max(1, own), len(cells)))


def threads_for(cells: Sequence[Cell], parallel: int) -> int:
    """CPU threads of each run: an equal share of the cores."""
    return max(1, available_cores() // min(parallel, len(cells)))


def gpu_present() -> bool:
    """Whether this process can see an NVIDIA GPU. It does not import torch, so it only sets a default."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def set_aside(path: Path) -> Path:
    """Move a damaged directory out of the way, under a name that `bapo.runs.read.is_set_aside` knows."""
    number = 1
    while (place := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(place)


def clear_unused(path: Path) -> None:
    """Remove the directory of a run that never reached its first checkpoint, if there is one."""
    if path.exists() and unused(path):
        shutil.rmtree(path)


def _examine(cell: Cell) -> tuple[Job, list[str]]:
    """The job for a cell, and how the configuration in its directory differs from the grid's."""
    path = cell.path
    out = path.parents[2]
    files.check_kinds(out, files=(), folders=[str(p.relative_to(out)) for p in (path.parents[1], path.parent, path)])
    if not path.exists() or unused(path):
        return Job(cell, State.WAITING), []
    run = read_run(path, finished=False)
    if isinstance(run, Defect) and (sizes := _remembered(path)):
        run = read_run(path, finished=False, sizes=sizes)  # resuming cuts off what comes after them
    if isinstance(run, Defect):
        return Job(cell, State.DAMAGED, note=run.message), []
    objective = cell.config.objective.for_passes(cell.config.offpolicy.reuse)
    wanted = cell.config.model_copy(update={"objective": objective})
    different = list(_differences(wanted.model_dump(mode="json"), run.config))
    if run.summary:
        return Job(cell, State.FINISHED, before=cell.config.steps, step=cell.config.steps), different
    if not any((path / "checkpoints").glob("step-??????")):
        return Job(cell, State.DAMAGED, note="it has logs but no checkpoint to resume from."), different
    step = len(run.timing)
    return Job(cell, State.WAITING, action="resume", before=step, step=step), different


def _remembered(path: Path) -> dict[str, int]:
    """Sizes of an unfinished run's logs at its newest checkpoint; empty if no checkpoint records them."""
    if (path / "summary.json").exists():
        return {}
    try:
        logs = files.read_object(files.checkpoints(path / "checkpoints")[-1] / "state.json")["logs"]
        return {name: int(size) for name, size in logs.items()}
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
        return {}


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in wanted.items():
        name, other = f"{prefix}{key}", found.get(key)
        if name == "eval.problems" and value is None:
            continue  # the run's data decided it
        if isinstance(value, Mapping) and isinstance(other, Mapping) and name != "objective.options":
            yield from _differences(value, other, f"{name}.")
        elif value != other and name != "out" and not (name == "threads" and value == 0) and value != "auto":
            yield f"{name} is {other!r} in the run and {value!r} in the grid"
