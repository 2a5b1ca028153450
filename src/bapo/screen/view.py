"""What a person sees while training: one screen on a terminal, one line per step anywhere else.

    with make_view(60, title="bapo · countdown") as view:
        view.step(1, {"reward": 0.41, "entropy": 0.49}, {"seconds": 1.2, "tokens_per_second": 5100.0})
        view.sample("3,7,2=13:", "7+3*2=13.", 1.0)
        view.note("checkpoint saved")
        with view.doing("sampling") as watch:
            watch(Sampled(responses=412, asked=2048, tokens=96_400))

A view shows things and decides nothing. It keeps only what the metrics log has, accepts whatever metrics there are, and
no text that a model writes can break it (markup, control characters, letters that the stream cannot encode). A thread
of rich redraws the live view four times a second, from state that a lock guards; training never waits for it. Notes
scroll away above the view and stay in the terminal's history.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from math import isclose, isfinite, nan
from statistics import fmean
from threading import RLock, Thread
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bapo.screen.steady import SteadyLive, unechoed
from bapo.screen.terminal import aligned, can_redraw, eta, make_console, printable, say, write_line
from bapo.screen.watch import ActorLine, OnScreen, Tell, in_lines

SHOWN = {
    "imitation/loss": ("loss", 3),
    "reward": ("reward", 3),
    "reward_failures": ("failed", 0),
    "eval/avg": ("eval", 3),
    "entropy": ("entropy", 3),
    "length": ("length", 1),
    "truncated": ("cut", 3),
    "turns": ("turns", 1),
    "endings/answered": ("ended", 0),
    "endings/turns": ("turn limit", 0),
    "endings/context": ("token limit", 0),
    "endings/environment_failed": ("env failed", 0),
    "endings/grader_failed": ("grader failed", 0),
    "grad_norm": ("grad", 3),
    "tokens_per_second": ("tok/s", 0),
    "seconds": ("seconds", 2),
    "share": ("share", 3),
    "clip_low": ("low", 2),
    "clip_high": ("high", 2),
    "used_low": ("used", 2),
    "clip_fraction_positive": ("clipped+", 3),
    "clip_fraction_negative": ("clipped-", 3),
    "staleness_mean": ("stale", 1),
    "staleness_max": ("stalest", 0),
}
"""Metrics and timings that are shown, in this order, with label and decimals. The log has the others."""
IF_ANY = {"reward_failures", *(key for key in SHOWN if key.startswith("endings/") and key != "endings/answered")}
"""Those that are shown only where they are not 0."""
MEANINGS = {
    ("truncated",): "share of responses cut off at rollout.max_tokens",
    ("endings/answered",): "episodes that their environment ended",
    ("reward_failures",): "responses without a reward",
    ("share",): "positive part of the signal",
    ("clip_low", "clip_high"): "bounds of the clip",
    ("used_low",): "lower bound of tokens trained on before",
    ("clip_fraction_positive", "clip_fraction_negative"): "clipped share of positive and negative tokens",
    ("staleness_mean", "staleness_max"): "mean and largest age of tokens, in updates",
}
"""What labels mean that do not say it themselves."""
LINE_SECONDS = 2.0
"""Least time between two lines of the plain view. Notes and the first and last step are always printed."""
ACTOR_SECONDS = 30.0
"""Least time between two reports of the actors in the plain view."""
SAMPLE_SECONDS = 20.0
"""Least time between two samples in the plain view."""
SAMPLE_LINES = 8
"""Lines of the sample in the live view, if there is room."""
RECENT_STEPS = 20
"""The ETA uses the mean duration of this many recent steps."""
_LEVELS = "▁▂▃▄▅▆▇█"


def _labels(known: Collection[str]) -> dict[str, tuple[str, int]]:
    """Those of these metrics that are shown, with label and decimals. Each of several rewards follows their sum."""
    names = {key: key.removeprefix("reward/") for key in known if key.startswith("reward/")}
    named = {key: (name, 3) for key, name in names.items() if name.replace(".", "").isidentifier()}
    found = {key: SHOWN[key] for key in SHOWN if key in known}
    return {"reward": SHOWN["reward"]} | named | found if named else found


def legend(shown: Collection[str]) -> str:
    """`low, high: bounds of the clip; …` for those of these metrics whose labels need it."""
    labels = {meaning: [SHOWN[key][0] for key in keys if key in shown] for keys, meaning in MEANINGS.items()}
    return "; ".join(f"{', '.join(some)}: {meaning}" for meaning, some in labels.items() if some)


def make_view(
    total_steps: int,
    *,
    title: str,
    samples: bool = True,
    stream: TextIO | None = None,
    plain: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> View:
    """A live view if the stream (standard output) is a terminal that can show one, otherwise plain lines.

    `samples`: whether the live view keeps room for responses.
    """
    stream = stream or sys.stdout
    if plain or (plain is None and not can_redraw(stream)):
        return PlainView(total_steps, title=title, stream=stream, clock=clock)
    return LiveView(total_steps, title=title, console=make_console(stream), clock=clock, samples=samples)


def summary_table(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print a small table of (name, before, after), for the end of a run."""
    say("\n".join([title, *(f"  {row}" for row in aligned([("", "before", "after"), *rows]))]))


class View:
    """A context manager that is told what happens. This base class remembers the numbers and shows nothing."""

    def __init__(self, total_steps: int, *, title: str, clock: Callable[[], float]) -> None:
        self.total_steps, self.title, self.clock = total_steps, printable(title, newline=" "), clock
        self.current = 0
        self.now: dict[str, float] = {}
        self.history: dict[str, list[float]] = {}
        self.seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.lock = RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def step(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Called once per training step, counted from 1."""
        given = {**metrics, **timing}
        with self.lock:
            self.current = step
            self.now = {key: float(given[key]) for key in _labels(given)}
            self.now = {key: value for key, value in self.now.items() if value or key not in IF_ANY}
            if "used_low" in self.now and self.now["used_low"] <= self.now.get("clip_low", 0.0):
                del self.now["used_low"]
            for key, value in self.now.items():
                self.history.setdefault(key, []).append(value)
            if isfinite(self.now.get("seconds", nan)):
                self.seconds.append(self.now["seconds"])

    def begin_after(self, step: int) -> None:
        """Count from this step on: a run is resumed there, and may need a while until it goes on."""
        self.current = step

    def recall(self, steps: Iterable[tuple[int, Mapping[str, float], Mapping[str, float]]]) -> None:
        """Take up the numbers of earlier steps, so that the curves of a resumed run continue. Nothing is shown."""
        for step, metrics, timing in steps:
            View.step(self, step, metrics, timing)

    def sample(self, problem: str, response: str, reward: float) -> None:
        """Show a response; called now and then."""

    def note(self, text: str) -> None:
        """Show a line of text, such as an evaluation, a checkpoint or a warning."""

    def interrupt(self, text: str) -> None:
        """Show a line from within a signal handler, which may have interrupted the writing of another line."""
        Thread(target=self.note, args=(text,)).start()

    def actors(self, lines: Sequence[ActorLine]) -> None:
        """Show what every actor of a cluster does; called several times a second."""

    def doing(self, what: str) -> AbstractContextManager[Tell | None]:
        """Entered around something that may take long; gives a watch that is told how far it is."""
        return nullcontext()

    def remaining(self) -> str:
        """`eta 1:32`; empty until a step has said how long it took."""
        return eta(self.total_steps - self.current, len(self.seconds), sum(self.seconds))


class PlainView(View):
    """Lines for a log file or a pipe."""

    def __init__(self, total_steps: int, *, title: str, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(total_steps, title=title, clock=clock)
        self.stream = stream
        self.line_at = self.sample_at = float("-inf")
        self.actors_at = clock()
        self.waiting = False
        self.explained = False

    def __enter__(self) -> Self:
        write_line(self.stream, self.title)
        return self

    def __exit__(self, *_: object) -> None:
        if self.waiting:
            self._print_step()

    def step(self, step: int, metrics: Mapping[str, Any], timing: Mapping[str, float]) -> None:
        """Print a line now and then, and always for the last step."""
        super().step(step, metrics, timing)
        self.waiting = True
        if step >= self.total_steps or self.clock() - self.line_at >= LINE_SECONDS:
            self._print_step()

    def sample(self, problem: str, response: str, reward: float) -> None:
        """Print a response now and then, each text on one line."""
        if self.clock() - self.sample_at >= SAMPLE_SECONDS:
            self.sample_at = self.clock()
            asked, answered = (printable(text, newline="\\n") for text in (problem, response))
            answered = answered if len(answered) <= 300 else f"{answered[:100]} ... {answered[-200:]}"
            write_line(self.stream, f"  sample  reward {_number(reward, 2)}  {asked}  ->  {answered}")

    def note(self, text: str) -> None:
        """Print the text."""
        write_line(self.stream, printable(text))

    def interrupt(self, text: str) -> None:
        """Print the text, after a terminal's echo of ^C on a line of its own."""
        super().interrupt(f"\n{text}" if self.stream.isatty() else text)

    def actors(self, lines: Sequence[ActorLine]) -> None:
        """Print a line for every actor now and then."""
        if self.clock() - self.actors_at >= ACTOR_SECONDS:
            self.actors_at = self.clock()
            for line in lines:
                facts = [f"{name} {cell}" for name, cell in line.facts().items() if cell.strip("-")]
                write_line(self.stream, f"  {line.name}: {', '.join([line.doing, *facts])}")

    def doing(self, what: str) -> AbstractContextManager[Tell]:
        """Watch what may take long: a line now and then."""
        return in_lines(what, self.note, self.clock)

    def _print_step(self) -> None:
        self.line_at, self.waiting = self.clock(), False
        if not self.explained and (meanings := legend(self.now)):
            self.explained = True
            write_line(self.stream, f"  {meanings}")
        cells = [f"step {self.current:>{len(str(self.total_steps))}}/{self.total_steps}"]
        for key, (label, decimals) in _labels(self.history).items():
            cell = f"{label} {_number(self.now.get(key, 0.0), decimals):<5}"
            cells.append(cell if key in self.now else " " * len(cell))
        write_line(self.stream, "  ".join([*cells, self.remaining()]).rstrip())


class LiveView(View):
    """One screen that is redrawn in place. It is made for 24 lines of 80 characters; smaller terminals see less."""

    def __init__(
        self, total_steps: int, *, title: str, console: Console, clock: Callable[[], float], samples: bool = True
    ) -> None:
        super().__init__(total_steps, title=title, clock=clock)
        self.console = console
        self.samples = samples
        self.last: tuple[str, str, float] | None = None
        self.crew: Sequence[ActorLine] = ()
        self.work = OnScreen(clock)
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", style="bold"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[remaining]}", style="bold cyan"),
            TimeElapsedColumn(),
            console=console,
            get_time=clock,
            expand=True,
        )
        self.task = self.progress.add_task("", total=total_steps, remaining="")
        self.live = SteadyLive(console, self.frame)
        self.keys = ExitStack()

    def __enter__(self) -> Self:
        self.keys.enter_context(unechoed())
        self.live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        self.keys.close()

    def sample(self, problem: str, response: str, reward: float) -> None:
        """Show this response from now on."""
        self.last = (printable(problem), printable(response), float(reward))

    def note(self, text: str) -> None:
        """Print the text above the picture."""
        self.console.print(Text(printable(text)))

    def actors(self, lines: Sequence[ActorLine]) -> None:
        """Show these actors from now on."""
        self.crew = list(lines)

    def doing(self, what: str) -> AbstractContextManager[Tell]:
        """Watch what may take long: a line in the border."""
        return self.work.doing(what)

    def frame(self) -> RenderableType:
        """What the screen shows now. Its height changes only when a new metric appears."""
        width, height = self.console.size
        with self.lock:
            table = _metrics_table(self.history, columns=2 if width >= 76 else 1, sparks=width >= 40)
            last, crew, meanings = self.last, self.crew, Text(legend(self.history), "dim")
            self.progress.update(self.task, completed=self.current, remaining=self.remaining())
        free = height - table.row_count - 6  # two panels' borders, the bar, the line below
        room = max(1, free)
        free -= min(len(crew), room) + 1 if crew else 0
        lines = min(SAMPLE_LINES, free) if self.samples else 0
        needed = len(meanings.wrap(self.console, max(1, width - 4)))
        explained = [meanings] if meanings and needed <= free - max(0, lines) else []
        top = Panel(
            Group(self.progress, table, *explained, *([_actors_table(crew, room)] if crew else [])),
            title=Text(self.title),
            title_align="left",
            subtitle=Text(self.work.line) or None,  # in the border, where it can come and go without moving anything
            subtitle_align="left",
            border_style="cyan",
        )
        return Group(top, _sample_panel(last, self.console, lines)) if lines > 0 else top


def _actors_table(lines: Sequence[ActorLine], room: int) -> Table:
    """One row for every actor, as far as there is room; the last row then counts the others."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("actor", "does"):
        table.add_column(name, no_wrap=True)
    for name in lines[0].facts():
        table.add_column(name, justify="right", no_wrap=True)
    shown = lines if len(lines) <= room else lines[: room - 1]
    for line in shown:
        table.add_row(*map(Text, (line.name, line.doing, *line.facts().values())))
    if len(shown) < len(lines):
        table.add_row(Text(f"and {len(lines) - len(shown)} more", "dim"))
    return table


def _metrics_table(history: Mapping[str, Sequence[float]], *, columns: int, sparks: bool) -> Table:
    """Label, value and history of each metric, down one column and then the next."""
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True, min_width=8)
        table.add_column(style="bold", justify="right", no_wrap=True, min_width=7)
        table.add_column(style="cyan", no_wrap=True, ratio=1)
    cells = []
    for key, (label, decimals) in _labels(history).items():
        value = history[key][-1]
        number = Text(_number(value, decimals), "" if isfinite(value) else "bold red")
        cells.append((Text(label), number, sparkline(history[key], 17) if sparks else ""))
    rows = -(-len(cells) // columns)
    for row in range(rows):
        table.add_row(*(cell for three in cells[row::rows] for cell in three))
    return table


def _sample_panel(sample: tuple[str, str, float] | None, console: Console, lines: int) -> Panel:
    title, body, border = Text("sample"), Text("no response yet", "dim"), "dim"
    if sample is not None:
        problem, response, reward = sample
        width = max(1, console.width - 4)
        asked = _fit(Text(problem, "dim"), console, width, max(1, lines // 3))
        answered = _fit(Text(response), console, width, max(1, lines - len(asked)))
        border = "green" if reward > 0.5 else "yellow"
        title = Text.assemble("sample · reward ", (_number(reward, 2), f"bold {border}"))
        body = Text("\n").join([*asked, *answered])
    return Panel(body, title=title, title_align="left", border_style=border, height=lines + 2)


def _fit(text: Text, console: Console, width: int, lines: int) -> list[Text]:
    """At most this many lines: the beginning and the end, because the end holds the answer."""
    wrapped = list(text.wrap(console, width, overflow="fold"))
    if len(wrapped) <= lines:
        return wrapped
    head = (lines - 1) // 2
    return [*wrapped[:head], Text("…", "dim"), *wrapped[len(wrapped) - (lines - 1 - head) :]]


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole history in at most `width` bars. Each bar is the mean of its stretch; × if it has no finite value."""
    count = min(width, len(values))
    ends = [index * len(values) // max(1, count) for index in range(count + 1)]
    parts = [[value for value in values[a:b] if isfinite(value)] for a, b in pairwise(ends)]
    means = [fmean(part) if part else nan for part in parts]
    known = [mean for mean in means if isfinite(mean)] or [0.0]
    low, high = min(known), max(known)
    flat = isclose(low, high, rel_tol=1e-9)  # equal except for rounding
    heights = [mean - mean + 0.4 if flat else (mean - low) / (high - low) for mean in means]
    return "".join(_LEVELS[round(7 * height)] if isfinite(height) else "×" for height in heights)


def _number(value: float, decimals: int) -> str:
    """Fixed decimals, or two significant digits if the number is too small or too large for them."""
    fits = value == 0 or 10.0**-decimals <= abs(value) < 1e6
    return f"{value:.{decimals}f}" if fits else f"{value:.2g}"
