"""Mean and 95% interval over seeds: one table per setting, one row per objective.

Only finished runs count, and each row says how many there are. The interval is Student's t over seeds: it says what
other seeds of the same grid would give, which the intervals over problems in each run do not. A single seed has none.

A seed gives every objective the same problems in the same order, so a difference within a seed is less noisy than the
difference of two means. A second table therefore has the differences from the grid's first objective, seed by seed, and
marks those whose interval excludes zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo.compare.grid import Cell, Grid
from bapo.runs.numbers import strict
from bapo.runs.read import STOP_REASONS, Run, read_run
from bapo.runs.statistics import aggregate, measures

Row = Mapping[str, Any]  # measure -> {"mean", "half_width"}
FEWEST_SEEDS_TO_MARK = 3
"""Two seeds that happen to agree have an interval of width zero."""


def collect(grid: Grid) -> dict[str, Any]:
    """The contents of results.json: the measures of every run, and setting -> objective -> measure -> mean, half_width.

    The same for the differences from the first objective, over the seeds that both have.
    """
    runs, missing = [], []
    for cell in grid.cells:
        found = read_run(cell.path)
        if isinstance(found, Run):
            runs.append(_place(cell) | {"measures": measures(found)})
        else:
            missing.append(_place(cell) | {"kind": found.kind, "why": found.message})
    settings: dict[str, Any] = {}
    for setting in grid.settings:
        settings[setting] = {}
        first = _by_seed(runs, setting, grid.objectives[0])
        for objective in grid.objectives:
            mine = _by_seed(runs, setting, objective)
            row = {"seeds": len(mine), "measures": _over_seeds(list(mine.values()))}
            if objective != grid.objectives[0]:
                both = [seed for seed in mine if seed in first]
                less = [_less(mine[seed], first[seed]) for seed in both]
                row["differences"] = {"seeds": both, "measures": _over_seeds(less)}
            settings[setting][objective] = row
    ks = {cell.config.eval.k for cell in grid.cells}
    return {
        "name": grid.name,
        "k": ks.pop() if len(ks) == 1 else None,
        "settings": settings,
        "runs": runs,
        "missing": missing,
    }


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The tables, as lines of text."""
    lines = []
    for setting, rows in results["settings"].items():
        names = {name for row in rows.values() for name in row["measures"]}
        columns = _columns(results["k"] or "k", names)
        cells = [["", "seeds", *columns]]
        for objective, row in rows.items():
            cells.append([objective, str(row["seeds"]), *(show(row["measures"]) for show in columns.values())])
        lines += ["", f"{results['name']}, {setting}: mean over seeds ± half width of its 95% interval"]
        lines += _aligned(cells)
        lines += _difference_lines(rows, _scores(results["k"] or "k", names))
    if any("stop_start" in row["measures"] for rows in results["settings"].values() for row in rows.values()):
        reasons = ", ".join(name.replace("_", " ") for name in STOP_REASONS)
        lines += ["", f"stops: % of updates whose search for bounds ended with {reasons}"]
    return [*lines, ""]


def _difference_lines(rows: Mapping[str, Any], scores: Mapping[str, str]) -> list[str]:
    """The table of differences from the first row; empty if no row shares two seeds with it."""
    first, *others = rows
    cells = [["", "seeds", *scores]]
    for objective in others:
        differences = rows[objective]["differences"]
        if len(differences["seeds"]) > 1:
            enough = len(differences["seeds"]) >= FEWEST_SEEDS_TO_MARK
            shown = [_difference(differences["measures"].get(name), markable=enough) for name in scores.values()]
            cells.append([f"{objective} - {first}", str(len(differences["seeds"])), *shown])
    if len(cells) == 1:
        return []
    title = f"difference from {first}, seed by seed, ± half width of its 95% interval"
    title += f"; * if the interval excludes 0 ({FEWEST_SEEDS_TO_MARK} seeds or more)"
    return ["", f"  {title}", *_aligned(cells)]


def _difference(value: Row | None, *, markable: bool) -> str:
    if value is None or value["half_width"] is None:
        return "–"
    mean, half = value["mean"], value["half_width"]
    return f"{mean:+.3f} ± {half:.3f}{'*' if markable and abs(mean) > half else ' '}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        texts = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *texts]).rstrip())
    return lines


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all. Numbers that are not finite become null."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(strict(value), indent=2, allow_nan=False) + "\n")
    partial.rename(path)


def _place(cell: Cell) -> dict[str, Any]:
    return {"setting": cell.setting, "objective": cell.objective, "seed": cell.seed, "path": str(cell.path)}


def _by_seed(runs: Sequence[Mapping[str, Any]], setting: str, objective: str) -> dict[int, Mapping[str, float]]:
    """The measures of one setting and objective: seed -> measures."""
    mine = [run for run in runs if (run["setting"], run["objective"]) == (setting, objective)]
    return {run["seed"]: run["measures"] for run in mine}


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


def _scores(k: int | str, names: set[str]) -> dict[str, str]:
    """Heading -> measure, for the scores on held-out problems after training. Greedy ones have no pass@k."""
    scores = {f"avg@{k}": "avg", f"pass@{k}": "pass"}
    for temperature in sorted(name.removeprefix("avg_at_") for name in names if name.startswith("avg_at_")):
        scores[f"avg, temp. {temperature}"] = f"avg_at_{temperature}"
        if float(temperature):
            scores[f"pass, temp. {temperature}"] = f"pass_at_{temperature}"
    return scores | {"entropy": "entropy"}


def _columns(k: int | str, names: set[str]) -> dict[str, Callable[[Row], str]]:
    """Heading -> the text in its column, for the measures that there are."""
    columns = {title: _shower(name) for title, name in _scores(k, names).items()}
    columns |= {"before": _shower("entropy_before")}
    columns |= {"max grad norm": _shower("max_grad_norm"), "share": _shower("share"), "responses": _responses}
    if "stop_start" in names:
        columns["stops"] = _stops
    return columns


def _shower(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if name not in row:
            return "–"
        mean, half = row[name]["mean"], row[name]["half_width"]
        return f"{mean:.3f}" if half is None else f"{mean:.3f} ± {half:.3f}"

    return show


def _responses(row: Row) -> str:
    return f"{row['responses']['mean']:.0f}" if "responses" in row else "–"


def _stops(row: Row) -> str:
    shares = [row[f"stop_{name}"]["mean"] for name in STOP_REASONS if f"stop_{name}" in row]
    return " ".join(f"{100 * share:.0f}" for share in shares) or "–"
