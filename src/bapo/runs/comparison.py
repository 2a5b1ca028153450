"""The numbers of a comparison: mean and 95% interval of every arm over its seeds, and differences within each seed.

`bapo compare` prints them and the report shows them, so both say the same. A run is a mapping with setting, objective,
seed and measures (`bapo.runs.statistics.measures`). Only finished runs have measures, so only they count.

The interval is Student's t over seeds: it says what other seeds of the same grid would give, which the intervals over
problems in each run do not. A single seed has none. A seed gives every arm the same problems in the same order, so a
difference within a seed is less noisy than the difference of two means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.runs.statistics import aggregate

Run = Mapping[str, Any]  # setting, objective, seed, measures
Value = Mapping[str, Any]  # mean, half_width
Rows = dict[str, Any]  # arm -> seeds, measures (name -> Value), and differences from the first arm: seeds, measures

FEWEST_SEEDS = 3
"""An interval decides only over at least this many seeds: two that happen to agree have an interval of width zero."""


def compared(
    runs: Sequence[Run], tables: Sequence[str], rows: Sequence[str], by: tuple[str, str] = ("setting", "objective")
) -> dict[str, Rows]:
    """Table -> arm -> its seeds, its measures, and the differences from the first arm over the seeds that both have.

    `by`: the keys of a run that name its table and its row. A measure that one of the runs lacks is left out.
    """
    result: dict[str, Rows] = {}
    for table in tables:
        result[table] = {}
        first = _by_seed(runs, by, table, rows[0])
        for name in rows:
            mine = _by_seed(runs, by, table, name)
            row: dict[str, Any] = {"seeds": len(mine), "measures": _over_seeds(list(mine.values()))}
            if name != rows[0]:
                both = [seed for seed in mine if seed in first]
                less = [_less(mine[seed], first[seed]) for seed in both]
                row["differences"] = {"seeds": both, "measures": _over_seeds(less)}
            result[table][name] = row
    return result


def meeting_by(settings: Sequence[str], objectives: Sequence[str]) -> tuple[str, str]:
    """Where arms meet: objectives within a setting, or, if there is only one objective, settings within it."""
    return ("objective", "setting") if len(objectives) == 1 and len(settings) > 1 else ("setting", "objective")


def scores(k: int | str, names: set[str]) -> dict[str, str]:
    """Heading -> measure, for the scores on held-out problems after training. Greedy ones have no pass@k."""
    listed = {f"avg@{k}": "avg", f"pass@{k}": "pass"}
    for temperature in temperatures(names):
        listed[f"avg, temp. {temperature}"] = f"avg_at_{temperature}"
        if float(temperature):
            listed[f"pass, temp. {temperature}"] = f"pass_at_{temperature}"
    return listed | {"entropy": "entropy"}


def temperatures(names: set[str]) -> list[str]:
    """The further temperatures that these measures belong to."""
    return sorted(name.removeprefix("avg_at_") for name in names if name.startswith("avg_at_"))


def difference_cells(rows: Rows, listed: Mapping[str, str]) -> list[list[str]]:
    """The table of differences from the first arm, as text: headings, then the arms that share two seeds with it.

    `listed`: heading -> measure. Empty if there is no such arm.
    """
    first, *others = rows
    cells = []
    for name in others:
        differences = rows[name]["differences"]
        if len(differences["seeds"]) > 1:
            enough = len(differences["seeds"]) >= FEWEST_SEEDS
            shown = [_difference(differences["measures"].get(measure), markable=enough) for measure in listed.values()]
            cells.append([f"{name} - {first}", str(len(differences["seeds"])), *shown])
    return [["", "seeds", *listed], *cells] if cells else []


def excludes_zero(value: Value) -> bool:
    """Whether the interval of a difference excludes zero. It does not if there is no interval."""
    return value["half_width"] is not None and bool(abs(value["mean"]) > value["half_width"])


def _difference(value: Value | None, *, markable: bool) -> str:
    if value is None or value["half_width"] is None:
        return "–"
    mark = "*" if markable and excludes_zero(value) else " "
    return f"{value['mean']:+.3f} ± {value['half_width']:.3f}{mark}"


def _by_seed(runs: Sequence[Run], by: tuple[str, str], table: str, row: str) -> dict[int, Mapping[str, float]]:
    """The measures of one place: seed -> measures."""
    return {run["seed"]: run["measures"] for run in runs if (run[by[0]], run[by[1]]) == (table, row)}


def _less(run: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: value - other[name] for name, value in run.items() if name in other}


def _over_seeds(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean and interval of each measure that all of these runs have."""
    result = {}
    for name in runs[0] if runs else ():
        values = [run[name] for run in runs if name in run]
        if len(values) == len(runs):
            mean, half_width = aggregate(values)
            result[name] = {"mean": mean, "half_width": half_width}
    return result
