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
from typing import Self, TextIO

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bapo.compare.grid import Grid, Job, State
from bapo.config.numerals import counted
from bapo.screen.steady import SteadyLive
from bapo.screen.terminal import can_redraw, duration, eta, make_console, printable, write_line

LINE_SECONDS = 30.0
"""Time between two lines of plain progress. Changes of state are always printed."""
STYLES = {
    State.WAITING: "dim",
    State.RUNNING: "bold cyan",
    State.FINISHED: "green",
    State.STOPPED: "yellow",
    State.FAILED: "bold red",
    State.DAMAGED: "bold red",
}


class GridView:
    """A table that is redrawn in place if the stream is a terminal, otherwise lines."""

    def __init__(
        self,
        grid: Grid,
        jobs: Sequence[Job],
        parallel: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jobs, self.stream, self.clock = jobs, stream, clock
        self.title = f"{grid.name}: {counted(len(jobs), 'run')}, {min(parallel, len(jobs))} at a time, in {grid.out}"
        self.began = self.told = clock()
        self.console = make_console(stream)
        self.live = SteadyLive(self.console, self.frame) if can_redraw(stream) else None

    def __enter__(self) -> Self:
        if self.live is None:
            self.note(f"{self.title}\n{self.counts()}")
        else:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def changed(self, job: Job) -> None:
        """The state of a job has changed. The table shows it, but not why a run failed."""
        if self.live is None or job.state in (State.FAILED, State.DAMAGED):
            self.note(f"{job.cell.name}: {job.describe()}  ({self.counts()})")

    def look(self) -> None:
        """Called several times a second."""
        if self.live is None and self.clock() - self.told >= LINE_SECONDS:
            steps = [f"{job.cell.name} {job.step}/{job.cell.config.steps}" for job in self.of(State.RUNNING)]
            self.note("  ".join([self.counts(), *steps, self.remaining()]))

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.told = self.clock()
        if self.live is None:
            write_line(self.stream, text)
        else:
            self.console.print(Text(printable(text)))

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

    def frame(self) -> RenderableType:
        """What the screen shows now."""
        room = self.console.height - 6
        shown: Sequence[Job] = self.jobs
        if len(shown) > room:
            shown = [*self.of(State.RUNNING), *self.of(State.FAILED, State.DAMAGED)][: max(1, room)]
        table = Table.grid(padding=(0, 2))
        for job in shown:
            step = f"{job.step}/{job.cell.config.steps}" if job.step else ""
            table.add_row(Text(job.cell.name), Text(str(job.state), STYLES[job.state]), Text(step, "dim"))
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=1.0, completed=self.share_done()))
        elapsed = duration(self.clock() - self.began)
        status = "   ".join(part for part in (self.counts(), elapsed, self.remaining()) if part)
        return Group(Text(self.title, "bold"), table, bar, Text(status))
