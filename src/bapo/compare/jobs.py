"""The runs of a grid as jobs: which are done, which can start or continue, and several of them at a time.

A job is examined first:

    nothing, or a run without a complete checkpoint      start
    stopped, with the configuration of the grid          resume, which finds out whether its files are whole
    finished, with the configuration of the grid         finished
    files that contradict each other                     damaged: left alone
    another configuration                                an error: somebody changed the grid after its runs were made

Threads, and a device or dtype that the grid leaves to `auto`, depend on the machine and do not count as differences.

Each job then has a process of its own, so that none can stop the others: `bapo train` or `bapo resume` in its own
session, with its output in a file beside its directory. Five times a second the loop here checks which runs have ended,
starts those that may start, and passes on what the user asked for. Ctrl-C reaches only this process. The first one asks
every run to stop after its current step, which saves it. The second one asks again, which stops the run at once. The
third one kills it. Waiting runs are no longer started.

The runs share the lock on the grid's directory. While any of them lives, even after this process was killed, no second
comparison can touch it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo.compare.grid import Cell, Grid, Job, State
from bapo.compare.progress import GridView
from bapo.config.errors import OUT_OF_MEMORY, ConfigError
from bapo.config.placement import available_cores
from bapo.config.words import flat
from bapo.process import environment, stops
from bapo.runs import files
from bapo.runs.read import Defect, Run, last_step, read_run
from bapo.runs.write import unused

GPU_PARALLEL = 4
"""Runs at a time on one GPU. A small model leaves most of it idle, and each run needs a few GiB of its memory."""
LEFT_OPEN = (("threads", 0), ("eval.problems", None), ("learn.micro_tokens", None))
"""Keys of a grid that every run decides for itself."""
POLL_SECONDS = 0.2
TAIL_LINES = 4
"""How many last lines of a failed run's output are shown."""
DAMAGED_CHECKPOINT = 3
"""Exit code of `bapo resume` for a checkpoint that it cannot continue from, and where memory ran out."""


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


def _examine(cell: Cell) -> tuple[Job, list[str]]:
    """The job for a cell, and how the configuration in its directory differs from the grid's."""
    path = cell.path
    out = path.parents[2]
    files.check_kinds(out, files=(), folders=[str(p.relative_to(out)) for p in (path.parents[1], path.parent, path)])
    if not path.exists() or unused(path):
        return Job(cell, State.WAITING), []
    found = read_run(path)
    different = list(_differences(cell.values, dict(flat(found.config)))) if found.config else []
    if isinstance(found, Run):
        return Job(cell, State.FINISHED, before=cell.config.steps, step=cell.config.steps), different
    if found.kind != "unfinished":
        return Job(cell, State.DAMAGED, note=found.message), different
    if not files.checkpoints(path / "checkpoints"):
        return Job(cell, State.DAMAGED, note="it has logs but no checkpoint to resume from."), different
    step = last_step(path)
    return Job(cell, State.WAITING, action="resume", before=step, step=step), different


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    ignored = ("out",) if wanted["objective.name"] == "bapo" else ("out", "objective.preset")  # it means nothing there
    for key in dict.fromkeys((*wanted, *found)):
        value, other = wanted.get(key), found.get(key)
        left_open = value == "auto" or (key, value) in LEFT_OPEN
        if value != other and key not in ignored and not left_open:
            yield f"{key} is {other!r} in the run and {value!r} in the grid"


def default_parallel(cells: Sequence[Cell]) -> int:
    """Runs at a time: one per core, or GPU_PARALLEL on a GPU; never more than there are."""
    devices, own = {cell.config.device for cell in cells}, max(cell.config.threads for cell in cells)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    seen = not hidden and any(Path("/dev").glob("nvidia[0-9]*"))  # without torch: it only sets a default
    on_gpu = "cpu" not in devices and ("cuda" in devices or seen)
    return max(1, min(GPU_PARALLEL if on_gpu else available_cores() // max(1, own), len(cells)))


def threads_for(cells: Sequence[Cell], parallel: int) -> int:
    """CPU threads of each run: an equal share of the cores."""
    return max(1, available_cores() // min(parallel, len(cells)))


@dataclass
class _Process:
    job: Job
    handle: subprocess.Popen[bytes]
    began: float
    log_began: int  # bytes in the log before this process wrote to it


def execute(
    jobs: Sequence[Job],
    *,
    log: Path,  # a line per run that ended
    lock: int,
    parallel: int,
    threads: int,
    progress: GridView,
) -> bool:
    """Run every waiting job to its end. Returns whether the user stopped it."""
    with _asked_to_stop() as asked, _children() as running:
        told = 0
        while True:
            waiting = [job for job in jobs if job.state is State.WAITING] if not asked else []
            for job in waiting[: max(0, parallel - len(running))]:
                if process := _start(job, lock, threads):
                    running.append(process)
                progress.changed(job)
            if told < len(asked):
                told += 1
                progress.note(_tell(running, told))
            for process in [process for process in running if process.handle.poll() is not None]:
                running.remove(process)
                _settle(process, stopping=bool(asked))
                _record(log, process)
                progress.changed(process.job)
            for process in running:
                process.job.step = last_step(process.job.cell.path)
            progress.look()
            if not running and (asked or all(job.state is not State.WAITING for job in jobs)):
                return bool(asked)
            time.sleep(POLL_SECONDS)


def _start(job: Job, lock: int, threads: int) -> _Process | None:
    """Start the job's process and set its state; None if it could not be started."""
    path = job.cell.path
    try:
        for below in (path.parent.parent, path.parent):
            files.folder(below)
        if path.exists() and unused(path):  # a run that never reached its first checkpoint
            shutil.rmtree(path)
        config = job.cell.config.model_copy(update={"threads": job.cell.config.threads or threads})
        target = path
        if job.action == "train":
            files.write(job.recipe, json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
            target = job.recipe
        command = [sys.executable, "-P", "-m", "bapo.cli", job.action, str(target)]
        with files.appended(job.log) as log:
            log_began = log.tell()
            handle = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment() | {"OMP_NUM_THREADS": str(config.threads)},
                start_new_session=True,
                pass_fds=(lock,),
            )
    except OSError as error:
        job.state, job.note = State.FAILED, f"could not be started: {error}"
        return None
    job.state = State.RUNNING
    return _Process(job, handle, time.monotonic(), log_began)


def _settle(process: _Process, *, stopping: bool) -> None:
    """Set the state of a job whose process has ended: from its directory first, then from the exit code."""
    job, code = process.job, process.handle.returncode
    found = read_run(job.cell.path)
    job.step = last_step(job.cell.path)
    if not isinstance(found, Defect):
        job.state = State.FINISHED
    elif code in (130, -signal.SIGINT, -signal.SIGTERM) or (stopping and code < 0):
        job.state = State.STOPPED
    elif found.kind == "damaged" or (code == DAMAGED_CHECKPOINT and f"bapo: {OUT_OF_MEMORY}" not in _tail(process)):
        job.state, job.note = State.DAMAGED, found.message if found.kind == "damaged" else _tail(process)
    else:
        job.state, job.note = State.FAILED, f"exit code {code}, {job.log}\n{_tail(process)}"


def _tail(process: _Process) -> str:
    """The last lines that a process wrote."""
    try:
        written = files.read(process.job.log)[process.log_began :]
    except OSError as error:
        return f"(its output cannot be read: {error})"
    lines = [line for line in written.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(f"    {line[:400]}" for line in lines[-TAIL_LINES:]) or "    (no output)"


def _tell(running: Sequence[_Process], times: int) -> str:
    """Ask the runs to stop, more firmly each time; returns what to tell the user."""
    for process in running:
        process.handle.kill() if times > 2 else process.handle.terminate()
    if times > 1:
        return "stopping at once; press Ctrl-C again to kill" if times == 2 else "killed"
    runs = "the run" if len(running) == 1 else f"{len(running)} runs"
    return f"stopping {runs} after the current step; press Ctrl-C again to stop at once"


def _record(log: Path, process: _Process) -> None:
    job, seconds = process.job, round(time.monotonic() - process.began, 1)
    line: dict[str, Any] = {"run": job.cell.name, "state": str(job.state), "code": process.handle.returncode}
    line |= {"seconds": seconds, "steps": job.step, "note": job.note}
    with files.appended(log) as file:
        file.write((json.dumps(line) + "\n").encode())


@contextmanager
def _children() -> Iterator[list[_Process]]:
    """The running processes. If this process fails, it asks them to stop and waits for them."""
    running: list[_Process] = []
    try:
        yield running
    finally:
        for process in running:
            process.handle.terminate()
        for process in running:
            process.handle.wait()


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Collects the signals that ask this process to stop."""
    asked: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:  # under nohup it is ignored, which is what the user wants
        signal.signal(signal.SIGHUP, lambda received, _frame: asked.append(received))
    try:
        with stops.listening(asked.append, patient=True):
            yield asked
    finally:
        signal.signal(signal.SIGHUP, before)
