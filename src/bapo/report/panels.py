"""The panels that figures are made of, as plain values.

A panel is one plot, of one of four kinds:

    curves   one line per arm over updates or steps, or over sampled responses; the values of every seed, so that the
             page can average and smooth; `apart` marks evaluations on other problems, which no line joins
    profile  one line per arm over fixed bins
    bars     one bar per arm and category
    points   one point per arm at its staleness, joined by objective

A figure is a dict: id, title, paper (the number of the figure there), caption, note (why something is missing), panels.
Values are rounded to six significant digits, and those that are not finite become null. The scripts
pages/charts.js and report/panels.js decide how they look.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from bapo.report.arms import Arm
from bapo.runs.numbers import number, numbers
from bapo.runs.read import Run
from bapo.runs.statistics import aggregate, mean, measures, sampled_responses
from bapo.types import LOG_RATIO_EDGES, USE_EDGES

Panel = dict[str, Any]
Figure = dict[str, Any]
Lines = Literal["updates", "rollouts", "evals"]

MAX_POINTS = 400
"""Points of the longest curve. A longer one is cut into equal stretches, and each is drawn as its mean."""
FEW_TOKENS = 20
"""Bins of a profile that hold fewer tokens in the whole run are left out."""
FIXED_CLIP = (0.8, 1.2)
"""The bounds at which `share_fixed` is measured."""
USE_BINS = (
    "never",
    *(f"{low}–{high - 1}" if high > low + 1 else str(low) for low, high in pairwise(USE_EDGES)),
    f"{USE_EDGES[-1]}+",
)
"""Names of the bins of uses."""


def figure(
    name: str,
    heading: tuple[str, str | None],  # our title, and the number in the paper
    caption: str,
    panels: Sequence[Panel],
    *,
    reason: str = "These runs have not logged any of these metrics yet.",
    note: str | None = None,
) -> Figure:
    """A figure of the panels that have anything in them; if none has, the reason."""
    drawn = [panel for panel in panels if panel["series"]]
    return {
        "id": name,
        "title": heading[0],
        "paper": heading[1],
        "caption": caption,
        "note": note if drawn else reason,
        "panels": [{"id": f"{name}-{index}"} | panel for index, panel in enumerate(drawn)],
    }


def curves(
    arms: Sequence[Arm],
    key: str,
    title: str,
    *,
    lines: Lines = "updates",
    marks: Sequence[dict[str, Any]] = (),
    only: Iterable[int] | None = None,
) -> Panel:
    """One metric over training: the x of all runs of an arm, and each run's values and sampled responses there."""
    axis = "step" if lines == "rollouts" else "version"
    series = []
    for index in sorted(range(len(arms)) if only is None else only):
        arm = arms[index]
        logged = [[line for line in _lines(run, lines) if isinstance(line.get(key), int | float)] for run in arm.runs]
        if lines == "evals":
            logged = [_fullest(listed) for listed in logged]
        points = [{line[axis]: (line["step"], float(line[key])) for line in listed} for listed in logged]
        if any(points):
            few = lines == "evals" and max(map(len, points)) <= MAX_POINTS
            sampled = [sampled_responses(run) for run in arm.runs]
            aligned = _aligned(points, sampled, width=1 if few else None)
            series.append({"arm": index} | aligned | (_apart(logged, aligned) if lines == "evals" else {}))
    return {
        "kind": "curves",
        "title": title,
        "key": key,
        "x": "step" if lines == "rollouts" else "update",
        "markers": lines == "evals",
        "marks": list(marks),
        "series": series,
    }


def _lines(run: Run, lines: Lines) -> list[dict[str, Any]]:
    if lines != "evals":
        return run.updates if lines == "updates" else run.rollouts
    if run.sft:
        return run.evals
    usual = run.config["eval"]["temperature"]
    return [line for line in run.evals if line.get("eval/temperature", usual) == usual]


def _fullest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One evaluation per version. If there are several, it is the last of those on the most problems."""
    kept = {line["version"]: line for line in sorted(lines, key=_problems)}
    return [kept[version] for version in sorted(kept)]


def _problems(line: dict[str, Any]) -> float:
    count = line.get("eval/problems")
    return count if isinstance(count, int | float) else 0


def _apart(logged: Sequence[Sequence[dict[str, Any]]], aligned: dict[str, Any]) -> dict[str, Any]:
    """`apart`: at each x, whether a run was evaluated on another number of problems than the first time."""
    others = {
        -(-line["version"] // aligned["stretch"]) * aligned["stretch"]
        for listed in logged
        for line in listed
        if line.get("eval/problems") != listed[0].get("eval/problems")
    }
    return {"apart": [x in others for x in aligned["x"]]} if others else {}


def _aligned(
    points: Sequence[dict[int, tuple[int, float]]], sampled: Sequence[list[int] | None], width: int | None = None
) -> dict[str, Any]:
    """Runs on a common x of at most MAX_POINTS: each stretch of equal length is its mean, placed at its end.

    `points`: x -> step and value, of each run. `sampled`: the responses of each run after each step. In the result,
    `responses` has them at each x, after the last step of the stretch; it is None if those of one run are not known.
    """
    last = max(max(values) for values in points if values)
    width = width or -(-last // MAX_POINTS) or 1
    runs = []
    for values in points:
        stretches: dict[int, list[tuple[int, float]]] = {}
        for x, point in values.items():
            stretches.setdefault(-(-x // width) * width, []).append(point)
        runs.append(stretches)
    at = sorted({x for stretches in runs for x in stretches})
    means = [{x: mean([y for _, y in stretch]) for x, stretch in stretches.items()} for stretches in runs]
    steps = [{x: max(step for step, _ in stretch) for x, stretch in stretches.items()} for stretches in runs]
    known = [totals for totals in sampled if totals is not None]
    return {
        "x": at,
        "runs": [numbers(values.get(x) for x in at) for values in means],
        "responses": [_after(totals, [of.get(x) for x in at]) for totals, of in zip(known, steps, strict=True)]
        if len(known) == len(runs)
        else None,
        "stretch": width,
    }


def _after(totals: Sequence[int], steps: Sequence[int | None]) -> list[int | None]:
    """The responses after each of these steps; None for a step that the log does not have."""
    return [totals[step] if step is not None and 0 <= step < len(totals) else None for step in steps]


def shared_counts(figures: Sequence[Figure]) -> list[list[int | None]]:
    """Take the numbers of responses out of the figures, each list once; their series keep the place in the result.

    Most metrics of a run are logged at the same places, so a page would hold the same numbers many times.
    """
    counts: dict[tuple[int | None, ...], int] = {}
    for series in (series for figure in figures for panel in figure["panels"] for series in panel["series"]):
        if series.get("responses") is not None:
            series["responses"] = [counts.setdefault(tuple(run), len(counts)) for run in series["responses"]]
    return [list(run) for run in counts]


def profile(arms: Sequence[Arm], key: str, title: str) -> Panel:
    """A metric over bins of the ratio. Bins are drawn equally wide; the ticks are some of the edges between them."""
    edges = [f"{math.exp(edge):.2f}" for edge in LOG_RATIO_EDGES]
    middle = len(edges) / 2
    return {
        "kind": "profile",
        "title": title,
        "key": key,
        "x": "ratio",
        "log": key == "ratio_histogram",
        "bins": [
            f"ratio below {edges[0]}",
            *(f"ratio {low}–{high}" for low, high in pairwise(edges)),
            f"ratio above {edges[-1]}",
        ],
        "ticks": [
            *({"at": at + 0.5, "text": edge} for at, edge in enumerate(edges) if at < middle - 1 and at % 2 == 0),
            {"at": middle, "text": "1"},
            *({"at": at + 0.5, "text": edge} for at, edge in enumerate(edges) if at > middle and at % 2 == 1),
        ],
        "verticals": [_place(math.log(bound)) for bound in FIXED_CLIP],
        "series": _profiles(arms, key, "ratio_histogram"),
    }


def use_profile(
    arms: Sequence[Arm], key: str, title: str, only: Iterable[int], *, marks: Sequence[dict[str, Any]] = ()
) -> Panel:
    """A metric over bins of uses, of the arms with these numbers."""
    return {
        "kind": "profile",
        "title": title,
        "key": key,
        "x": "times trained on before",
        "log": False,
        "bins": [f"trained on before: {name}" for name in USE_BINS],
        "ticks": [{"at": at, "text": name} for at, name in enumerate(USE_BINS)],
        "verticals": [],
        "marks": list(marks),
        "series": _profiles(arms, key, "use_histogram", only),
    }


def uses_tokens_again(arm: Arm) -> bool:
    """Whether a run of this arm logged a token that was trained on before."""
    return any(any(_sum_lists(run, "use_histogram")[1:]) for run in arm.runs)


def _profiles(arms: Sequence[Arm], key: str, histogram: str, only: Iterable[int] | None = None) -> list[dict[str, Any]]:
    """The series of a profile: of every run, the metric in each of the bins of this histogram."""
    series = []
    for index in sorted(range(len(arms)) if only is None else only):
        runs = [_profile_of(run, key, histogram) for run in arms[index].runs if any(_sum_lists(run, histogram))]
        if runs:
            series.append({"arm": index, "x": list(range(len(runs[0]))), "runs": [numbers(values) for values in runs]})
    return series


def _place(log_ratio: float) -> float:
    """Where a log-ratio lies when bins are drawn equally wide."""
    after = bisect_right(LOG_RATIO_EDGES, log_ratio)
    low, high = LOG_RATIO_EDGES[after - 1], LOG_RATIO_EDGES[after]
    return after - 0.5 + (log_ratio - low) / (high - low)


def _profile_of(run: Run, key: str, histogram: str) -> list[float | None]:
    """A binned metric over a whole run: a mean weighted by the tokens in the bin, or the share of tokens."""
    counts = _sum_lists(run, histogram)
    if key == histogram:
        values = _shares(counts)
    else:
        values = [0.0] * len(counts)
        for line in run.updates:
            for position, (count, value) in enumerate(zip(line[histogram], line[key], strict=True)):
                values[position] += count * value / max(counts[position], 1)
    return [value if count >= FEW_TOKENS else None for value, count in zip(values, counts, strict=True)]


def bars(arms: Sequence[Arm], title: str, categories: Sequence[str], keys: Sequence[str]) -> Panel:
    """One bar per category, each the mean of its metric over updates and seeds."""
    series = []
    for index, arm in enumerate(arms):
        runs = [[mean(run.series(key)) for key in keys] for run in arm.runs if all(run.series(key) for key in keys)]
        if runs:
            series.append({"arm": index, "values": numbers(_mean_of(runs))})
    return {"kind": "bars", "title": title, "x": "", "categories": list(categories), "series": series}


def age_bars(arms: Sequence[Arm]) -> Panel:
    """Share of tokens by staleness, over whole runs; the last bin of the histogram holds all older tokens."""
    totals = [[_sum_lists(run, "staleness_histogram") for run in arm.runs] for arm in arms]
    longest = max((_used(total) for group in totals for total in group), default=0)
    most = max((len(total) for group in totals for total in group), default=0)
    series = [
        {"arm": index, "values": numbers(_mean_of([_shares(total)[:longest] for total in group if sum(total)]))}
        for index, group in enumerate(totals)
        if any(sum(total) for total in group)
    ]
    return {
        "kind": "bars",
        "title": "Share of trained tokens, by staleness",
        "x": "updates between sampling and use",
        "series": series,
        "categories": [f"{age}+" if age == most - 1 else str(age) for age in range(longest)],
    }


def scores(arms: Sequence[Arm], k: str, when: str) -> list[Panel]:
    """avg@k and pass@k against staleness, of the finished runs."""
    panels = []
    for key, title in (("avg", f"avg@{k} {when}, by staleness"), ("pass", f"pass@{k} {when}, by staleness")):
        series = []
        for arm in arms:
            values = [measures(run)[key] for run in arm.runs if run.summary]
            if values:
                middle, half = aggregate(values)
                series.append(
                    {
                        "setting": arm.setting,
                        "objective": arm.objective,
                        "x": number(arm.staleness),
                        "y": number(middle),
                        "half": number(half) if half is not None and len(values) > 2 else None,
                        "runs": numbers(values),
                    }
                )
        panels.append({"kind": "points", "title": title, "key": key, "x": "mean staleness, updates", "series": series})
    return panels


def _sum_lists(run: Run, key: str) -> list[float]:
    """The sum of a histogram over updates."""
    listed = [line[key] for line in run.updates if isinstance(line.get(key), list)]
    return [float(sum(column)) for column in zip(*listed, strict=True)] if listed else []


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts] if total else [0.0] * len(counts)


def _used(counts: Sequence[float]) -> int:
    """Number of bins up to the last one that holds anything."""
    return max((position + 1 for position, count in enumerate(counts) if count), default=0)


def _mean_of(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]
