"""The tables of a report: the overview of the arms, that of supervised runs, and what a cluster did.

The first two have one row per arm. A cell is a value to sort by, its text, and a second line of text below it. Runs of
`bapo sft` have no rewards, bounds or staleness, so they are not rows of the overview.

A run records of each actor of a cluster its restarts only (history.jsonl). Everything else in its logs is about all
rollout actors together, so that section has a table with one row per run, and one with a row per restarted actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bapo.report.arms import Arm, samples_per_problem
from bapo.runs import history
from bapo.runs.numbers import number
from bapo.runs.read import STOP_REASONS, Run, logged
from bapo.runs.statistics import (
    aggregate,
    first_and_last,
    mean,
    measures,
    sampled_responses,
    stop_shares,
    update_means,
    worst,
)

Cell = dict[str, Any]
Table = dict[str, Any]
Column = tuple[str, str, str]
"""Key, label and explanation."""
Facts = list[dict[str, float]]
"""The numbers of every run of an arm; a run lacks the numbers that it does not have."""

SEEDS: Column = ("seeds", "Seeds", "How many runs of this configuration there are. Small print: their seeds.")
GRAD_NORM: Column = ("max_grad_norm", "Max grad norm", "The largest gradient norm of any update, before it is clipped.")
TOKENS: Column = ("tokens", "Tokens", "Response tokens trained on, per run; a token counts each time it is used.")
SECONDS: Column = (
    "seconds",
    "Time",
    "Wall-clock time of training, per run. Small print: restarts on a cluster, if any.",
)
SFT = (
    ("setting", "Setting", "The model, or the keys in which the runs differ."),
    ("objective", "Objective", "sft: supervised training on demonstrations."),
    SEEDS,
    (
        "held_out",
        "Held-out loss",
        "How unexpected held-out responses are to the model after training, in nats per token; lower is better. "
        "Small print: before training.",
    ),
    (
        "perplexity",
        "Perplexity",
        "exp of the held-out loss: among how many equally likely tokens the model chooses, so to speak. Small "
        "print: before training.",
    ),
    (
        "accuracy",
        "Next token right",
        "How often the model's most likely token is the one in the held-out response. Small print: before training.",
    ),
    ("loss", "Training loss", "Mean over the last tenth of updates. Small print: over the first tenth."),
    GRAD_NORM,
    ("updates", "Updates", "Optimizer steps, per run."),
    TOKENS,
    SECONDS,
)
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
RESTARTED_ACTORS = (
    ("Run", "Objective, setting and seed"),
    ("Actor", "A rollout actor, or all learner ranks together"),
    ("Restarts", "How often it was started again"),
    ("After step", "Completed steps of the run at each restart"),
    ("Responses", "Unfinished responses that it had; they went on elsewhere"),
    ("Updates", "Updates that the learner took again"),
    ("Last reason", "Why it was started again the last time"),
)
LONGEST = 240
"""Characters of the reason of a restart that are shown; history.jsonl has it all."""


def overview(arms: Sequence[Arm]) -> Table:
    """The overview of these arms."""
    k = samples_per_problem(arms)
    columns = [
        (
            "setting",
            "Setting",
            "Where old data comes from: how often responses are reused, replay, partial rollout; or the keys in which "
            "the runs differ.",
        ),
        ("objective", "Objective", "The loss that was trained with."),
        SEEDS,
        (
            "avg",
            f"avg@{k}",
            f"How often an answer to a held-out problem is right after training: the mean reward over {k} samples of "
            "each. Small print: before training.",
        ),
        (
            "pass",
            f"pass@{k}",
            f"How often at least one of {k} samples solves a held-out problem after training. Small print: "
            "before training.",
        ),
        (
            "entropy",
            "Entropy",
            "How undecided the model is about its next token on held-out problems after training, in nats; 0 is "
            "certain. Small print: before training.",
        ),
        GRAD_NORM,
        (
            "staleness",
            "Staleness",
            "How old the oldest token was when it was trained on, in updates since it was sampled. Small print: the "
            "oldest age that the run allows.",
        ),
        (
            "share",
            "Positive share",
            "How much of the learning signal that the clip lets through comes from tokens with a positive advantage; "
            "the mean over all updates. Small print: over the first and over the last tenth of updates.",
        ),
        (
            "stop",
            "Search ended",
            "Where BAPO's search for clip bounds ended most often, as a share of updates. Small print: where else. "
            "Other objectives do not search.",
        ),
        (
            "responses",
            "Responses",
            "Responses sampled for training, per run, whether or not filtering kept them. Small print: response tokens "
            "trained on; a token counts each time it is used.",
        ),
        SECONDS,
    ]
    return _make_table(columns, [(index, arm, _overview_cells(arm)) for index, arm in enumerate(arms)])


def sft_overview(arms: Sequence[Arm]) -> Table:
    """One row per supervised arm. The others are left out, so that an arm keeps its number."""
    return _make_table(SFT, [(index, arm, _sft_cells(arm)) for index, arm in enumerate(arms) if arm.sft])


def _make_table(columns: Sequence[Column], rows: Sequence[tuple[int, Arm, dict[str, Cell]]]) -> Table:
    """A table from its columns and its rows: number of the arm, the arm, cells by key."""
    several = any(len(arm.runs) > 1 for _, arm, _ in rows)
    over_seeds = (
        "Mean over seeds ± half width of its 95% interval (Student's t; wide with two seeds). " if several else ""
    )
    return {
        "columns": [{"key": key, "label": label, "help": explanation} for key, label, explanation in columns],
        "rows": [{"arm": index, "cells": cells} for index, _, cells in rows],
        "caption": f"{over_seeds}{'Click a heading to sort.' if len(rows) > 1 else ''}".strip(),
    }


def _overview_cells(arm: Arm) -> dict[str, Cell]:
    facts = [_facts(run) for run in arm.runs]
    shared = _shared_cells(arm, facts)
    tokens = shared.pop("tokens")
    return {
        **shared,
        "avg": _estimate_cell(facts, "avg", before="avg_before"),
        "pass": _estimate_cell(facts, "pass", before="pass_before"),
        "entropy": _estimate_cell(facts, "entropy", before="entropy_before"),
        "staleness": _staleness(arm, facts),
        "share": _estimate_cell(facts, "share") | {"below": _share_ends(facts)},
        "stop": _stop(facts),
        "responses": _mean_cell(facts, "responses", _count) | {"below": f"{tokens['text']} tokens"},
    }


def _facts(run: Run) -> dict[str, float]:
    """What the overview says about one run. An unfinished run has no score after training."""
    facts = _common_facts(run) | update_means(run) | stop_shares(run)
    if not run.summary and run.evals and run.evals[0]["step"] == 0:
        first = run.evals[0]
        before = {"avg_before": "eval/avg", "pass_before": "eval/pass", "entropy_before": "eval/entropy"}
        facts |= {name: float(first[key]) for name, key in before.items() if isinstance(first.get(key), int | float)}
    if ages := run.series("staleness_max"):
        facts["staleness_max"] = worst(ages)
    if responses := sampled_responses(run):
        facts["responses"] = float(responses[-1])
    return facts | _ends(run, "share", "share")


def _staleness(arm: Arm, facts: Facts) -> Cell:
    ages = _of(facts, "staleness_max")
    oldest = worst(ages) if ages else math.nan
    return _cell(number(oldest), f"{oldest:.0f}" if ages else "–", f"bound {arm.config['offpolicy']['max_staleness']}")


def _share_ends(facts: Facts) -> str:
    """The mean over seeds at the start and at the end of training."""
    first, last = (_mean_cell(facts, f"share_{end}", "{:.3f}".format)["text"] for end in ("first", "last"))
    return f"{first} → {last}" if _of(facts, "share_last") else ""


def _stop(facts: Facts) -> Cell:
    """The most frequent reason; the others below."""
    shares = {name: mean(found) for name in STOP_REASONS if (found := _of(facts, f"stop_{name}"))}
    reasons = sorted(((share, name) for name, share in shares.items() if share > 0), reverse=True)
    if not reasons:
        return _cell(None, "–")
    first, *others = [f"{name.replace('_', ' ')} {share:.0%}" for share, name in reasons]
    return _cell(reasons[0][0], first, ", ".join(others))


def _sft_cells(arm: Arm) -> dict[str, Cell]:
    facts = [
        _common_facts(run) | _ends(run, "imitation/loss", "loss") | {"updates": float(len(run.updates))}
        for run in arm.runs
    ]
    return {
        **_shared_cells(arm, facts),
        "held_out": _estimate_cell(facts, "held_out", before="held_out_before"),
        "perplexity": _estimate_cell(facts, "perplexity", before="perplexity_before"),
        "accuracy": _estimate_cell(facts, "accuracy", before="accuracy_before"),
        "loss": _estimate_cell(facts, "loss_last", before="loss_first"),
        "updates": _mean_cell(facts, "updates", _count),
    }


# Cells that both tables have, and how the numbers of several runs become text


def _common_facts(run: Run) -> dict[str, float]:
    """The measures of a finished run; of any run its largest gradient norm, its tokens and its seconds."""
    norms = run.series("grad_norm")
    return {
        **(measures(run) if run.summary else {}),
        **({"max_grad_norm": worst(norms)} if norms else {}),
        "tokens": sum(run.series("tokens")),
        "seconds": sum(logged(run.timing, "seconds")),
    }


def _ends(run: Run, key: str, name: str) -> dict[str, float]:
    """`NAME_first` and `NAME_last`: means of a metric over the first and the last tenth of the updates that have it."""
    series = run.series(key)
    return dict(zip((f"{name}_first", f"{name}_last"), first_and_last(series), strict=True)) if series else {}


def _of(facts: Facts, key: str) -> list[float]:
    """One number, of the runs that have it."""
    return [run[key] for run in facts if key in run]


def _shared_cells(arm: Arm, facts: Facts) -> dict[str, Cell]:
    """The cells that both tables have: setting, objective, seeds, gradient norm, tokens and time."""
    unfinished = sum(not run.summary for run in arm.runs)
    seeds = f"seed {', '.join(str(run.config['seed']) for run in arm.runs)}"
    return {
        "setting": _cell(arm.setting, arm.setting),
        "objective": _cell(arm.objective, arm.objective),
        "seeds": _cell(len(arm.runs), str(len(arm.runs)), f"{seeds}; {unfinished} unfinished" if unfinished else seeds),
        "max_grad_norm": _estimate_cell(facts, "max_grad_norm", digits=2),
        "tokens": _mean_cell(facts, "tokens", _count),
        "seconds": _mean_cell(facts, "seconds", _duration) | {"below": _restarts(arm.runs)},
    }


def _cell(value: Any, text: str, below: str = "") -> Cell:
    return {"value": value, "text": text, "below": below}


def _estimate_cell(facts: Facts, key: str, *, before: str = "", digits: int = 3) -> Cell:
    """Mean and interval over runs; below them the same of the number `before`."""
    values, first = _of(facts, key), _of(facts, before)
    below = f"from {estimate(first, digits)}" if first else ""
    return _cell(number(aggregate(values)[0]), estimate(values, digits), below)


def _mean_cell(facts: Facts, key: str, say: Callable[[float], str]) -> Cell:
    """The mean over runs, as `say` puts it."""
    values = _of(facts, key)
    middle = mean(values)
    return _cell(number(middle), say(middle) if math.isfinite(middle) else "nan" if values else "–")


def _restarts(runs: Sequence[Run]) -> str:
    """How often actors of a cluster were restarted, which costs time; nothing if none was."""
    counts = [counts for run in runs if isinstance(counts := run.summary.get("restarts"), dict)]
    count = sum(value for found in counts for value in found.values() if isinstance(value, int))
    return f"{count} restart{'s' * (count != 1)} of actors" if count else ""


def estimate(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half width of its 95% interval; a single value has no interval. "nan" if a value is not finite."""
    if not values:
        return "–"
    middle, half = aggregate(values)
    return f"{middle:.{digits}f}" + (f" ± {half:.{digits}f}" if half is not None else "")


def _count(value: float) -> str:
    """A count in three significant digits: `12`, `3.4 k`, `1.25 M`."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    """A time in its natural unit: `90 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


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
    restarted = [row for name, run in runs for row in _restarted(name, run)]
    several = sum(len(arm.runs) for arm in arms) > 1
    tables = [_cluster_table(CLUSTER_RUNS, [_row(name, run) for name, run in runs], named=several)]
    if restarted:
        tables.append(_cluster_table(RESTARTED_ACTORS, restarted, named=several))
    told = "No actor was restarted." if not restarted else "The second table has the actors that were restarted."
    return {
        "caption": "Rollout actors sample and learner ranks learn, in processes of their own. A run records the "
        f"restarts of each actor, and the other numbers for all of them together. {told}",
        "tables": tables,
    }


def _cluster_table(columns: Sequence[tuple[str, str]], rows: Sequence[list[str]], *, named: bool) -> dict[str, Any]:
    """Without the names of the runs if there is only one."""
    first = 0 if named else 1
    return {
        "headings": [list(column) for column in columns[first:]],
        "rows": [row[first:] for row in rows],
        "told": columns is RESTARTED_ACTORS,
    }


def _row(name: str, run: Run) -> list[str]:
    config = run.config["cluster"]
    gaps = logged(run.rollouts, "rollout/probe_gap")
    restarts = sum(history.restarts(run.path).values())
    return [
        name,
        f"{config['rollouts']} × {config['engine']}",
        str(config["learners"]),
        str(config["ahead"]),
        _share(_over_time(run, "sampling_share")),
        _share(_over_time(run, "rollout_seconds", each_second=False)),
        "–" if (speed := _over_time(run, "tokens_per_second")) is None else _count(speed),
        f"{worst(gaps):.2g}" if gaps else "–",
        str(restarts),
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _over_time(run: Run, key: str, *, each_second: bool = True) -> float | None:
    """The mean of a figure over the seconds of training; None if it is not logged. A figure that is not `each_second`
    is a number of seconds of its step."""
    logged = [line for line in run.timing if all(isinstance(line.get(name), int | float) for name in (key, "seconds"))]
    seconds = sum(line["seconds"] for line in logged)
    if not seconds:
        return None
    return float(sum(line[key] * (line["seconds"] if each_second else 1) for line in logged) / seconds)


def _restarted(name: str, run: Run) -> list[list[str]]:
    """One row per actor that was restarted, by name."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in history.read(run.path):
        if line.get("event") == "restart":
            lines.setdefault(str(line.get("who")), []).append(line)
    ordered = sorted(lines, key=lambda who: (len(who), who))  # rollout 2 before rollout 10
    return [[name, *_actor(who, lines[who])] for who in ordered]


def _actor(who: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    def total(key: str) -> str:
        return str(sum(value for line in lines if isinstance(value := line.get(key), int)) or "")

    why = " ".join(str(lines[-1].get("why", "")).split())
    return [
        "learner ranks" if who == history.LEARNER else who,
        str(len(lines)),
        ", ".join(dict.fromkeys(str(line.get("step", "–")) for line in lines)),
        total("responses"),
        total("updates"),
        why if len(why) <= LONGEST else f"{why[: LONGEST - 1]}…",
    ]
