"""What came out of a grid: one table per setting, one row per objective, and the verdict.

Only finished runs count, and each row says how many there are. `bapo.runs.comparison` has the numbers and the words of
the verdict, which the report uses, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from bapo.compare.grid import Cell, Grid
from bapo.runs import files
from bapo.runs.comparison import (
    Rows,
    compare_arms,
    difference_cells,
    judge,
    measure_names,
    meeting_by,
    scores,
    shared,
)
from bapo.runs.read import STOP_REASONS, Run, read_run
from bapo.runs.statistics import FEWEST_SEEDS, estimate, measures

WIDTH = 110
"""Characters in a line of the verdict."""
Row = Mapping[str, Any]  # seeds, and measures -> {"mean", "half_width"}


def collect(grid: Grid) -> dict[str, Any]:
    """The contents of results.json: the measures of every run, and setting -> objective -> measure -> mean, half_width.

    The same for the differences from the first objective, over the seeds that both have; and the verdict.
    `across_settings`: objective -> setting -> the same, if there is only one objective, so that settings are compared.
    """
    runs, missing = [], []
    for cell in grid.cells:
        found = read_run(cell.path)
        if isinstance(found, Run):
            runs.append(_place(cell) | {"measures": measures(found)})
        else:
            missing.append(_place(cell) | {"kind": found.kind, "why": found.message})
    settings = compare_arms(runs, grid.settings, grid.objectives)
    by = meeting_by(grid.settings, grid.objectives)
    across = compare_arms(runs, grid.objectives, grid.settings, by) if by[0] == "objective" else None
    configs: dict[str, list[dict[str, Any]]] = {}
    for cell in grid.cells:
        configs.setdefault(getattr(cell, by[0]), []).append(cell.values)
    verdict = judge(across or settings, configs, missing=len(missing))
    return {
        "name": grid.name,
        "k": shared(configs, "eval.k"),
        "verdict": [*verdict.lines, *verdict.details, *verdict.notes],
        "settings": settings,
        "across_settings": across,
        "runs": runs,
        "missing": missing,
    }


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The tables and the verdict, as lines of text."""
    lines: list[str] = []
    k = results["k"] or "k"
    for setting, rows in results["settings"].items():
        columns = _columns(k, measure_names(rows))
        cells = [["", "seeds", *columns]]
        for objective, row in rows.items():
            cells.append([objective, str(row["seeds"]), *(_text(row, name) for name in columns.values())])
        lines += ["", f"{results['name']}, {setting}: {_means(max(row['seeds'] for row in rows.values()))}"]
        lines += _aligned(cells)
        lines += _difference_lines(rows, k)
    for objective, rows in (results["across_settings"] or {}).items():
        if found := _difference_lines(rows, k):
            lines += ["", f"{results['name']}, {objective}: the settings against each other", *found[1:]]
    if any("stop_start" in row["measures"] for rows in results["settings"].values() for row in rows.values()):
        reasons = ", ".join(name.replace("_", " ") for name in STOP_REASONS)
        lines += ["", f"stops: % of updates whose search for bounds ended with {reasons}"]
    if results["verdict"]:
        lines += ["", *(line for text in results["verdict"] for line in wrap(text, WIDTH))]
    return [*lines, ""]


def _difference_lines(rows: Rows, k: int | str) -> list[str]:
    """The table of differences from the first row; empty if no row shares two seeds with it."""
    cells = difference_cells(rows, k)
    if not cells:
        return []
    title = f"difference from {next(iter(rows))}, seed by seed"
    if max(int(seeds) for _, seeds, *_ in cells[1:]) >= FEWEST_SEEDS:
        title += ", ± half width of its 95% interval; * if the interval excludes 0"
    return ["", f"  {title}", *_aligned(cells)]


def _means(seeds: int) -> str:
    """What the numbers of a table are, whose rows have at most so many seeds."""
    if seeds >= FEWEST_SEEDS:
        return f"mean over seeds ± half width of its 95% interval, from {FEWEST_SEEDS} seeds on"
    return f"mean over seeds; an interval needs {FEWEST_SEEDS}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = [[name.ljust(first), *map(str.rjust, texts, others)] for name, *texts in cells]
    return ["  ".join(["", *row]).rstrip() for row in rows]


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all. Numbers that are not finite become null."""
    files.write(path, json.dumps(files.strict(value), indent=2, allow_nan=False) + "\n")


def _place(cell: Cell) -> dict[str, Any]:
    return {"setting": cell.setting, "objective": cell.objective, "seed": cell.seed, "path": str(cell.path)}


def _columns(k: int | str, names: set[str]) -> dict[str, str]:
    """Heading -> measure, for the measures that there are. All reasons to stop share a column."""
    listed = scores(k, names) | {"before": "entropy_before", "max grad norm": "max_grad_norm"}
    listed |= {"positive share": "share", "responses": "responses"}
    return listed | ({"stops": "stop"} if "stop_start" in names else {})


def _text(row: Row, name: str) -> str:
    measured = row["measures"]
    if name == "stop":
        shares = [measured[f"stop_{reason}"]["mean"] for reason in STOP_REASONS if f"stop_{reason}" in measured]
        return " ".join(f"{100 * share:.0f}" for share in shares) or "–"
    if name not in measured:
        return "–"
    mean, half = measured[name]["mean"], measured[name]["half_width"]
    return f"{mean:.0f}" if name == "responses" else estimate(name, mean, half, row["seeds"])
