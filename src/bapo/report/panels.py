"""The panels that figures are made of, as plain values.

A panel is one plot, of one of four kinds:

    curves   one line per arm over updates or steps, or over sampled responses; the values of every seed, so that the
             page can average and smooth; `apart` marks evaluations on other problems, which no line joins, and bars at
             evaluations are 95% intervals: over seeds if there are enough, over problems if every arm is one run
    profile  one line per arm over fixed bins
    bars     one bar per arm and category
    points   one point per arm at its staleness, joined by objective

A figure is a dict: id, title, caption, note (why something is missing), panels, and folded: whether it is for experts.
Values are rounded to six significant digits, and those that are not finite become null. The scripts
pages/charts.js and report/panels.js decide how they look.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from bapo.pages import number, numbers, panel
from bapo.report.arms import Arm
from bapo.runs.read import Run, logged
from bapo.runs.statistics import FEWEST_SEEDS, aggregate, interval, mean, measures, sampled_responses, student_quantile
from bapo.types import LOG_RATIO_EDGES, USE_EDGES

Panel = dict[str, Any]
Figure = dict[str, Any]
Lines = Literal["updates", "rollouts", "timing", "evals"]

MAX_POINTS = 400
"""Points of the longest curve. A longer one is cut into equal stretches, and each is drawn as its mean."""
FEW_TOKENS = 20  # bins of a profile that hold fewer tokens in the whole run are left out
FIXED_CLIP = (0.8, 1.2)  # the bounds at which `share_fixed` is measured
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
    drawn = [one for one in panels if one["series"]]
    title, paper = heading
    return {
        "id": name,
        "title": title,
        "caption": caption + (f" The BAPO paper (arXiv:2510.18927) shows this in its {paper}." if paper else ""),
        "note": note if drawn else reason,
        "panels": [{"id": f"{name}-{index}"} | one for index, one in enumerate(drawn)],
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
    by_step = lines in ("rollouts", "timing")
    axis = "step" if by_step else "version"
    chosen = sorted(range(len(arms)) if only is None else only)
    single = all(len(arms[index].runs) == 1 for index in chosen)
    series = []
    for index in chosen:
        arm = arms[index]
        found = [[line for line in _lines(run, lines) if isinstance(line.get(key), int | float)] for run in arm.runs]
        points = [{line[axis]: (line["step"], float(line[key])) for line in listed} for listed in found]
        if any(points):
            few = lines == "evals" and max(map(len, points)) <= MAX_POINTS
            sampled = [sampled_responses(run) for run in arm.runs]
            aligned = _aligned(points, sampled, width=1 if few else None)
            series.append({"arm": index} | aligned)
            if lines == "evals":
                series[-1] |= _apart(found, aligned) | (_over_problems(found[0], key, aligned) if single else {})
    x = "step" if by_step else "update"
    bars = _bars(series, key) if lines == "evals" else {}
    return panel("curves", title, x, series, key=key, markers=lines == "evals", marks=list(marks), **bars)


def _lines(run: Run, lines: Lines) -> list[dict[str, Any]]:
    if lines != "evals":
        logs: dict[str, list[dict[str, Any]]] = {"updates": run.updates, "rollouts": run.rollouts, "timing": run.timing}
        return logs[lines]
    usual = None if run.sft else run.config["eval"]["temperature"]
    found = [line for line in run.evals if line.get("eval/temperature", usual) == usual]
    # Of several evaluations at one version, the last of those on the most problems stays.
    kept = {line["version"]: line for line in sorted(found, key=lambda line: sum(logged([line], "eval/problems")))}
    return [kept[version] for version in sorted(kept)]


def _over_problems(logged: Sequence[dict[str, Any]], key: str, aligned: dict[str, Any]) -> dict[str, Any]:
    """`problems`: both ends of a run's interval over problems at each x, if it has logged them."""
    ends, at = (f"{key}_low", f"{key}_high"), {line["version"]: line for line in logged}
    if aligned["stretch"] > 1 or not all(isinstance(line.get(end), int | float) for line in logged for end in ends):
        return {}
    return {"problems": [numbers(at[x][end] for x in aligned["x"]) for end in ends]}


def _bars(series: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """`bars`: what the bars at evaluations are. `reach`: how many standard deviations over n seeds, the place in this
    list, their interval reaches to each side. `ends`: what its ends cannot pass."""
    most = max((len(one["runs"]) for one in series), default=0)
    reach = [number(student_quantile(n - 1) / math.sqrt(n)) if n >= FEWEST_SEEDS else None for n in range(most + 1)]
    over = "seeds" if most >= FEWEST_SEEDS else "problems" if any("problems" in one for one in series) else None
    ends = interval(key.rpartition("/")[2], 0.0, math.inf)
    return {"bars": f"bars: 95% intervals over {over}" if over else "", "reach": reach, "ends": numbers(ends)}


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
    responses = []
    for totals, stretches in zip(sampled, runs, strict=True):
        steps = (max((step for step, _ in stretches.get(x, ())), default=-1) for x in at)
        responses.append([totals[step] if 0 <= step < len(totals) else None for step in steps] if totals else None)
    return {
        "x": at,
        "runs": [numbers(mean([y for _, y in of[x]]) if x in of else None for x in at) for of in runs],
        "responses": None if None in responses else responses,
        "stretch": width,
    }


def shared_counts(figures: Sequence[Figure]) -> list[list[int | None]]:
    """Take the numbers of responses out of the figures, each list once; their series keep the place in the result.

    Most metrics of a run are logged at the same places, so a page would hold the same numbers many times.
    """
    counts: dict[tuple[int | None, ...], int] = {}
    for series in (series for figure in figures for drawn in figure["panels"] for series in drawn["series"]):
        if series.get("responses") is not None:
            series["responses"] = [counts.setdefault(tuple(run), len(counts)) for run in series["responses"]]
    return [list(run) for run in counts]


def profile(arms: Sequence[Arm], key: str, title: str) -> Panel:
    """A metric over bins of the ratio. Bins are drawn equally wide; the ticks are some of the edges between them."""
    edges = [f"{math.exp(edge):.2f}" for edge in LOG_RATIO_EDGES]
    middle, between = len(edges) / 2, (f"{low}–{high}" for low, high in pairwise(edges))
    below = [at for at in range(len(edges)) if at < middle - 1 and at % 2 == 0]
    above = [at for at in range(len(edges)) if at > middle and at % 2 == 1]
    ticks = [{"at": at + 0.5, "text": edges[at]} for at in (*below, *above)]
    shown = {
        "log": key == "ratio_histogram",
        "bins": [f"ratio {part}" for part in (f"below {edges[0]}", *between, f"above {edges[-1]}")],
        "ticks": [*ticks[: len(below)], {"at": middle, "text": "1"}, *ticks[len(below) :]],
        "verticals": [_place(math.log(bound)) for bound in FIXED_CLIP],
    }
    return panel("profile", title, "ratio", _profiles(arms, key, "ratio_histogram"), key=key, **shown)


def use_profile(
    arms: Sequence[Arm], key: str, title: str, only: Iterable[int], *, marks: Sequence[dict[str, Any]] = ()
) -> Panel:
    """A metric over bins of uses, of the arms with these numbers."""
    bins = [f"trained on before: {name}" for name in USE_BINS]
    ticks = [{"at": at, "text": name} for at, name in enumerate(USE_BINS)]
    shown = {"key": key, "log": False, "bins": bins, "ticks": ticks, "verticals": [], "marks": list(marks)}
    return panel("profile", title, "times trained on before", _profiles(arms, key, "use_histogram", only), **shown)


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
    values = _shares(counts) if key == histogram else [0.0] * len(counts)
    for line in run.updates if key != histogram else ():
        for position, (count, value) in enumerate(zip(line[histogram], line[key], strict=True)):
            values[position] += count * value / max(counts[position], 1)
    return [value if count >= FEW_TOKENS else None for value, count in zip(values, counts, strict=True)]


def bars(arms: Sequence[Arm], title: str, categories: Iterable[str], keys: Sequence[str]) -> Panel:
    """One bar per category, each the mean of its metric over updates and seeds."""
    series = []
    for index, arm in enumerate(arms):
        runs = [[mean(run.series(key)) for key in keys] for run in arm.runs if all(run.series(key) for key in keys)]
        if runs:
            series.append({"arm": index, "values": numbers(_mean_of(runs))})
    return panel("bars", title, "", series, categories=list(categories))


def age_bars(arms: Sequence[Arm]) -> Panel:
    """Share of tokens by staleness, over whole runs; the last bin of the histogram holds all older tokens."""
    totals = [[_sum_lists(run, "staleness_histogram") for run in arm.runs] for arm in arms]
    every = [total for group in totals for total in group]
    longest = max((age + 1 for total in every for age, count in enumerate(total) if count), default=0)
    most = max(map(len, every), default=0)
    series = [
        {"arm": index, "values": numbers(_mean_of([_shares(total)[:longest] for total in group if sum(total)]))}
        for index, group in enumerate(totals)
        if any(sum(total) for total in group)
    ]
    ages = [f"{age}+" if age == most - 1 else str(age) for age in range(longest)]
    title, x = "Share of trained tokens, by staleness", "updates between sampling and use"
    return panel("bars", title, x, series, categories=ages)


def scores(arms: Sequence[Arm], k: str, when: str) -> list[Panel]:
    """avg@k and pass@k against staleness, of the finished runs."""
    panels = []
    for key in ("avg", "pass"):
        series = []
        for arm in arms:
            values = [measures(run)[key] for run in arm.runs if run.summary]
            middle, half = aggregate(values)
            sure = half is not None and len(values) >= FEWEST_SEEDS
            ends = numbers(interval(key, middle, half or 0.0)) if sure else None
            point = {"x": number(arm.staleness), "y": number(middle), "ends": ends}
            named = {"setting": arm.setting, "objective": arm.objective}
            series += [{**named, **point, "runs": numbers(values)}] if values else []
        title = f"{key}@{k} {when}, by staleness"
        panels.append(panel("points", title, "mean staleness, updates", series, key=key))
    return panels


def _sum_lists(run: Run, key: str) -> list[float]:
    """The sum of a histogram over updates."""
    listed = [line[key] for line in run.updates if isinstance(line.get(key), list)]
    return [float(sum(column)) for column in zip(*listed, strict=True)] if listed else []


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts] if total else [0.0] * len(counts)


def _mean_of(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]
