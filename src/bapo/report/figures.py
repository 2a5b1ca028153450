"""The figures of a report, as plain values: which metric each curve is, and what its caption says.

A figure is a dict: id, title, paper (which figure there), caption, note (why something is missing), panels. A panel is
one plot, of four kinds:

    curves   one line per arm over updates or steps; every seed's values, so that the page can average and smooth
    profile  the same over fixed bins
    bars     one bar per arm and category
    points   one point per arm against its staleness, joined by objective

Values are rounded to six significant digits; what is not finite becomes null. How it looks is page.js's business.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from bapo.config.run import Config
from bapo.report.arms import Arm, samples_per_problem
from bapo.runs.numbers import number, numbers
from bapo.runs.read import Run
from bapo.runs.statistics import aggregate, mean, measures
from bapo.types import LOG_RATIO_EDGES

Panel = dict[str, Any]
Figure = dict[str, Any]
Lines = Literal["updates", "rollouts", "evals"]

MAX_POINTS = 400
"""Longest curve; longer ones are cut into equal stretches, each drawn as its mean."""
FEW_TOKENS = 20
"""Bins of a ratio profile with fewer tokens in the whole run are left out."""
FIXED_CLIP = (0.8, 1.2)
"""The bounds that `share_fixed` is measured at."""
QUADRANTS = {
    "high_prob_high_adv": "likely,<br>high adv.<br><b>H ↓</b>",
    "high_prob_low_adv": "likely,<br>low adv.<br><b>H ↑</b>",
    "low_prob_high_adv": "unlikely,<br>high adv.<br><b>H ↑</b>",
    "low_prob_low_adv": "unlikely,<br>low adv.<br><b>H ↓</b>",
}


def figures(arms: Sequence[Arm]) -> list[Figure]:
    """Every figure, in the order of the page."""
    return [make(arms) for make in FIGURES]


# Figures


def held_out(arms: Sequence[Arm]) -> Figure:
    """Figure 9: BAPO against the others."""
    k = samples_per_problem(arms)
    names = {arm.config["objective"]["name"] for arm in arms}
    lacking = [name for name in ("bapo", "grpo") if name not in names]
    return figure(
        "held-out",
        ("Success on held-out problems", "figure 9"),
        "BAPO against GRPO: evaluations before, during and after training; those in between use a quarter of "
        "the problems, so they are noisier.",
        [
            curves(arms, "eval/avg", f"avg@{k}", lines="evals"),
            curves(arms, "eval/pass", f"pass@{k}", lines="evals"),
            curves(arms, "eval/entropy", "Entropy while sampling, nats per token", lines="evals"),
            curves(arms, "kl", "KL from sampler to learner, nats per token"),
        ],
        note=f"There is no run of {' or '.join(lacking)} here to compare with." if lacking else None,
    )


def dynamics(arms: Sequence[Arm]) -> Figure:
    """Figure 2: what staleness does."""
    return figure(
        "dynamics",
        ("Training under staleness", "figure 2"),
        "Reward of sampled responses before filtering, entropy of the trained tokens, share of them whose "
        "gradient the clip blocks, and the gradient norm before it is clipped.",
        [
            curves(arms, "reward", "Reward", lines="rollouts"),
            curves(arms, "entropy", "Entropy, nats per token"),
            curves(arms, "clip_fraction", "Clipped tokens, share"),
            curves(arms, "grad_norm", "Gradient norm"),
        ],
    )


def by_staleness(arms: Sequence[Arm]) -> Figure:
    """Figure 11: score by staleness."""
    here = [arm for arm in arms if arm.config["offpolicy"]["partial_budget"] is None]
    few = len({round(arm.staleness, 6) for arm in here}) < 2
    return figure(
        "by-staleness",
        ("Score by staleness", "figure 11"),
        "Held-out score after training against the mean staleness of the trained tokens. Small dots are "
        "seeds; bars are 95% intervals over seeds, from three seeds on.",
        [] if few else _scores(here, samples_per_problem(arms)),
        reason="It needs runs with at least two different settings of staleness, without partial rollout.",
    )


def under_partial(arms: Sequence[Arm]) -> Figure:
    """Figure 12: the same under partial rollout."""
    here = [arm for arm in arms if arm.config["offpolicy"]["partial_budget"] is not None]
    return figure(
        "under-partial",
        ("Score under partial rollout", "figure 12"),
        "The same for runs whose long responses were parked and continued under newer weights.",
        _scores(here, samples_per_problem(arms)),
        reason="It needs finished runs with offpolicy.partial_budget set.",
    )


def balance(arms: Sequence[Arm]) -> Figure:
    """Figure 4: positive and negative tokens."""
    targets = {
        Config.model_validate(arm.config).objective.clip.target_share
        for arm in arms
        if arm.config["objective"]["name"] == "bapo"
    }
    marks = [{"value": target, "text": f"target {target:g}"} for target in sorted(targets)]
    return figure(
        "balance",
        ("Positive against negative tokens", "figure 4"),
        "The part of the signal, and of the tokens, that has positive advantage; the rest is negative. The "
        "clip can move the former towards BAPO's target, not the latter.",
        [
            curves(arms, "share_unclipped", "Positive share of the signal, unclipped", marks=marks),
            curves(arms, "share_fixed", "The same at the fixed clip 0.8, 1.2", marks=marks),
            curves(arms, "share", "The same at the bounds in use", marks=marks),
            curves(arms, "positive_tokens", "Positive share of the tokens"),
        ],
    )


def bounds(arms: Sequence[Arm]) -> Figure:
    """Figure 8: bounds over time."""
    return figure(
        "bounds",
        ("Clip bounds over time", "figure 8"),
        "BAPO chooses both bounds anew for every update; other objectives keep theirs. They bound the ratio.",
        [curves(arms, "clip_high", "Upper bound"), curves(arms, "clip_low", "Lower bound")],
        reason="No objective here reports clip bounds.",
    )


def ratio_profile(arms: Sequence[Arm]) -> Figure:
    """Figures 5 and 10: who is far from ratio 1."""
    return figure(
        "ratio-profile",
        ("Token probability and entropy by ratio", "figures 5 and 10"),
        "Trained tokens by the ratio of current to sampling probability: mean probability, mean "
        "entropy of the distribution they came from, both under the current policy, and how many there are. Dotted: "
        f"the fixed clip 0.8, 1.2. The outer bins are open; bins of fewer than {FEW_TOKENS} tokens are left out.",
        [
            _profile(arms, "ratio_prob", "Token probability"),
            _profile(arms, "ratio_entropy", "Entropy, nats"),
            _profile(arms, "ratio_histogram", "Share of tokens"),
        ],
        reason="These runs did not log ratio_histogram; they are from a version of bapo without it.",
    )


def quadrants(arms: Sequence[Arm]) -> Figure:
    """The Entropy-Clip Rule: what the clip lets through and what it blocks."""
    return figure(
        "quadrants",
        ("Entropy-Clip Rule", None),
        "Where the gradient mass r|A| lies by probability and advantage, mean over updates: what the clip retained and "
        "what it blocked; all eight sum to 1. H ↑ and H ↓: the direction in which the rule says the quadrant pushes "
        "entropy. Last, its prediction per unit step on the logits: read the sign and compare sizes, not nats.",
        [
            *(
                _bars(arms, title, list(QUADRANTS.values()), [f"{name}_{fate}" for name in QUADRANTS])
                for fate, title in (("retained", "Retained, share of mass"), ("blocked", "Blocked, share of mass"))
            ),
            curves(arms, "predicted_entropy_change", "Predicted change of entropy"),
        ],
    )


def lengths(arms: Sequence[Arm]) -> Figure:
    """Figure 6: length by correctness."""
    return figure(
        "lengths",
        ("Length of correct and wrong responses", "figure 6"),
        "Mean length in tokens of the responses sampled in a step, by reward. Longer wrong responses mean "
        "more negative tokens.",
        [
            curves(arms, "length_correct", "Correct, tokens", lines="rollouts"),
            curves(arms, "length_wrong", "Wrong, tokens", lines="rollouts"),
        ],
    )


def fixed_clips(arms: Sequence[Arm]) -> Figure:
    """Figure 7: asymmetric fixed clips."""
    pairs = {index: pair for index, arm in enumerate(arms) if (pair := _fixed_clip(arm))}
    listed = "; ".join(
        f"{objective} {low:g}, {high:g}"
        for objective, low, high in sorted({(arms[index].objective, *pair) for index, pair in pairs.items()})
    )
    enough = len(set(pairs.values())) > 1
    return figure(
        "fixed-clips",
        ("Fixed clips, symmetric and not", "figure 7"),
        f"Only objectives whose bounds never move{f': {listed}' if enough else ''}.",
        [
            curves(arms, "reward", "Reward", lines="rollouts", only=pairs),
            curves(arms, "entropy", "Entropy, nats per token", only=pairs),
        ]
        if enough
        else [],
        reason="It needs runs with at least two different pairs of fixed bounds, such as grpo and clip_higher, or grpo "
        "with objective.options low and high.",
    )


def staleness(arms: Sequence[Arm]) -> Figure:
    """How old the trained tokens were."""
    totals = [[_sum_lists(run, "staleness_histogram") for run in arm.runs] for arm in arms]
    longest = max((_used(total) for group in totals for total in group), default=0)
    most = max((len(total) for group in totals for total in group), default=0)
    categories = [f"{age}+" if age == most - 1 else str(age) for age in range(longest)]
    series = [
        {"arm": index, "values": numbers(_mean_of([_shares(total)[:longest] for total in group if sum(total)]))}
        for index, group in enumerate(totals)
        if any(sum(total) for total in group)
    ]
    panel = {"kind": "bars", "title": "Share of tokens", "x": "updates between sampling and use", "series": series}
    return figure(
        "staleness",
        ("Staleness of trained tokens", None),
        "Tokens by the number of updates between sampling and use, over the whole run. The bound is "
        f"{' or '.join(str(b) for b in sorted({a.config['offpolicy']['max_staleness'] for a in arms}))} "
        "(offpolicy.max_staleness).",
        [panel | {"categories": categories}] if series else [],
    )


FIGURES: tuple[Callable[[Sequence[Arm]], Figure], ...] = (
    *(held_out, dynamics, by_staleness, under_partial, balance, bounds),
    *(ratio_profile, quadrants, lengths, fixed_clips, staleness),
)


# Panels


def curves(
    arms: Sequence[Arm],
    key: str,
    title: str,
    *,
    lines: Lines = "updates",
    marks: Sequence[dict[str, Any]] = (),
    only: Iterable[int] | None = None,
) -> Panel:
    """One metric over training: x of all runs of an arm, and each run's values there."""
    axis = "step" if lines == "rollouts" else "version"
    chosen = set(range(len(arms)) if only is None else only)
    series = []
    for index, arm in enumerate(arms):
        if index not in chosen:
            continue
        points = [
            {line[axis]: float(line[key]) for line in _lines(run, lines) if isinstance(line.get(key), int | float)}
            for run in arm.runs
        ]
        if any(points):
            series.append({"arm": index} | _aligned(points))
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


def _aligned(points: Sequence[dict[int, float]]) -> dict[str, Any]:
    """Runs on a common x, at most MAX_POINTS of it: stretches of equal length, each its mean, at its end."""
    last = max(max(values) for values in points if values)
    width = -(-last // MAX_POINTS) or 1
    runs = []
    for values in points:
        stretches: dict[int, list[float]] = {}
        for x, y in values.items():
            stretches.setdefault(-(-x // width) * width, []).append(y)
        runs.append({x: mean(ys) for x, ys in stretches.items()})
    at = sorted({x for values in runs for x in values})
    return {"x": at, "runs": [numbers(values.get(x) for x in at) for values in runs], "stretch": width}


def _profile(arms: Sequence[Arm], key: str, title: str) -> Panel:
    """Bins side by side, equally wide however much of the ratio they span; ticks are the edges between them."""
    bins = list(range(len(LOG_RATIO_EDGES) + 1))
    ticks = [{"at": index + 0.5, "text": f"{math.exp(edge):.2f}"} for index, edge in enumerate(LOG_RATIO_EDGES)]
    series = []
    for index, arm in enumerate(arms):
        runs = [_profile_of(run, key) for run in arm.runs if any(_sum_lists(run, "ratio_histogram"))]
        if runs:
            series.append({"arm": index, "x": bins, "runs": [numbers(values) for values in runs]})
    return {
        "kind": "profile",
        "title": title,
        "key": key,
        "x": "ratio",
        "log": key == "ratio_histogram",
        "ticks": ticks,
        "verticals": [_place(math.log(bound)) for bound in FIXED_CLIP],
        "series": series,
    }


def _place(log_ratio: float) -> float:
    """Where a log-ratio lies among equally wide bins."""
    after = bisect_right(LOG_RATIO_EDGES, log_ratio)
    low, high = LOG_RATIO_EDGES[after - 1], LOG_RATIO_EDGES[after]
    return after - 0.5 + (log_ratio - low) / (high - low)


def _profile_of(run: Run, key: str) -> list[float | None]:
    """A binned metric over a whole run: means weighted by the tokens behind them, or the share of tokens."""
    counts = _sum_lists(run, "ratio_histogram")
    if key == "ratio_histogram":
        values = _shares(counts)
    else:
        values = [0.0] * len(counts)
        for line in run.updates:
            for position, (count, value) in enumerate(zip(line["ratio_histogram"], line[key], strict=True)):
                values[position] += count * value / max(counts[position], 1)
    return [value if count >= FEW_TOKENS else None for value, count in zip(values, counts, strict=True)]


def _bars(arms: Sequence[Arm], title: str, categories: Sequence[str], keys: Sequence[str]) -> Panel:
    series = []
    for index, arm in enumerate(arms):
        runs = [[mean(run.series(key)) for key in keys] for run in arm.runs if all(run.series(key) for key in keys)]
        if runs:
            series.append({"arm": index, "values": numbers(_mean_of(runs))})
    return {"kind": "bars", "title": title, "x": "", "categories": list(categories), "series": series}


def _scores(arms: Sequence[Arm], k: str) -> list[Panel]:
    panels = []
    for key, title in (("avg", f"avg@{k} after training"), ("pass", f"pass@{k} after training")):
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


def figure(
    name: str,
    heading: tuple[str, str | None],  # ours, and the paper's number
    caption: str,
    panels: Sequence[Panel],
    *,
    reason: str = "These runs have logged none of it yet.",
    note: str | None = None,
) -> Figure:
    """A figure of the panels that have anything in them, or why there is none."""
    drawn = [panel for panel in panels if panel["series"]]
    return {
        "id": name,
        "title": heading[0],
        "paper": heading[1],
        "caption": caption,
        "note": note if drawn else reason,
        "panels": [{"id": f"{name}-{index}"} | panel for index, panel in enumerate(drawn)],
    }


# Small things


def _fixed_clip(arm: Arm) -> tuple[float, float] | None:
    pairs = {
        (round(low, 4), round(high, 4))
        for run in arm.runs
        for low, high in zip(run.series("clip_low"), run.series("clip_high"), strict=False)
    }
    return pairs.pop() if len(pairs) == 1 and arm.config["objective"]["name"] != "bapo" else None


def _sum_lists(run: Run, key: str) -> list[float]:
    """The sum of a histogram over updates."""
    listed = [line[key] for line in run.updates if isinstance(line.get(key), list)]
    return [float(sum(column)) for column in zip(*listed, strict=True)] if listed else []


def _shares(counts: Sequence[float]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts] if total else [0.0] * len(counts)


def _used(counts: Sequence[float]) -> int:
    """Bins up to the last that holds anything."""
    return max((position + 1 for position, count in enumerate(counts) if count), default=0)


def _mean_of(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]
