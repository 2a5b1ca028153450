"""The tables of a report: the overview of the arms, that of supervised runs, and what a cluster did.

The first two have one row per arm. A cell is a value to sort by, its text, and a second line of text below it. Runs of
`bapo sft` have no rewards, bounds or staleness, so they are not rows of the overview.

A run records of each actor of a cluster its restarts only (history.jsonl). Everything else in its logs is about all
rollout actors together, so that section has a table with one row per run, and one with a row per restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bapo.pages import number
from bapo.report.arms import Arm, samples_per_problem
from bapo.runs import history
from bapo.runs.read import STOP_REASONS, Run, logged
from bapo.runs.statistics import (
    FEWEST_SEEDS,
    aggregate,
    estimate,
    mean,
    measures,
    worst,
)
from bapo.screen.terminal import duration, shortened

Cell = dict[str, Any]
Table = dict[str, Any]
Facts = list[dict[str, float]]  # the numbers of every run of an arm; a run lacks the numbers that it does not have

SEEDS = "Seeds: How many runs of this configuration there are. Small print: their seeds."
GRAD_NORM = "Max grad norm: The largest gradient norm of any update, before it is clipped."
SECONDS = "Time: Wall-clock time of training, per run. Small print: restarts on a cluster, if any."
SFT = {
    "setting": "Setting: The model, or the keys in which the runs differ.",
    "objective": "Objective: sft: supervised training on demonstrations.",
    "seeds": SEEDS,
    "held_out": "Held-out loss: How unexpected held-out responses are after training, in nats; lower is better.",
    "perplexity": "Perplexity: exp of the held-out loss: among how many equally likely tokens the model chooses.",
    "accuracy": "Next token right: How often the model's most likely token is the one in the held-out response.",
    "loss": "Training loss: Mean over the last tenth of updates. Small print: over the first tenth.",
    "max_grad_norm": GRAD_NORM,
    "updates": "Updates: Optimizer steps, per run.",
    "tokens": "Tokens: Response tokens trained on, per run; a token counts each time it is used.",
    "seconds": SECONDS,
}
CLUSTER_RUNS = (
    ("Run", "Objective, setting and seed"),
    ("Rollout actors", "Their number and their engine (cluster.rollouts, cluster.engine)"),
    ("Learner ranks", "cluster.learners"),
    ("Ahead", "How many rollouts sampling may run ahead of learning (cluster.ahead)"),
    ("Actors sampled", "Share of the time of training in which a rollout actor sampled, mean over actors"),
    ("Learner waited", "Share of the time of training in which the learner waited for a whole rollout"),
    ("Tokens/s", "Tokens sampled and trained on per second of training"),
    ("Log-prob gap", "Largest difference between an engine and the learner after new weights were loaded, in nats"),
    ("Restarts", "Of rollout actors and of the learner, through every resume"),
)
RESTARTS = (
    ("Run", "Objective, setting and seed"),
    ("Actor", "A rollout actor, or all learner ranks together"),
    ("After step", "Completed steps of the run"),
    ("Responses", "Unfinished responses that it had; they went on elsewhere"),
    ("Updates", "Updates that the learner took again"),
    ("Reason", "Why it was started again"),
)
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_RESTARTS = 50  # of each run; history.jsonl has all
LONGEST = 240  # characters of the reason of a restart that are shown; history.jsonl has it all


def overview(arms: Sequence[Arm]) -> Table:
    """The overview of these arms."""
    k = samples_per_problem(arms)
    columns = {
        "setting": "Setting: Where old data comes from: reuse, replay, partial rollout; or what else differs.",
        "objective": "Objective: The loss that was trained with.",
        "seeds": SEEDS,
        "avg": f"avg@{k}: Mean reward on held-out problems after training, over {k} samples of each.",
        "pass": f"pass@{k}: How often at least one of {k} samples solves a held-out problem after training.",
        "entropy": "Entropy: How undecided the model is about its next token after training, in nats; 0 is certain.",
        "max_grad_norm": GRAD_NORM,
        "staleness": "Staleness: How old the oldest token was when it was trained on, in updates since it was sampled. "
        "Small print: the oldest age that the run allows.",
        "share": "Positive share: How much of the learning signal that the clip lets through comes from tokens with a "
        "positive advantage; the mean over all updates. Small print: over the first and over the last tenth.",
        "stop": "Search ended: Where BAPO's search for clip bounds ended most often, as a share of updates. Small "
        "print: where else. Other objectives do not search.",
        "responses": "Responses: Responses sampled for training, per run, whether or not filtering kept them. Small "
        "print: response tokens trained on; a token counts each time it is used.",
        "seconds": SECONDS,
    }
    return _make_table(columns, dict(enumerate(arms)))


def sft_overview(arms: Sequence[Arm]) -> Table:
    """One row per supervised arm. The others are left out, so that an arm keeps its number."""
    return _make_table(SFT, {index: arm for index, arm in enumerate(arms) if arm.sft})


def _make_table(columns: Mapping[str, str], arms: Mapping[int, Arm]) -> Table:
    """A table with one row per arm. A column that is not in CELLS has an estimate, with `KEY_before` below it.

    `columns`: key -> label and explanation.
    """
    told = {key: text.partition(": ") for key, text in columns.items()}
    before = {key: "" if key in CELLS else " Small print: before training." for key in columns}
    caption = [*_of_seeds([len(arm.runs) for arm in arms.values()]), *["Click a heading to sort."] * (len(arms) > 1)]
    rows = []
    for index, arm in arms.items():
        facts = [measures(run) for run in arm.runs]
        cells = {
            key: CELLS[key](arm, facts) if key in CELLS else _estimate_cell(facts, key, before=f"{key}_before")
            for key in columns
        }
        rows.append({"arm": index, "cells": cells})
    return {
        "columns": [{"key": key, "label": label, "help": said + before[key]} for key, (label, _, said) in told.items()],
        "rows": rows,
        "caption": " ".join(caption),
    }


def _of_seeds(counts: Sequence[int]) -> list[str]:
    """What the numbers of arms with so many seeds are."""
    said = []
    if max(counts, default=0) >= FEWEST_SEEDS:
        said.append("Mean over seeds ± half width of its 95% interval (Student's t), or its ends in brackets.")
    if 2 in counts:
        said.append("Two seeds are too few for an interval, so they have a mean only.")
    return said


def _of(facts: Facts, key: str) -> list[float]:
    """One number, of the runs that have it."""
    return [run[key] for run in facts if key in run]


def _seeds(arm: Arm, _: Facts) -> Cell:
    unfinished = sum(not run.summary for run in arm.runs)
    seeds = f"seed {', '.join(str(run.config['seed']) for run in arm.runs)}"
    return _cell(len(arm.runs), str(len(arm.runs)), f"{seeds}; {unfinished} unfinished" if unfinished else seeds)


def _staleness(arm: Arm, facts: Facts) -> Cell:
    ages = _of(facts, "staleness_max")
    oldest = worst(ages) if ages else math.nan
    return _cell(number(oldest), f"{oldest:.0f}" if ages else "–", f"bound {arm.config['offpolicy']['max_staleness']}")


def _share_cell(_: Arm, facts: Facts) -> Cell:
    """The mean over updates; below it the means over seeds at the start and at the end of training."""
    ends = [_mean_cell(facts, f"share_{end}", "{:.3f}".format)["text"] for end in ("first", "last")]
    return _estimate_cell(facts, "share") | {"below": " → ".join(ends) if _of(facts, "share_last") else ""}


def _stop(_: Arm, facts: Facts) -> Cell:
    """The most frequent reason; the others below."""
    shares = {name: mean(found) for name in STOP_REASONS if (found := _of(facts, f"stop_{name}"))}
    reasons = sorted(((share, name) for name, share in shares.items() if share > 0), reverse=True)
    if not reasons:
        return _cell(None, "–")
    first, *others = [f"{name.replace('_', ' ')} {share:.0%}" for share, name in reasons]
    return _cell(reasons[0][0], first, ", ".join(others))


def _responses(_: Arm, facts: Facts) -> Cell:
    tokens = _mean_cell(facts, "tokens", _count)["text"]
    return _mean_cell(facts, "responses", _count) | {"below": f"{tokens} tokens"}


def _seconds(arm: Arm, facts: Facts) -> Cell:
    """The time; below it how often actors of a cluster were restarted, which costs time, if any was."""
    counts = [counts for run in arm.runs if isinstance(counts := run.summary.get("restarts"), dict)]
    count = sum(value for found in counts for value in found.values() if isinstance(value, int))
    below = f"{count} restart{'s' * (count != 1)} of actors" if count else ""
    return _mean_cell(facts, "seconds", duration) | {"below": below}


CELLS: dict[str, Callable[[Arm, Facts], Cell]] = {
    "setting": lambda arm, _: _cell(arm.setting, arm.setting),
    "objective": lambda arm, _: _cell(arm.objective, arm.objective),
    "seeds": _seeds,
    "max_grad_norm": lambda _, facts: _estimate_cell(facts, "max_grad_norm", digits=2),
    "staleness": _staleness,
    "share": _share_cell,
    "stop": _stop,
    "responses": _responses,
    "tokens": lambda _, facts: _mean_cell(facts, "tokens", _count),
    "updates": lambda _, facts: _mean_cell(facts, "updates", _count),
    "loss": lambda _, facts: _estimate_cell(facts, "loss_last", before="loss_first"),
    "seconds": _seconds,
}


def _cell(value: Any, text: str, below: str = "") -> Cell:
    return {"value": value, "text": text, "below": below}


def _estimate_cell(facts: Facts, key: str, *, before: str = "", digits: int = 3) -> Cell:
    """Mean and interval over runs; below them the same of the number `before`."""
    values, first = _of(facts, key), _of(facts, before)
    below = f"from {_estimate(before, first, digits)}" if first else ""
    return _cell(number(aggregate(values)[0]), _estimate(key, values, digits), below)


def _mean_cell(facts: Facts, key: str, say: Callable[[float], str]) -> Cell:
    """The mean over runs, as `say` puts it."""
    values = _of(facts, key)
    middle = mean(values)
    return _cell(number(middle), say(middle) if math.isfinite(middle) else "nan" if values else "–")


def _estimate(measure: str, values: Sequence[float], digits: int) -> str:
    """Mean and interval of these values; "nan" if one is not finite."""
    return estimate(measure, *aggregate(values), len(values), digits) if values else "–"


def _count(value: float) -> str:
    """A count in three significant digits: `12`, `3.4 k`, `1.25 M`."""
    limit, unit = next(((limit, unit) for limit, unit in UNITS if value >= limit), (1, ""))
    return f"{value / limit:.3g} {unit}" if unit else f"{value:.0f}"


# What a cluster did


def cluster_tables(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """The section about the cluster; None if no run had one."""
    runs = [
        (f"{arm.objective}, {arm.setting}, seed {run.config['seed']}", run)
        for arm in arms
        for run in arm.runs
        if run.config.get("cluster", {}).get("rollouts")
    ]
    if not runs:
        return None
    restarted = [row for name, run in runs for row in list(_restarted(name, run))[-MOST_RESTARTS:]]
    first = 0 if sum(len(arm.runs) for arm in arms) > 1 else 1  # a single run needs no name
    tables = [
        {
            "headings": [list(column) for column in columns[first:]],
            "rows": [row[first:] for row in rows],
            "told": columns is RESTARTS,
        }
        for columns, rows in ((CLUSTER_RUNS, [_row(*named) for named in runs]), (RESTARTS, restarted))
        if rows
    ]
    told = "No actor was restarted." if not restarted else "The second table has the restarts."
    return {
        "caption": "Rollout actors sample and learner ranks learn, in processes of their own. A run records the "
        f"restarts of each actor, and the other numbers for all of them together. {told}",
        "tables": tables,
    }


def _row(name: str, run: Run) -> list[str]:
    config = run.config["cluster"]
    gaps = logged(run.rollouts, "rollout/probe_gap")
    seconds = sum(logged(run.timing, "seconds"))
    sampled, speed = (_over_time(run, key) for key in ("sampling_share", "tokens_per_second"))
    waited = sum(logged(run.timing, "rollout_seconds")) / seconds if seconds else None
    return [
        name,
        f"{config['rollouts']} × {config['engine']}",
        *(str(config[key]) for key in ("learners", "ahead")),
        *("–" if share is None else f"{share:.0%}" for share in (sampled, waited)),
        "–" if speed is None else _count(speed),
        f"{worst(gaps):.2g}" if gaps else "–",
        str(sum(history.restarts(run.path).values())),
    ]


def _over_time(run: Run, key: str) -> float | None:
    """The mean of a figure over the seconds of training; None if it is not logged."""
    timed = [line for line in run.timing if all(isinstance(line.get(name), int | float) for name in (key, "seconds"))]
    seconds = sum(line["seconds"] for line in timed)
    return float(sum(line[key] * line["seconds"] for line in timed) / seconds) if seconds else None


def _restarted(name: str, run: Run) -> Iterator[list[str]]:
    """One row per restart."""
    for line in history.read(run.path):
        if line.get("event") == "restart":
            who = "learner ranks" if line.get("who") == history.LEARNER else str(line.get("who"))
            counts = (str(line.get(key, "")) for key in ("step", "responses", "updates"))
            yield [name, who, *counts, shortened(str(line.get("why", "")), LONGEST)]
