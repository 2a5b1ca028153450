"""What a person sees while a grid runs: a table on a terminal, a line per event anywhere else.

The time left is estimated from all runs together:

    eta = updates left · seconds since the start / updates done since the start

This accounts for how many runs share the machine. The seconds include start-up and evaluations, so the estimate is a
little too long at first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bapo.compare.grid import Grid, Job, State
from bapo.config.numerals import counted
from bapo.runs.read import tail
from bapo.screen.terminal import can_redraw, duration, eta, make_console, printable, write_line

LINE_SECONDS = 30.0
"""Time between two lines of plain progress. Changes of state are always printed."""
READ_SECONDS = 1.0
"""Time between two looks at the metrics of running runs."""
SHOWN = {"entropy": "entropy", "share": "share", "grad_norm": "grad norm"}
"""Metrics of a running run's newest update that are shown, with their labels."""
STYLES = {
    State.WAITING: "dim",
    State.RUNNING: "bold cyan",
    State.FINISHED: "green",
    State.STOPPED: "yellow",
    State.FAILED: "bold red",
    State.DAMAGED: "bold red",
}


def make_progress(grid: Grid, jobs: Sequence[Job], parallel: int, stream: TextIO) -> PlainProgress:
    """A table that is redrawn in place if the stream is a terminal, otherwise lines."""
    return (LiveProgress if can_redraw(stream) else PlainProgress)(grid, jobs, parallel, stream)


@dataclass
class PlainProgress:
    """Lines for a log file or a pipe."""

    grid: Grid
    jobs: Sequence[Job]
    parallel: int
    stream: TextIO
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        together = min(self.parallel, len(self.jobs))
        self.title = f"{self.grid.name}: {counted(len(self.jobs), 'run')}, {together} at a time, in {self.grid.out}"
        self.began = self.said = self.clock()

    def __enter__(self) -> Self:
        self.note(self.title)
        self.note(self.counts())
        return self

    def __exit__(self, *_: object) -> None:
        return

    def changed(self, job: Job) -> None:
        """The state of a job has changed."""
        self.note(f"{job.cell.name}: {job.describe()}  ({self.counts()})")

    def look(self) -> None:
        """Called several times a second."""
        if self.clock() - self.said >= LINE_SECONDS:
            running = [f"{job.cell.name} {job.step}/{job.cell.config.steps}" for job in self.of(State.RUNNING)]
            self.note("  ".join([self.counts(), *running, self.remaining()]))

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.said = self.clock()
        write_line(self.stream, text)

    def of(self, *states: State) -> list[Job]:
        """The jobs in these states."""
        return [job for job in self.jobs if job.state in states]

    def counts(self) -> str:
        """`3 of 8 finished, 2 running, 3 waiting`."""
        count = Counter(job.state for job in self.jobs)
        others = [f"{count[state]} {state}" for state in State if state is not State.FINISHED and count[state]]
        return ", ".join([f"{count[State.FINISHED]} of {len(self.jobs)} finished", *others])

    def share_done(self) -> float:
        """Share of the updates of all runs that are done."""
        total = sum(job.cell.config.steps * job.cell.config.updates_per_step for job in self.jobs)
        return sum(job.step * job.cell.config.updates_per_step for job in self.jobs) / total

    def remaining(self) -> str:
        """`eta 4:10`; empty until an update is done."""
        open_jobs = self.of(State.WAITING, State.RUNNING)
        left = sum((job.cell.config.steps - job.step) * job.cell.config.updates_per_step for job in open_jobs)
        done = sum((job.step - job.before) * job.cell.config.updates_per_step for job in self.jobs)
        return eta(left, done, self.clock() - self.began)


class LiveProgress(PlainProgress):
    """A table that is redrawn in place. If not all runs fit, it shows those that are running, failed or damaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.console = make_console(self.stream)
        self.live = Live(console=self.console, auto_refresh=False)
        self.read_at = float("-inf")
        self.numbers: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.update(self.frame(), refresh=True)
        self.live.stop()

    def changed(self, job: Job) -> None:
        """The state of a job has changed."""
        if job.state in (State.FAILED, State.DAMAGED):
            self.note(f"{job.cell.name}: {job.describe()}")

    def look(self) -> None:
        """Called several times a second."""
        if self.clock() - self.read_at >= READ_SECONDS:
            self.read_at = self.clock()
            for job in self.of(State.RUNNING):
                line = tail(job.cell.path / "metrics.jsonl")
                known = self.numbers.setdefault(job.cell.name, {})
                known |= {key: line[key] for key in SHOWN if isinstance(line.get(key), int | float)}
            self.live.update(self.frame(), refresh=True)

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.console.print(Text(printable(text)))

    def frame(self) -> RenderableType:
        """What the screen shows now."""
        room = self.console.height - 6
        shown: Sequence[Job] = self.jobs
        if len(shown) > room:
            shown = [*self.of(State.RUNNING), *self.of(State.FAILED, State.DAMAGED)][: max(1, room)]
        table = Table.grid(padding=(0, 2))
        for heading in ("run", "state", "", *SHOWN.values()):
            table.add_column(Text(heading, "dim"), justify="left", no_wrap=True)
        for job in shown:
            steps = job.cell.config.steps
            numbers = self.numbers.get(job.cell.name, {}) if job.state is State.RUNNING else {}
            table.add_row(
                Text(job.cell.name),
                Text(str(job.state), STYLES[job.state]),
                Text(f"{job.step}/{steps}" if job.step else "", "dim"),
                *(Text(f"{label} {numbers[key]:.3f}" if key in numbers else "") for key, label in SHOWN.items()),
            )
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=1.0, completed=self.share_done()))
        elapsed = duration(self.clock() - self.began)
        status = "   ".join(part for part in (self.counts(), elapsed, self.remaining()) if part)
        return Group(Text(self.title, "bold"), table, bar, Text(status))
