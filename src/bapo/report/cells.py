"""What the report's two tables share: some columns, and how the numbers of several runs become text.

A cell is a value to sort by, its text, and a second line of text below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bapo.report.arms import Arm
from bapo.runs.numbers import number
from bapo.runs.read import Run
from bapo.runs.statistics import aggregate, mean, worst

Cell = dict[str, Any]
Table = dict[str, Any]
Column = tuple[str, str, str]
"""Key, label and explanation."""

SEEDS: Column = ("seeds", "Seeds", "How many runs of this configuration there are. Small print: their seeds.")
GRAD_NORM: Column = ("max_grad_norm", "Max grad norm", "The largest gradient norm of any update, before it is clipped.")
TOKENS: Column = (
    "tokens",
    "Tokens",
    "Response tokens trained on, per run; a token counts each time it is used.",
)
SECONDS: Column = (
    "seconds",
    "Time",
    "Wall-clock time of training, per run. Small print: restarts on a cluster, if any.",
)


def make_table(columns: Sequence[Column], rows: Sequence[tuple[int, Arm, dict[str, Cell]]]) -> Table:
    """A table from its columns and its rows: number of the arm, the arm, cells by key."""
    several = any(len(arm.runs) > 1 for _, arm, _ in rows)
    over_seeds = (
        "Mean over seeds ± half width of its 95% interval (Student's t; wide with two seeds). " if several else ""
    )
    return {
        "columns": [{"key": key, "label": label, "help": explanation} for key, label, explanation in columns],
        "rows": [{"arm": index, "cells": cells} for index, _, cells in rows],
        "caption": f"{over_seeds}{'Click a heading to sort.' if len(rows) > 1 else ''}".strip(),
    }


def cell(value: Any, text: str, below: str = "") -> Cell:
    """A value to sort by, its text, and the text below."""
    return {"value": value, "text": text, "below": below}


@dataclass(frozen=True)
class Facts:
    """The numbers of every run of an arm, and the cells that are made of them."""

    arm: Arm
    runs: list[dict[str, float]]
    """One dict per run; a run lacks the numbers that it does not have."""

    def of(self, key: str) -> list[float]:
        """One number, of the runs that have it."""
        return [run[key] for run in self.runs if key in run]

    def cells(self) -> dict[str, Cell]:
        """The cells that both tables have: setting, objective, seeds, gradient norm, tokens and time."""
        runs = self.arm.runs
        unfinished = sum(not run.summary for run in runs)
        seeds = f"seed {', '.join(str(run.config['seed']) for run in runs)}"
        return {
            "setting": cell(self.arm.setting, self.arm.setting),
            "objective": cell(self.arm.objective, self.arm.objective),
            "seeds": cell(len(runs), str(len(runs)), f"{seeds}; {unfinished} unfinished" if unfinished else seeds),
            "max_grad_norm": self.estimate("max_grad_norm", digits=2),
            "tokens": self.mean("tokens", count),
            "seconds": self.mean("seconds", duration) | {"below": _restarts(runs)},
        }

    def estimate(self, key: str, *, before: str | None = None, digits: int = 3) -> Cell:
        """Mean and interval over runs; below them the same of the number `before`."""
        below = f"from {estimate(self.of(before), digits)}" if before and self.of(before) else ""
        return cell(number(aggregate(self.of(key))[0]), estimate(self.of(key), digits), below)

    def mean(self, key: str, say: Callable[[float], str]) -> Cell:
        """The mean over runs, as `say` puts it."""
        middle = mean(self.of(key))
        return cell(number(middle), say(middle) if math.isfinite(middle) else "nan" if self.of(key) else "–")


def _restarts(runs: Sequence[Run]) -> str:
    """How often actors of a cluster were restarted, which costs time; nothing if none was."""
    counts = [counts for run in runs if isinstance(counts := run.summary.get("restarts"), dict)]
    count = sum(value for found in counts for value in found.values() if isinstance(value, int))
    return f"{count} restart{'s' * (count != 1)} of actors" if count else ""


def common_facts(run: Run) -> dict[str, float]:
    """The numbers that both tables show: largest gradient norm, tokens and seconds."""
    norms = run.series("grad_norm")
    return {
        **({"max_grad_norm": worst(norms)} if norms else {}),
        "tokens": sum(run.series("tokens")),
        "seconds": sum(line["seconds"] for line in run.timing if isinstance(line.get("seconds"), int | float)),
    }


def ends(run: Run, key: str, name: str) -> dict[str, float]:
    """`NAME_first` and `NAME_last`: means of a metric over the first and the last tenth of the updates that have it."""
    series = run.series(key)
    tenth = max(1, len(series) // 10)
    return {f"{name}_first": mean(series[:tenth]), f"{name}_last": mean(series[-tenth:])} if series else {}


def estimate(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half width of its 95% interval; a single value has no interval. "nan" if a value is not finite."""
    if not values:
        return "–"
    middle, half = aggregate(values)
    return f"{middle:.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")


def count(value: float) -> str:
    """A count in three significant digits: `12`, `3.4 k`, `1.25 M`."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time in its natural unit: `90 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
