"""What the report says about runs on a cluster: how busy the actors were, who waited for whom, and what was restarted.

Of each actor, a run records its restarts only (history.jsonl). Everything else in its logs is about all rollout actors
together, so the first table has one row per run, and the second one row per actor that was restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bapo.report.arms import Arm
from bapo.report.cells import count
from bapo.runs import history
from bapo.runs.read import Run
from bapo.runs.statistics import worst

LONGEST = 240
"""Characters of a reason that are shown; history.jsonl has it all."""
Grid = dict[str, Any]  # headings (text and explanation), rows, and whether the last column has sentences (told)


def cluster(arms: Sequence[Arm]) -> dict[str, Any] | None:
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
    tables = [_table(RUNS, [_row(name, run) for name, run in runs], named=several)]
    if restarted:
        tables.append(_table(RESTARTED, restarted, named=several))
    told = "No actor was restarted." if not restarted else "The second table has the actors that were restarted."
    return {
        "caption": "Rollout actors sample and learner ranks learn, in processes of their own. A run records the "
        f"restarts of each actor, and the other numbers for all of them together. {told}",
        "tables": tables,
    }


RUNS = (
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
RESTARTED = (
    ("Run", "Objective, setting and seed"),
    ("Actor", "A rollout actor, or all learner ranks together"),
    ("Restarts", "How often it was started again"),
    ("After step", "Completed steps of the run at each restart"),
    ("Responses", "Unfinished responses that it had; they went on elsewhere"),
    ("Updates", "Updates that the learner took again"),
    ("Last reason", "Why it was started again the last time"),
)


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[list[str]], *, named: bool) -> Grid:
    """Without the names of the runs if there is only one."""
    first = 0 if named else 1
    return {
        "headings": [list(column) for column in columns[first:]],
        "rows": [row[first:] for row in rows],
        "told": columns is RESTARTED,
    }


def _row(name: str, run: Run) -> list[str]:
    config = run.config["cluster"]
    gaps = [float(line[key]) for line in run.rollouts if isinstance(line.get(key := "rollout/probe_gap"), int | float)]
    restarts = sum(history.restarts(run.path).values())
    return [
        name,
        f"{config['rollouts']} × {config['engine']}",
        str(config["learners"]),
        str(config["ahead"]),
        _share(_over_time(run, "sampling_share")),
        _share(_over_time(run, "rollout_seconds", each_second=False)),
        "–" if (speed := _over_time(run, "tokens_per_second")) is None else count(speed),
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
