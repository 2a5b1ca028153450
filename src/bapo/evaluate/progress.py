"""What a person sees while an evaluation runs: a bar on a terminal, a line per chunk anywhere else, a table at the end.

The progress within a long chunk appears below the bar, or in a line every 30 seconds. The time left is estimated from
the problems done since this start, so problems saved earlier do not distort it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, Self, TextIO

from rich.console import Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bapo.config.numerals import counted
from bapo.evaluate.estimates import Row, by_data_set
from bapo.evaluate.options import Settings, sampling_of
from bapo.screen.steady import SteadyLive
from bapo.screen.terminal import aligned, can_redraw, eta, make_console, shortened, write_line
from bapo.screen.watch import OnScreen, Tell, in_lines


class EvaluationView:
    """A bar that is redrawn in place if the stream is a terminal, with a line below it for the chunk in progress.

    Otherwise lines.
    """

    def __init__(
        self,
        settings: Settings,
        path: Path,
        total: int,
        rows: Sequence[Row],  # saved before this start
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.path, self.total, self.stream, self.clock = settings, path, total, stream, clock
        self.before, self.done, self.name, self.remaining, self.began = len(rows), 0, "", "", clock()
        self.rewards: dict[str, list[float]] = {}
        self._count(rows)
        self.work, console = OnScreen(clock), make_console(stream)
        self.bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total} problems"),
            TextColumn("{task.fields[score]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[remaining]}", style="dim"),
            console=console,
            expand=True,
        )
        self.task = self.bar.add_task("", total=total, completed=self.done, score="", remaining="")
        self.live = SteadyLive(console, self.frame) if can_redraw(stream) else None

    def __enter__(self) -> Self:
        self._say(
            f"{self.settings.model}: {counted(self.total, 'problem')}, {counted(self.settings.k, 'response')} each, "
            f"{sampling_of(vars(self.settings)).words}, in {self.path}"
        )
        if self.before:
            self._say(f"{self.before} of {self.total} problems were already done")
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def sampling(self, name: str) -> AbstractContextManager[Tell]:
        """While a chunk of this data set is sampled and scored: a watch to tell how far it is."""
        self.name = name
        return in_lines("sampling", self._say, self.clock) if self.live is None else self.work.doing("sampling")

    def saved(self, rows: Sequence[Row]) -> None:
        """A chunk is on the disk."""
        self._count(rows)
        self.remaining = eta(self.total - self.done, self.done - self.before, self.clock() - self.began)
        if self.live is None:
            self._say(f"{self.done}/{self.total} problems  {self.score()}  {self.remaining}")

    def score(self) -> str:
        """`gsm8k avg@16 0.412`: the score so far of the data set in progress."""
        rewards = self.rewards.get(self.name)
        return f"{self.name} avg@{self.settings.k} {fmean(rewards):.3f}" if rewards else self.name

    def frame(self) -> RenderableType:
        """What the screen shows now."""
        self.bar.update(self.task, completed=self.done, score=self.score(), remaining=self.remaining)
        line = Text(self.work.line, "dim", no_wrap=True, overflow="ellipsis")  # may be empty, so that nothing moves
        return Group(self.bar, line) if self.done < self.total else self.bar

    def _say(self, text: str) -> None:
        write_line(self.stream, text)

    def _count(self, rows: Sequence[Row]) -> None:
        self.done += len(rows)
        for row in rows:
            rewards = [response["reward"] or 0.0 for response in row["responses"]]
            self.rewards.setdefault(row["data"], []).append(fmean(rewards))


def results_table(results: dict[str, Any]) -> str:
    """The figures of every data set and of all together, with 95% intervals."""
    endings = results["overall"].get("endings", {})
    return "\n".join(
        [*aligned(figures_table(results)), *([f"endings: {endings_in_words(endings)}"] if endings else [])]
    )


def figures_table(results: dict[str, Any], *, powers: Sequence[str] = ()) -> list[list[str]]:
    """The same as cells. `powers`: further j of pass@j."""
    k, turns = results["k"], ["turns"] if "turns" in results["overall"] else []
    lengths = {"length": "length", "of right": "length_correct", "of wrong": "length_wrong"}
    scores = [f"avg@{k}", *(f"pass@{j}" for j in powers), f"pass@{k}", f"maj@{k}", "truncated"]
    table = [["", "problems", *scores, *lengths, "failures", *turns]]
    for name, found in by_data_set(results).items():
        passed = (found["pass"][j] for j in powers)
        estimates = map(_interval, [found["avg"], *passed, found["pass_k"], found["maj"], found["truncated"]])
        means = [_mean(found[key]) for key in (*lengths.values(), *turns)]
        table.append([name, str(found["problems"]), *estimates, *means[:3], str(found["failures"]), *means[3:]])
    return table


def endings_in_words(endings: dict[str, int]) -> str:
    """`answered 120, context 8`: how episodes ended."""
    return ", ".join(f"{ending} {count}" for ending, count in endings.items())


def failure_note(results: dict[str, Any]) -> str:
    """How often the verifier failed, with the most frequent cause; empty if it never failed."""
    found = results["overall"]
    if not found["failures"]:
        return ""
    cause, count = next(iter(found["failure_causes"].items()))
    return (
        f"the verifier failed on {found['failures']} of {found['responses']} responses, which count 0; the most "
        f"frequent cause ({counted(count, 'time')}): {shortened(cause, 300)}"
    )


def _interval(estimate: dict[str, float] | None) -> str:
    return "–" if estimate is None else f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _mean(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
