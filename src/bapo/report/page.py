"""The report as one file: everything that the page shows, as values for its scripts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bapo
from bapo.pages import CHARTS, document
from bapo.report.arms import Arm, Found, find, flat, grid_name
from bapo.report.cluster import cluster
from bapo.report.figures import figures
from bapo.report.panels import shared_counts
from bapo.report.samples import samples
from bapo.report.sft import sft_figures, sft_table
from bapo.report.table import table
from bapo.report.verdict import verdict
from bapo.runs import files
from bapo.runs.numbers import strict


def write_report(paths: Sequence[Path], out: Path) -> Found:
    """Read the runs at or below the paths and write their report, whole or not at all. Without a run, write nothing."""
    found = find(paths)
    if not found.arms:
        return found
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with files.made(partial) as file:
            file.write(page(contents(found)).encode("utf-8"))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return found


def contents(found: Found) -> dict[str, Any]:
    """Everything the page shows, as JSON values."""
    arms = found.arms
    reinforced = [arm for arm in arms if not arm.sft]  # these come first, so they keep their numbers
    settings, objectives = _unique(arm.setting for arm in arms), _unique(arm.objective for arm in arms)
    configs = [_shown(run.config) for arm in arms for run in arm.runs]
    first = configs[0] if configs else {}
    common = {key: value for key, value in first.items() if all(config.get(key) == value for config in configs)}
    drawn = [*(figures(reinforced) if reinforced else []), *sft_figures(arms)]
    return {
        "title": _title(arms),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "by": f"bapo {bapo.__version__}",
        "settings": settings,
        "objectives": objectives,
        "arms": [
            {
                "setting": arm.setting,
                "objective": arm.objective,
                "seeds": [run.config["seed"] for run in arm.runs],
                "runs": [str(run.path) for run in arm.runs],
                "steps": [len(run.timing) for run in arm.runs],
                "of": arm.runs[0].planned,
                "finished": [bool(run.summary) for run in arm.runs],
                "config": {k: v for k, v in _shown(arm.config).items() if k not in common and k not in ("seed", "out")},
            }
            for arm in arms
        ],
        "defects": [{"path": str(d.path), "kind": d.kind, "message": d.message} for d in found.defects],
        "table": table(reinforced),
        "sft": sft_table(arms),
        "cluster": cluster(reinforced),
        **verdict(arms),
        "counts": shared_counts(drawn),
        "figures": [one for one in drawn if one["panels"]],
        "undrawn": [{"title": one["title"], "reason": one["note"]} for one in drawn if not one["panels"]],
        "samples": [{"arm": index} | _samples(arm) for index, arm in enumerate(arms)],
        "common": common,
    }


def page(values: dict[str, Any], *, live: bool = False) -> str:
    """The HTML document."""
    without = "<noscript>This report is drawn by a script inside this file. Allow scripts to read it.</noscript>"
    return document(
        f"{values['title']} · bapo report",
        [without, '<main id="page"></main>'],
        styles=["report/page.css"],
        scripts=[*CHARTS, *(f"report/{name}.js" for name in ("panels", "view", "tables", "sections", "page"))],
        values=values,
        live=live,
    )


def _shown(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as the page lists it: under dotted keys, with infinity (such as no clipping) as text."""
    values: dict[str, Any] = strict(flat(config), spell=True)
    return values


def _samples(arm: Arm) -> dict[str, Any]:
    if arm.sft:
        return {"shown": [], "note": "Supervised training samples no responses."}
    return samples(arm.runs[0].path)


def _title(arms: Sequence[Arm]) -> str:
    """The name of the grid, or what is compared. Supervised runs are not compared, so the title only mentions them."""
    compared = [arm for arm in arms if not arm.sft]
    if compared and len(compared) < len(arms):
        return f"{_title(compared)}, with supervised runs"
    if not arms:
        return "No runs"
    if len(arms) > 1 and (grid := grid_name(arms)):
        return grid
    settings, objectives = _unique(arm.setting for arm in arms), _unique(arm.objective for arm in arms)
    if len(objectives) == 1 and len(settings) == 1:
        return f"{objectives[0]}, {settings[0]}"
    if len(objectives) == 1:
        return f"{objectives[0]} in {len(settings)} settings"
    return " against ".join(objectives) if len(objectives) == 2 else ", ".join(objectives)


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(values))
