"""The numbers that summarise a run, and their mean and interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import Any

from bapo.runs.read import STOP_REASONS, Run, logged

FEW_RESPONSES = 100  # fewer responses say little about a share of them
FEWEST_SEEDS = 3
"""An interval over fewer seeds is not shown and decides nothing: of two seeds that happen to agree it has no width, and
of two that do not, it is wider than all that can happen."""
PROPORTIONS = ("pass", "share", "accuracy", "clip_fraction")
"""Measures that lie between 0 and 1 whatever the rewards are; those of another time or temperature begin like them."""
MOSTLY_CUT_OFF = 0.75
"""If the length limit cuts off more than this share of the responses, the reward is mostly one of fragments."""


def measures(run: Run) -> dict[str, float]:
    """The measures of a run, one number each; those that it does not have, or does not have yet, are absent.

    avg, pass, entropy: on held-out problems after training (`_before`: before training). problems: how many these are.
    avg_reach: how far avg's own 95% interval over problems reaches. avg_at_T, pass_at_T: at a further temperature T of
    eval.also_at. max_grad_norm, staleness_max: the largest of all updates. share, staleness, clip_fraction: means over
    all updates that logged them, each with the same weight. share_first, share_last: over the first and the last tenth.
    stop_start, …: see `stop_shares`. responses: see `sampled_responses`, after the last step. updates, tokens, seconds.

    A supervised run has held_out, perplexity and accuracy (`_before`: before training), loss_first and loss_last, and
    what it shares with others.
    """
    values: dict[str, float | None] = dict(_held_out_losses(run) if run.sft else _scores(run))
    for key, name in (("share", "share"), ("staleness_mean", "staleness"), ("clip_fraction", "clip_fraction")):
        values[name] = mean(series) if (series := run.series(key)) else None
    for key, name in (("grad_norm", "max_grad_norm"), ("staleness_max", "staleness_max")):
        values[name] = worst(series) if (series := run.series(key)) else None
    for key, name in (("share", "share"), ("imitation/loss", "loss")):
        if series := run.series(key):
            values[f"{name}_first"], values[f"{name}_last"] = first_and_last(series)
    responses = sampled_responses(run)
    values |= stop_shares(run) | {"responses": responses[-1] if responses else None}
    values |= {"updates": len(run.updates), "tokens": sum(run.series("tokens"))}
    values["seconds"] = sum(logged(run.timing, "seconds"))
    return {name: float(value) for name, value in values.items() if value is not None}


def _scores(run: Run) -> Iterator[tuple[str, float | None]]:
    """Those of the evaluations. An unfinished run may have one before training."""
    first = run.summary.get("before") or (run.evals[0] if run.evals and run.evals[0]["step"] == 0 else {})
    yield from ((f"{name}_before", _number(first, name)) for name in ("avg", "pass", "entropy"))
    if run.summary:
        after = run.summary["after"]
        yield from ((name, _number(after, name)) for name in ("avg", "pass", "entropy", "length", "problems"))
        yield "avg_reach", max(_reach(first), _reach(after))
    for other in run.summary.get("also_at", ()):
        yield from ((f"{name}_at_{other['temperature']:g}", _number(other["after"], name)) for name in ("avg", "pass"))


def _number(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(f"eval/{name}")
    return value if isinstance(value, int | float) else None


def _reach(line: Mapping[str, Any]) -> float:
    """How far the interval of avg over problems reaches from avg, to the farther side."""
    avg, low, high = (float(line[f"eval/{key}"]) for key in ("avg", "avg_low", "avg_high"))
    return max(high - avg, avg - low)


def _held_out_losses(run: Run) -> Iterator[tuple[str, float]]:
    names = {"held_out": "loss", "perplexity": "perplexity", "accuracy": "accuracy"}
    for suffix, when in (("_before", "before"), ("", "after")):
        if line := run.summary.get(when):
            yield from ((f"{name}{suffix}", line[f"held_out/{key}"]) for name, key in names.items())


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


def stop_shares(run: Run) -> dict[str, float]:
    """stop_start, …: share of updates whose search for bounds ended for that reason; empty without a search."""
    stops = run.series("stop")
    return {f"stop_{name}": stops.count(number) / len(stops) for number, name in enumerate(STOP_REASONS) if stops}


def first_and_last(series: Sequence[float]) -> tuple[float, float]:
    """Means over the first and over the last tenth of a series."""
    tenth = max(1, len(series) // 10)
    return mean(series[:tenth]), mean(series[-tenth:])


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


def interval(measure: str, middle: float, half: float) -> tuple[float, float]:
    """The ends of a measure's interval. That of a proportion ends at 0 and at 1: nothing lies beyond."""
    low, high = middle - half, middle + half
    return (max(low, 0.0), min(high, 1.0)) if measure.startswith(PROPORTIONS) else (low, high)


def estimate(measure: str, middle: float, half: float | None, seeds: int, digits: int = 3) -> str:
    """`0.594 ± 0.021`, mean and half width; from fewer than three seeds the mean alone. If only a part of the interval
    is possible, its ends: `0.960 [0.912, 1.000]`."""
    said = f"{middle:.{digits}f}"
    if half is None or seeds < FEWEST_SEEDS:
        return said
    if interval(measure, middle, half) == (middle - half, middle + half):
        return f"{said} ± {half:.{digits}f}"
    return f"{said} [{', '.join(f'{end:.{digits}f}' for end in interval(measure, middle, half))}]"


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
