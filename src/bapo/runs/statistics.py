"""The numbers that summarise a run, and their mean and interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

from bapo.runs.read import STOP_REASONS, Run

__all__ = [
    "FEW_RESPONSES",
    "MOSTLY_CUT_OFF",
    "aggregate",
    "mean",
    "measures",
    "sampled_responses",
    "stop_shares",
    "student_quantile",
    "update_means",
    "worst",
]

FEW_RESPONSES = 100
"""Fewer responses say little about a share of them."""
MOSTLY_CUT_OFF = 0.75
"""If the length limit cuts off more than this share of the responses, the reward is mostly one of fragments."""


def measures(run: Run) -> dict[str, float]:
    """The measures of a finished run, one number each; measures that the run does not have are absent.

    avg, pass, entropy: on held-out problems after training (`_before`: before training). problems: how many these are.
    avg_reach: how far avg's own 95% interval over problems reaches. max_grad_norm: the largest of all updates.
    share, staleness, clip_fraction: see `update_means`. stop_start, …: see `stop_shares`. avg_at_T, pass_at_T: avg and
    pass at a further temperature T of eval.also_at. responses: see `sampled_responses`, after the last step.

    A supervised run has held_out, perplexity and accuracy (`_before`: before training), max_grad_norm, updates and
    training_seconds.
    """
    if run.sft:
        return _sft_measures(run)
    before, after = run.summary["before"], run.summary["after"]
    values = {
        "avg": after["eval/avg"],
        "avg_before": before["eval/avg"],
        "pass": after["eval/pass"],
        "pass_before": before["eval/pass"],
        "entropy": after.get("eval/entropy"),
        "entropy_before": before.get("eval/entropy"),
        "length": after["eval/length"],
        "problems": _number(after, "eval/problems"),
        "avg_reach": max((r for r in map(_reach, (before, after)) if r is not None), default=None),
        "updates": float(len(run.updates)),
        "training_seconds": run.summary.get("training_seconds"),
    }
    for other in run.summary.get("also_at", ()):
        values[f"avg_at_{other['temperature']:g}"] = other["after"]["eval/avg"]
        values[f"pass_at_{other['temperature']:g}"] = other["after"]["eval/pass"]
    if norms := run.series("grad_norm"):
        values["max_grad_norm"] = worst(norms)
    values |= update_means(run)
    if responses := sampled_responses(run):
        values["responses"] = responses[-1]
    values |= stop_shares(run)
    return {name: float(value) for name, value in values.items() if value is not None}


def _reach(line: Mapping[str, Any]) -> float | None:
    """How far the interval of avg over problems reaches from avg, to the farther side; None if there is none."""
    avg, low, high = (_number(line, f"eval/{key}") for key in ("avg", "avg_low", "avg_high"))
    return None if avg is None or low is None or high is None else max(high - avg, avg - low)


def _number(line: Mapping[str, Any], key: str) -> float | None:
    return float(value) if isinstance(value := line.get(key), int | float) else None


def _sft_measures(run: Run) -> dict[str, float]:
    values = {"updates": float(len(run.updates)), "training_seconds": float(run.summary["training_seconds"])}
    for when, suffix in (("before", "_before"), ("after", "")):
        if (line := run.summary[when]) is not None:
            values[f"held_out{suffix}"] = float(line["held_out/loss"])
            values[f"perplexity{suffix}"] = float(line["held_out/perplexity"])
            values[f"accuracy{suffix}"] = float(line["held_out/accuracy"])
    if norms := run.series("grad_norm"):
        values["max_grad_norm"] = worst(norms)
    return values


def sampled_responses(run: Run) -> list[int] | None:
    """How many responses a run has sampled for training: 0, then the number after each step. None if that is not known.

    All responses of finished groups count, whether filtering kept the group or not, and so do those of dropped groups.
    A parked response counts once its group is finished or dropped. A supervised run samples none, so it has no number.
    """
    if run.sft:
        return None
    totals = [0]
    for line in run.rollouts:
        groups, dropped = line.get("rollout/finished_groups"), line.get("rollout/dropped")
        if not isinstance(groups, int) or not isinstance(dropped, int):
            return None
        totals.append(totals[-1] + groups * int(run.config["rollout"]["responses"]) + dropped)
    return totals


def update_means(run: Run) -> dict[str, float]:
    """share, staleness, clip_fraction: means over all updates that logged them, each update with the same weight."""
    keys = {"share": "share", "staleness_mean": "staleness", "clip_fraction": "clip_fraction"}
    return {name: mean(series) for key, name in keys.items() if (series := run.series(key))}


def stop_shares(run: Run) -> dict[str, float]:
    """stop_start, …: share of updates whose search for bounds ended for that reason; empty without a search."""
    stops = run.series("stop")
    return {f"stop_{name}": stops.count(number) / len(stops) for number, name in enumerate(STOP_REASONS) if stops}


def worst(values: Sequence[float]) -> float:
    """The largest value; NaN if one of them is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if there are no values, or if one of them is not finite."""
    return fmean(values) if values and all(map(math.isfinite, values)) else math.nan


def aggregate(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over runs and the half width of its 95% interval (Student's t):

        mean ± t(0.975, n - 1) s / √n

    A single value has no interval (None). Without values, or if one is not finite, the mean is NaN without an interval.
    """
    if not values or not all(map(math.isfinite, values)):
        return math.nan, None
    if len(values) == 1:
        return float(values[0]), None
    return fmean(values), student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))


@lru_cache
def student_quantile(freedom: int) -> float:
    """The t for which |T| < t with probability 0.95 under Student's distribution, by bisection.

    The distribution function for whole degrees of freedom n is a finite sum (Abramowitz & Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 13.0  # 12.7 for one degree of freedom, less for more
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, total = math.cos(angle), 0.0
    odd = freedom % 2
    term = cosine if odd else 1.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine**2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
