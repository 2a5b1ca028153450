"""What stands on top of the report: the answer in a sentence, and the table of differences behind it.

Several arms are compared, with the statistics and the words of `bapo compare` (`bapo.runs.comparison` and
`bapo.runs.verdict`). Arms meet within their setting; if there is one objective, its settings meet; if no two arms share
a setting or an objective, all of them meet. The first arm of the grid is what others are compared with, or grpo if
there is no grid. One arm is not compared: its verdict says from where to where it got.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bapo.report.arms import Arm, flat, grid_record, samples_per_problem
from bapo.report.signs import signs
from bapo.runs.comparison import FEWEST_SEEDS, Rows, compared, difference_cells, meeting_by, scores
from bapo.runs.exam import scored_on
from bapo.runs.read import Run
from bapo.runs.statistics import aggregate, mean, measures
from bapo.runs.verdict import differing_exam, judge


def verdict(arms: Sequence[Arm]) -> dict[str, Any]:
    """`verdict` and `differences` of the page. The first has lines, notes, warnings, and a tone."""
    reinforced = [arm for arm in arms if not arm.sft]
    lines: list[str] = []
    notes: list[str] = []
    differences: list[dict[str, Any]] = []
    tone = "plain"
    if len(reinforced) == 1:
        lines, notes, tone = _of_one(reinforced[0])
    elif reinforced:
        lines, notes, tone, differences = _of_many(reinforced)
    lines += [_of_sft(arm, named=len(arms) > 1) for arm in arms if arm.sft]
    shown = {"lines": lines, "notes": notes, "warnings": signs(arms), "tone": tone}
    return {"verdict": shown, "differences": differences}


# Several arms


def _of_many(arms: Sequence[Arm]) -> tuple[list[str], list[str], str, list[dict[str, Any]]]:
    placed = places(arms)
    runs = [
        {"table": table, "row": row, "seed": run.config["seed"], "measures": measures(run)}
        for (table, row), arm in placed.items()
        for run in arm.runs
        if run.summary
    ]
    rows: dict[str, list[str]] = {}
    for table, row in placed:
        rows.setdefault(table, []).append(row)
    tables = {table: compared(runs, [table], names, ("table", "row"))[table] for table, names in rows.items()}
    k = samples_per_problem(arms)
    temperatures = {arm.config["eval"]["temperature"] for arm in arms}
    found = judge(
        tables,
        k=int(k) if k.isdigit() else k,
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
        unlike={
            name: differing_exam([flat(arm.config) for (t, _), arm in placed.items() if t == name]) for name in rows
        },
        missing=_missing(arms),
    )
    return found.lines, [*found.details, *found.notes], "decided" if found.decided else "open", _differences(tables, k)


def places(arms: Sequence[Arm]) -> dict[tuple[str, str], Arm]:
    """(table, row) -> arm, in the order of the grid; the row that others are compared with comes first in its table."""
    record = grid_record(arms) or {}
    settings, objectives = (list(dict.fromkeys(getattr(arm, key) for arm in arms)) for key in ("setting", "objective"))
    by = meeting_by(settings, objectives)
    found = {(getattr(arm, by[0]), getattr(arm, by[1])): arm for arm in arms}
    if all(sum(table == other for other, _ in found) < 2 for table, _ in found):
        found = {("", f"{arm.objective}, {arm.setting}"): arm for arm in arms}

    def order(item: tuple[tuple[str, str], Arm]) -> tuple[int, int, bool]:
        arm = item[1]
        first = arm.config["objective"]["name"] != "grpo"
        return _place(record, "settings", arm.setting), _place(record, "objectives", arm.objective), first

    return dict(sorted(found.items(), key=order))


def _place(record: Mapping[str, Any], key: str, label: str) -> int:
    """Where a label stands in the record of the grid; 0 without one, which leaves the order as it is."""
    listed = record.get(key)
    return listed.index(label) if isinstance(listed, list) and label in listed else 0


def _missing(arms: Sequence[Arm]) -> int:
    """Runs of these arms that are not finished: those in the record of the grid, or those that were found."""
    finished = {(arm.setting, arm.objective, run.config["seed"]) for arm in arms for run in arm.runs if run.summary}
    shown = {(arm.setting, arm.objective) for arm in arms}
    wanted = {(arm.setting, arm.objective, run.config["seed"]) for arm in arms for run in arm.runs}
    listed = (grid_record(arms) or {}).get("runs")
    for run in listed if isinstance(listed, list) else []:
        place = tuple(str(run.get(key)) for key in ("setting", "objective")) if isinstance(run, dict) else None
        if place in shown and isinstance(run.get("seed"), int):
            wanted.add((*place, run["seed"]))
    return len(wanted - finished)


def _differences(tables: Mapping[str, Rows], k: str) -> list[dict[str, Any]]:
    """Tables with the same columns are one, whose rows begin with the name of their table."""
    joined: dict[tuple[str, ...], list[list[str]]] = {}
    for table, rows in tables.items():
        names = {name for row in rows.values() for name in row["measures"]}
        if cells := difference_cells(rows, scores(k, names)):
            headings, *found = [
                [f"{table}: {row[0]}" if len(tables) > 1 and row[0] else row[0], *row[1:]] for row in cells
            ]
            joined.setdefault(tuple(headings), []).extend(found)
    return [{"headings": list(headings), "rows": rows} for headings, rows in joined.items()]


# One arm


def _of_one(arm: Arm) -> tuple[list[str], list[str], str]:
    """Lines, notes and tone of the verdict on one configuration."""
    finished = [run for run in arm.runs if run.summary]
    if not finished:
        return _so_far(arm), [], "plain"
    k = arm.config["eval"]["k"]
    if len(finished) > 1:
        return _over_seeds(finished, k)
    after, before = finished[0].summary["after"], finished[0].summary["before"]
    temperature = arm.config["eval"]["temperature"]
    others = finished[0].summary.get("also_at", [])
    clauses: list[str] = []
    tones: list[str] = []
    for at, first, last in [
        (temperature, before, after),
        *((o["temperature"], o["before"], o["after"]) for o in others),
    ]:
        where = (f" at temperature {at:g}" if at else " with greedy sampling") if others else ""
        said, tone = _from_to(first, last, f"avg@{k}{where}" if not clauses else f"{where.strip()} it")
        clauses.append(said)
        tones.append(tone)
    known = _has_interval(before) and _has_interval(after)
    notes = [*_scored_on(finished), *(["In brackets: 95% intervals over problems."] if known else [])]
    notes.append("This is one run. Another seed may end elsewhere.")
    return [f"{'; '.join(clauses)}."], notes, tones[0]


def _scored_on(runs: Sequence[Run], *, seeds: bool = False) -> list[str]:
    found = [measures(run) for run in runs]
    problems, reaches = ([run[key] for run in found if key in run] for key in ("problems", "avg_reach"))
    said = scored_on(problems, reaches, seeds=seeds)
    return [said] if said else []


def _has_interval(line: Mapping[str, Any]) -> bool:
    return all(isinstance(line.get(key), int | float) for key in ("eval/avg_low", "eval/avg_high"))


def _from_to(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> tuple[str, str]:
    """From where to where the score got, and the tone of that."""
    same = _looks_equal(before["eval/avg"], after["eval/avg"])
    if not (_has_interval(before) and _has_interval(after)):
        if same:
            return f"{name} did not change: it is {after['eval/avg']:.3f}, as before training", "plain"
        return f"{name} went from {before['eval/avg']:.3f} to {after['eval/avg']:.3f}", "plain"
    one, two = (
        f"{line['eval/avg']:.3f} [{line['eval/avg_low']:.3f}, {line['eval/avg_high']:.3f}]" for line in (before, after)
    )
    if same:
        both = (
            f"it is {two}, as before training" if one == two else f"it was {one} before training and is {two} after it"
        )
        return f"{name} did not change: {both}", "open"
    if after["eval/avg_low"] > before["eval/avg_high"]:
        return f"{name} rose from {one} to {two}", "decided"
    if after["eval/avg_high"] < before["eval/avg_low"]:
        return f"{name} fell from {one} to {two}", "wrong"
    return f"{name} went from {one} to {two}, which may be chance", "open"


def _looks_equal(before: float, after: float) -> bool:
    """Whether two scores are the same in the three digits that are shown."""
    return f"{before:z.3f}" == f"{after:z.3f}"


def _over_seeds(runs: Sequence[Run], k: int) -> tuple[list[str], list[str], str]:
    found = [measures(run) for run in runs]
    before, after = mean([run["avg_before"] for run in found]), mean([run["avg"] for run in found])
    gained, half = aggregate([run["avg"] - run["avg_before"] for run in found])
    same = _looks_equal(before, after)
    sure = half is not None and len(found) >= FEWEST_SEEDS and abs(gained) > half and not same
    word = "went" if not sure else "rose" if gained > 0 else "fell"
    difference = f"{gained:+.3f}" + ("" if half is None or len(found) < FEWEST_SEEDS else f" ± {half:.3f}")
    line = f"avg@{k} {word} from {before:.3f} to {after:.3f} ({difference} over {len(found)} seeds)."
    if same:
        line = f"avg@{k} is {after:.3f} on average, as before training ({difference} over {len(found)} seeds)."
    enough = len(found) >= FEWEST_SEEDS
    notes = _scored_on(runs, seeds=enough)
    notes += [] if enough else ["Two seeds are too few to say what another one would give."]
    return [line], notes, "open" if not sure else "decided" if gained > 0 else "wrong"


def _so_far(arm: Arm) -> list[str]:
    """How far an unfinished run got: the reward over the first and over the last tenth of its steps."""
    run = max(arm.runs, key=lambda run: len(run.timing))
    logged = [float(line["reward"]) for line in run.rollouts if isinstance(line.get("reward"), int | float)]
    rewards = [reward for reward in logged if math.isfinite(reward)]
    if not rewards:
        return []
    tenth = max(1, len(rewards) // 10)
    first, last = mean(rewards[:tenth]), mean(rewards[-tenth:])
    went = f"has stayed at {last:z.3f}" if _looks_equal(first, last) else f"has gone from {first:.3f} to {last:.3f}"
    went = went if len(rewards) > 1 else f"is {last:z.3f}"
    return [
        f"After {len(run.timing)} of {run.planned} steps, the reward of sampled responses {went}. The score on "
        "held-out problems comes at the end."
    ]


def _of_sft(arm: Arm, *, named: bool) -> str:
    finished = [measures(run) for run in arm.runs if run.summary]
    name = f"Supervised, {arm.setting}: the" if named else "The"
    pairs = [(run["held_out_before"], run["held_out"]) for run in finished if "held_out" in run]
    if not finished:
        return f"{name} run is not finished."
    if not pairs:
        return f"{name} run is finished. Nothing was held out, so there is no score."
    before, after = mean([pair[0] for pair in pairs]), mean([pair[1] for pair in pairs])
    over = f", the mean over {len(pairs)} seeds" if len(pairs) > 1 else ""
    if _looks_equal(before, after):
        return f"{name} held-out loss did not change: it is {after:.3f} nats per token, as before training{over}."
    word = "fell" if after < before else "rose"
    return f"{name} held-out loss {word} from {before:.3f} to {after:.3f} nats per token{over}."
