"""The overview table: one row per arm. A cell is a value to sort by, its text, and a second line of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bapo.report.arms import Arm, samples_per_problem
from bapo.runs.numbers import number
from bapo.runs.read import STOP_REASONS, Run
from bapo.runs.statistics import aggregate, mean, measures, stop_shares, worst


def table(arms: Sequence[Arm]) -> dict[str, Any]:
    """The overview: one row per arm; a cell is its value for sorting, its text, and a second line."""
    k = samples_per_problem(arms)
    columns = [
        ("setting", "Setting", "Where stale data comes from"),
        ("objective", "Objective", "The loss"),
        ("seeds", "Seeds", "Runs of this configuration"),
        (
            "avg",
            f"avg@{k}",
            "Mean success on held-out problems after training ± 95% interval; before it below",
        ),
        ("pass", f"pass@{k}", "Chance that one of k samples succeeds, likewise"),
        ("entropy", "Entropy", "Nats per token on held-out problems, likewise"),
        ("max_grad_norm", "Max grad norm", "Largest gradient norm of any update"),
        ("staleness", "Staleness", "Oldest token trained on, in updates, and the bound"),
        (
            "share",
            "Positive share",
            "Share of the signal at the bounds in use: last tenth of updates; first tenth below",
        ),
        ("stop", "Search ended", "Why BAPO's search for bounds stopped, share of updates"),
        ("tokens", "Tokens", "Response tokens trained on, per run; each use counts"),
        ("seconds", "Time", "Wall-clock time of training, per run"),
    ]
    return {
        "columns": [{"key": key, "label": label, "help": explanation} for key, label, explanation in columns],
        "rows": [{"arm": index, "cells": _cells(arm)} for index, arm in enumerate(arms)],
    }


def _cells(arm: Arm) -> dict[str, dict[str, Any]]:
    facts = [_facts(run) for run in arm.runs]

    def joined(key: str) -> list[float]:
        return [fact[key] for fact in facts if key in fact]

    def cell(key: str, *, before: str | None = None, digits: int = 3) -> dict[str, Any]:
        values = joined(key)
        below = f"from {estimate(joined(before), digits)}" if before and joined(before) else ""
        return {"value": number(aggregate(values)[0]), "text": estimate(values, digits), "below": below}

    done = sum(bool(run.summary) for run in arm.runs)
    seeds = ", ".join(str(run.config["seed"]) for run in arm.runs)
    oldest = worst(joined("staleness_max")) if joined("staleness_max") else math.nan
    bound = arm.config["offpolicy"]["max_staleness"]
    stops = {name: mean(joined(f"stop_{name}")) for name in STOP_REASONS if joined(f"stop_{name}")}
    reasons = sorted(((share, name) for name, share in stops.items() if share > 0), reverse=True)
    return {
        "setting": {"value": arm.setting, "text": arm.setting, "below": ""},
        "objective": {"value": arm.objective, "text": arm.objective, "below": ""},
        "seeds": {
            "value": len(arm.runs),
            "text": str(len(arm.runs)),
            "below": f"seed {seeds}" if done == len(arm.runs) else f"seed {seeds}; {len(arm.runs) - done} unfinished",
        },
        "avg": cell("avg", before="avg_before"),
        "pass": cell("pass", before="pass_before"),
        "entropy": cell("entropy", before="entropy_before"),
        "max_grad_norm": cell("max_grad_norm", digits=2),
        "staleness": {
            "value": number(oldest),
            "text": f"{oldest:.0f}" if joined("staleness_max") else "–",
            "below": f"bound {bound}",
        },
        "share": cell("share_last", before="share_first"),
        "stop": {
            "value": reasons[0][0] if reasons else None,
            "text": f"{reasons[0][1].replace('_', ' ')} {reasons[0][0]:.0%}" if reasons else "–",
            "below": ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for share, name in reasons[1:]),
        },
        "tokens": plain(joined("tokens"), short),
        "seconds": plain(joined("seconds"), duration),
    }


def _facts(run: Run) -> dict[str, float]:
    """What the table says of one run; an unfinished one has no score after training."""
    facts = measures(run) if run.summary else {}
    if not run.summary and run.evals and run.evals[0]["step"] == 0:
        first = run.evals[0]
        before = {"avg_before": "eval/avg", "pass_before": "eval/pass", "entropy_before": "eval/entropy"}
        facts |= {name: float(first[key]) for name, key in before.items() if isinstance(first.get(key), int | float)}
    if norms := run.series("grad_norm"):
        facts["max_grad_norm"] = worst(norms)
    if ages := run.series("staleness_max"):
        facts["staleness_max"] = worst(ages)
    if shares := run.series("share"):
        tenth = max(1, len(shares) // 10)
        facts |= {"share_first": mean(shares[:tenth]), "share_last": mean(shares[-tenth:])}
    facts |= stop_shares(run)
    facts["tokens"] = sum(run.series("tokens"))
    facts["seconds"] = sum(line["seconds"] for line in run.timing if isinstance(line.get("seconds"), int | float))
    return facts


def estimate(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half width of its 95% interval; without the latter for one value. "nan" where a value is not finite."""
    if not values:
        return "–"
    middle, half = aggregate(values)
    return f"{middle:.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")


def short(value: float) -> str:
    """A count in three significant digits."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def plain(values: Sequence[float], say: Callable[[float], str]) -> dict[str, Any]:
    """A cell with the mean of the values, as `say` puts it."""
    middle = mean(values)
    text = say(middle) if math.isfinite(middle) else "nan" if values else "–"
    return {"value": number(middle), "text": text, "below": ""}
