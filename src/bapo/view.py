"""What a person sees while training: one screen on a terminal, one line per step anywhere else.

    with make_view(60, title="bapo · countdown") as view:
        view.step(1, {"reward": 0.41, "entropy": 0.49}, {"seconds": 1.2, "tokens_per_second": 5100.0})
        view.sample("3,7,2=13:", "7+3*2=13.", 1.0)
        view.note("checkpoint saved")

A view shows and never decides: it keeps nothing that the metrics log does not have, takes whatever metrics there are,
and no text a model writes can break it (markup, control characters, letters the stream cannot spell). The live view is
redrawn four times a second by a thread of rich's own, from state that a lock guards; nobody waits for it. Notes scroll
away above it and stay in the terminal's history.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["View", "eta", "make_view", "sparkline", "summary_table"]


class _Shown(NamedTuple):
    label: str
    decimals: int


SHOWN = {
    "reward": _Shown("reward", 3),
    "eval/avg": _Shown("eval", 3),
    "entropy": _Shown("entropy", 3),
    "share": _Shown("share", 3),
    "clip_low": _Shown("low", 2),
    "clip_high": _Shown("high", 2),
    "clip_fraction_positive": _Shown("clipped+", 3),
    "clip_fraction_negative": _Shown("clipped-", 3),
    "staleness_mean": _Shown("stale", 1),
    "staleness_max": _Shown("stalest", 0),
    "length": _Shown("length", 1),
    "grad_norm": _Shown("grad", 3),
    "tokens_per_second": _Shown("tok/s", 0),
    "seconds": _Shown("seconds", 2),
}
"""Metrics and timings on show, in this order; others are left to the log."""

LINE_SECONDS = 2.0
"""Least time between two lines of the plain view; notes, the first and the last step are always printed."""
SAMPLE_SECONDS = 20.0
"""The same between two of its samples."""
RECENT_STEPS = 20
"""Steps whose mean duration the ETA goes by."""
SPARK_WIDTH = 17
_LEVELS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """A context manager that is told what happens."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last state and let go of the terminal, however training ended."""
        ...

    def step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        """Once per training step, counted from 1."""
        ...

    def sample(self, problem: str, response: str, reward: float) -> None:
        """A response to look at, now and then."""
        ...

    def note(self, text: str) -> None:
        """An evaluation, a checkpoint, a warning."""
        ...


def make_view(
    total_steps: int,
    *,
    title: str,
    stream: TextIO | None = None,
    plain: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """A live view if the stream (standard output) is a terminal that can show one, otherwise plain lines."""
    stream = sys.stdout if stream is None else stream
    if _is_plain(stream, plain):
        return _PlainView(total_steps, title=title, stream=stream, clock=clock)
    return _LiveView(total_steps, title=title, console=_console(stream), clock=clock)


def summary_table(
    title: str,
    rows: Sequence[tuple[str, str, str]],
    *,
    columns: tuple[str, str, str] = ("", "before", "after"),
    stream: TextIO | None = None,
    plain: bool | None = None,
) -> None:
    """Print a small table of (name, before, after), for the end of a run."""
    stream = sys.stdout if stream is None else stream
    lines = [tuple(_printable(cell, newline=" ") for cell in row) for row in (columns, *rows)]
    if _is_plain(stream, plain):
        name, before, after = (max(len(line[column]) for line in lines) for column in range(3))
        _write(stream, _printable(title))
        for line in lines:
            _write(stream, f"  {line[0]:<{name}}  {line[1]:>{before}}  {line[2]:>{after}}".rstrip())
        return
    table = Table(box=box.ROUNDED, title=Text(_printable(title), "bold"), title_justify="left", border_style="dim")
    for index, heading in enumerate(lines[0]):
        table.add_column(Text(heading), justify="right" if index else "left", style=("", "", "bold green")[index])
    for line in lines[1:]:
        table.add_row(*map(Text, line))
    _console(stream).print(table)


class _History:
    """What both views remember: every value shown so far, and how long the recent steps took."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.values: dict[str, list[float]] = {}
        self.now: dict[str, float] = {}
        self.seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        given = {**metrics, **timing}
        self.step = step
        self.now = {key: float(given[key]) for key in SHOWN if key in given}
        for key, value in self.now.items():
            self.values.setdefault(key, []).append(value)
        if isfinite(self.now.get("seconds", float("nan"))):
            self.seconds.append(self.now["seconds"])

    def eta(self) -> str:
        return eta(self.total_steps - self.step, self.seconds)


class _PlainView:
    def __init__(self, total_steps: int, *, title: str, stream: TextIO, clock: Callable[[], float]) -> None:
        self._history = _History(total_steps)
        self._title, self._stream, self._clock = title, stream, clock
        self._line_at = self._sample_at = float("-inf")
        self._waiting = False

    def __enter__(self) -> Self:
        _write(self._stream, _printable(self._title))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waiting:
            self._print_step()

    def step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        self._history.add(step, metrics, timing)
        self._waiting = True
        if step >= self._history.total_steps or self._clock() - self._line_at >= LINE_SECONDS:
            self._print_step()

    def sample(self, problem: str, response: str, reward: float) -> None:
        if self._clock() - self._sample_at >= SAMPLE_SECONDS:
            self._sample_at = self._clock()
            parts = (_shorten(_printable(text, newline="\\n"), 300) for text in (problem, response))
            _write(self._stream, f"  sample  reward {_number(reward, 2)}  {'  ->  '.join(parts)}")

    def note(self, text: str) -> None:
        _write(self._stream, _printable(text))

    def _print_step(self) -> None:
        self._line_at, self._waiting = self._clock(), False
        history = self._history
        total = str(history.total_steps)
        cells = [f"step {history.step:>{len(total)}}/{total}"]
        cells += [f"{SHOWN[key].label} {_number(value, SHOWN[key].decimals):<5}" for key, value in history.now.items()]
        if history.eta():
            cells.append(f"eta {history.eta()}")
        _write(self._stream, "  ".join(cells).rstrip())


class _LiveView:
    def __init__(self, total_steps: int, *, title: str, console: Console, clock: Callable[[], float]) -> None:
        self._history = _History(total_steps)
        self._title, self._console = _printable(title, newline=" "), console
        self._sample: tuple[str, str, float] | None = None
        self._lock = Lock()
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", style="bold"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[eta]}", style="cyan"),
            TimeElapsedColumn(),
            console=console,
            get_time=clock,
            expand=True,
        )
        self._task = self._progress.add_task("", total=total_steps, eta="")
        self._live = Live(console=console, get_renderable=self._frame, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def step(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        with self._lock:
            self._history.add(step, metrics, timing)
            left = self._history.eta()
        self._progress.update(self._task, completed=step, eta=f"eta {left}" if left else "")

    def sample(self, problem: str, response: str, reward: float) -> None:
        with self._lock:
            self._sample = (_printable(problem), _printable(response), float(reward))

    def note(self, text: str) -> None:
        self._console.print(Text(_printable(text)))

    def _frame(self) -> RenderableType:
        """One screen, of a height that changes only when a new metric appears."""
        with self._lock:
            values = {key: list(self._history.values[key]) for key in SHOWN if key in self._history.values}
            sample = self._sample
        width, height = self._console.size
        table, rows = _metrics_table(values, columns=2 if width >= 76 else 1, sparks=width >= 40)
        top = Panel(
            Group(self._progress, table), title=Text(self._title, "bold"), title_align="left", border_style="cyan"
        )
        lines = min(8, height - rows - 6)  # borders of two panels, the bar, and the line below
        return Group(top, _sample_panel(sample, self._console, lines)) if lines > 0 else top


def _metrics_table(values: Mapping[str, Sequence[float]], *, columns: int, sparks: bool) -> tuple[Table, int]:
    """Name, value and history of each metric, running down one column and then the next; and its number of rows."""
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=7)
        table.add_column(style="cyan", no_wrap=True, ratio=1)
    cells = []
    for key, history in values.items():
        style = "bold" if isfinite(history[-1]) else "bold red"
        number = Text(_number(history[-1], SHOWN[key].decimals), style)
        cells.append((Text(SHOWN[key].label), number, Text(sparkline(history, SPARK_WIDTH) if sparks else "")))
    rows = -(-len(cells) // columns)
    for row in range(rows):
        table.add_row(*(cell for three in cells[row::rows] for cell in three))
    return table, rows


def _sample_panel(sample: tuple[str, str, float] | None, console: Console, lines: int) -> Panel:
    if sample is None:
        return Panel(
            Text("no response yet", "dim"), title="sample", title_align="left", border_style="dim", height=lines + 2
        )
    problem, response, reward = sample
    width = max(1, console.width - 4)
    asked = _fit(Text(problem, "dim"), console, width, max(1, lines // 3))
    answered = _fit(Text(response), console, width, max(1, lines - len(asked)))
    solved = reward > 0.5
    title = Text.assemble("sample · reward ", (_number(reward, 2), "bold green" if solved else "bold yellow"))
    body = Text("\n").join([*asked, *answered])
    return Panel(body, title=title, title_align="left", border_style="green" if solved else "yellow", height=lines + 2)


def _fit(text: Text, console: Console, width: int, lines: int) -> list[Text]:
    """At most this many lines: the beginning and the end, for the end holds the answer."""
    wrapped = list(text.wrap(console, width, overflow="fold"))
    if len(wrapped) <= lines:
        return wrapped
    head = (lines - 1) // 2
    tail = lines - 1 - head
    return [*wrapped[:head], Text("…", "dim"), *(wrapped[-tail:] if tail else [])]


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole history in at most `width` bars, each the mean of its stretch, from lowest to highest; × if not finite."""
    count = min(width, len(values))
    stretches = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    means = [fmean(finite) if (finite := [v for v in part if isfinite(v)]) else None for part in stretches]
    known = [mean for mean in means if mean is not None]
    low, span = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
    top = len(_LEVELS) - 1
    return "".join(
        "×" if mean is None else _LEVELS[round((mean - low) / span * top) if span > 0 else top // 2] for mean in means
    )


def eta(steps_left: int, recent_seconds: Sequence[float] | deque[float]) -> str:
    """Steps left times the mean of the recent durations, as m:ss or h:mm:ss; empty if there are none."""
    if not recent_seconds:
        return ""
    minutes, seconds = divmod(round(max(0, steps_left) * fmean(recent_seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _number(value: float, decimals: int) -> str:
    """Fixed decimals; an exponent where they would show nothing or too much; nan and inf as they are."""
    if not isfinite(value):
        return str(float(value))
    if value != 0 and not 10.0**-decimals <= abs(value) < 1e6:
        return f"{value:.0e}" if decimals else f"{value:.1f}"
    return f"{value:.{decimals}f}"


def _printable(text: str, *, newline: str = "\n") -> str:
    """The text with nothing left in it that could move the cursor: controls and lone surrogates become dots."""
    lines = text.expandtabs(4).splitlines()
    return newline.join("".join(letter if letter.isprintable() else "·" for letter in line) for line in lines)


def _shorten(text: str, length: int) -> str:
    """The beginning and the end, if it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length // 3]} ... {text[-(length - length // 3) :]}"


def _write(stream: TextIO, line: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(line.encode(encoding, errors="replace").decode(encoding) + "\n")
    stream.flush()


def _is_plain(stream: TextIO, plain: bool | None) -> bool:
    if plain is not None:
        return plain
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    return not (stream.isatty() and encoding.startswith("utf") and os.environ.get("TERM") not in ("dumb", "unknown"))


def _console(stream: TextIO) -> Console:
    return Console(file=stream, force_terminal=True, highlight=False)
