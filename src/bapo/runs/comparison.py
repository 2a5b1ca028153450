"""Arms against each other, over seeds: the numbers of a comparison, and the verdict that says them in words.

    tables = compare_arms(runs, ["reuse-4"], ["grpo", "push-once"])
    judge(tables, configs).lines     # ["push-once beats grpo (+0.043 ± 0.011 avg@8 over 5 seeds)."]

`bapo compare` prints both, and the report shows both, so they say the same. A run is a mapping with setting, objective,
seed and measures (`bapo.runs.statistics.measures`). Only finished runs have measures, so only they count.

The interval is Student's t over seeds: it says what other seeds of the same grid would give, which the intervals over
problems in each run do not. A single seed has none. A seed gives every arm the same problems in the same order, so a
difference within a seed is less noisy than the difference of two means.

Every arm is judged against the first arm of its table by avg@k at each temperature; the first temperature that decides
something comes first. Three seeds or more decide if the 95% interval of their difference excludes zero. Otherwise the
arms cannot be told apart, and one or two seeds decide nothing. pass@k is mentioned where it decides something else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bapo.config.numerals import counted
from bapo.runs.statistics import FEWEST_SEEDS, aggregate

Measures = Mapping[str, float]
Value = Mapping[str, Any]  # mean, half_width
Rows = dict[str, Any]  # arm -> seeds, measures (name -> Value), and differences from the first arm: seeds, measures
Kind = Literal["ahead", "behind", "same", "open", "few", "none"]

MANY = 10  # from so many judged differences on, the verdict says that some stand out by chance
FEW_PROBLEMS = 100
"""Fewer problems are few. From 100, the 95% interval of a mean of rewards from 0 to 1 reaches at most 0.1 to each side:
1.96 · √(0.25 / 100)."""
DECIDED: tuple[Kind, ...] = ("ahead", "behind")
JUDGED: tuple[Kind, ...] = (*DECIDED, "same", "open")
WORDS: dict[Kind, tuple[str, str]] = {
    "ahead": ("beats", "beat"),
    "behind": ("falls short of", "fall short of"),
    "same": ("has exactly the score of", "have exactly the score of"),
    "open": ("cannot be told apart from", "cannot be told apart from"),
    "few": ("has too few seeds to be compared with", "have too few seeds to be compared with"),
    "none": ("has no score in a seed of", "have no score in a seed of"),
}
"""What is said of one arm, or of several, and the first one, in the order of a sentence."""
EXAM_KEYS = (
    *("task.name", "task.test", "task.prompt_column", "task.answer_column", "task.template", "task.max_prompt_tokens"),
    *("task.reward", "task.reward_weights", "task.judge.model", "task.judge.rubric", "task.gym", "task.gym_test"),
    *("rollout.max_tokens", "eval.problems", "eval.k", "eval.temperature"),
)
"""Keys of a configuration that decide what a score means. Runs that differ in one cannot be compared by it."""
HELD_OUT_KEYS = ("task.holdout", "task.train")
"""Where a share of the training problems is held out, these decide it, too."""


# The numbers


def compare_arms(
    runs: Sequence[Mapping[str, Any]],
    tables: Sequence[str],
    arms: Sequence[str],
    by: tuple[str, str] = ("setting", "objective"),
) -> dict[str, Rows]:
    """Table -> arm -> its numbers over seeds. `by`: the keys of a run that name its table and its arm."""
    measured: dict[str, dict[str, dict[int, Measures]]] = {table: {arm: {} for arm in arms} for table in tables}
    for run in runs:
        measured.get(run[by[0]], {}).get(run[by[1]], {})[run["seed"]] = run["measures"]
    return {table: against_first(rows) for table, rows in measured.items()}


def against_first(measured: Mapping[str, Mapping[int, Measures]]) -> Rows:
    """Arm -> its seeds, its measures, and the differences from the first arm over the seeds that both have.

    `measured`: arm -> seed -> measures. A measure that one of the runs lacks is left out.
    """
    rows: Rows = {}
    first = next(iter(measured.values()))
    for arm, mine in measured.items():
        rows[arm] = {"seeds": len(mine), "measures": _mean_over_seeds(list(mine.values()))}
        if mine is not first:
            both = {seed: (measures, first[seed]) for seed, measures in mine.items() if seed in first}
            less = [{name: one[name] - two[name] for name in one if name in two} for one, two in both.values()]
            rows[arm]["differences"] = {"seeds": list(both), "measures": _mean_over_seeds(less)}
    return rows


def _mean_over_seeds(runs: Sequence[Measures]) -> dict[str, Value]:
    """Mean and interval of each measure that all of these runs have."""
    shared = [name for name in (runs[0] if runs else ()) if all(name in run for run in runs)]
    found = {name: aggregate([run[name] for run in runs]) for name in shared}
    return {name: {"mean": mean, "half_width": half} for name, (mean, half) in found.items()}


def meeting_by(settings: Sequence[str], objectives: Sequence[str]) -> tuple[str, str]:
    """Where arms meet: objectives within a setting, or, if there is only one objective, settings within it."""
    return ("objective", "setting") if len(objectives) == 1 and len(settings) > 1 else ("setting", "objective")


def measure_names(rows: Rows) -> set[str]:
    """The measures that at least one arm of a table has."""
    return {name for row in rows.values() for name in row["measures"]}


def scores(k: int | str, names: set[str]) -> dict[str, str]:
    """Heading -> measure, for the scores on held-out problems after training. Greedy ones have no pass@k."""
    listed = {f"avg@{k}": "avg", f"pass@{k}": "pass"}
    for temperature in _temperatures(names):
        listed[f"avg, temp. {temperature}"] = f"avg_at_{temperature}"
        if float(temperature):
            listed[f"pass, temp. {temperature}"] = f"pass_at_{temperature}"
    return listed | {"entropy": "entropy"}


def _temperatures(names: set[str]) -> list[str]:
    """The further temperatures that these measures belong to."""
    return sorted(name.removeprefix("avg_at_") for name in names if name.startswith("avg_at_"))


def difference_cells(rows: Rows, k: int | str) -> list[list[str]]:
    """The table of differences from the first arm, as text: headings, then the arms that share two seeds with it.

    Empty if there is no such arm.
    """
    first, *others = rows
    listed = scores(k, measure_names(rows))
    cells = []
    for name in others:
        seeds, measures = (rows[name]["differences"][key] for key in ("seeds", "measures"))
        if len(seeds) > 1:
            shown = [_difference(measures.get(measure), len(seeds)) for measure in listed.values()]
            cells.append([f"{name} - {first}", str(len(seeds)), *shown])
    return [["", "seeds", *listed], *cells] if cells else []


def _difference(value: Value | None, seeds: int) -> str:
    """A difference as a cell: with a star if its interval excludes zero."""
    if value is None or value["half_width"] is None:
        return "–"
    star = "" if seeds < FEWEST_SEEDS else "*" if _excludes_zero(value) else " "
    return f"{_signed(value, seeds)}{star}"


def _signed(value: Value, seeds: int) -> str:
    """`+0.043 ± 0.011`. The interval of two seeds is wider than all that can happen, so it is left out."""
    sure = value["half_width"] is not None and seeds >= FEWEST_SEEDS
    return f"{value['mean']:+z.3f}" + (f" ± {value['half_width']:.3f}" if sure else "")


def _excludes_zero(value: Value) -> bool:
    """Whether the interval of a difference excludes zero. It does not if there is no interval."""
    return value["half_width"] is not None and bool(abs(value["mean"]) > value["half_width"])


# The words


@dataclass(frozen=True)
class Verdict:
    """What a comparison shows."""

    lines: list[str]
    """One per table, in their order; each begins with the name of its table if there are several."""
    details: list[str]
    """What the lines leave out, one per table: other temperatures, and pass@k."""
    decided: bool
    """Whether any difference is decided."""
    notes: list[str] = field(default_factory=list)
    """What limits the lines: how many problems were scored, missing runs, and how many differences were judged."""


class Outcome(NamedTuple):
    """One arm against the first one, by one measure."""

    name: str
    kind: Kind
    mean: float = 0.0
    shown: str = ""
    """The difference with its interval."""
    seeds: int = 0
    """Seeds that both have."""


def judge(
    tables: Mapping[str, Rows],
    configs: Mapping[str, Sequence[Mapping[str, Any]]],  # table -> the configurations of its runs, under dotted keys
    *,
    missing: int = 0,  # runs that are not finished
) -> Verdict:
    """The verdict on each table that has at least two arms."""
    k, temperature = (shared(configs, key) for key in ("eval.k", "eval.temperature"))
    contested = {table: rows for table, rows in tables.items() if len(rows) > 1}
    lines, details, scored, outcomes = [], [], [], []
    for table, rows in contested.items():
        named = f"{table}: " if len(contested) > 1 else ""
        first, *others = configs[table]
        exam = (*EXAM_KEYS, *HELD_OUT_KEYS) if any(one.get("task.holdout") for one in configs[table]) else EXAM_KEYS
        if keys := [key for key in exam if any((one.get(key) or None) != (first.get(key) or None) for one in others)]:
            lines.append(f"{named}The scores cannot be compared, because the runs differ in {_joined(keys)}.")
            continue
        text, more, found = _on_table(rows, k or "k", temperature)
        lines.append(f"{named}{text}")
        details += [f"{named}{' '.join(more)}"] if more else []
        scored += [{name: value["mean"] for name, value in row["measures"].items()} for row in rows.values()]
        outcomes += found
    judged = [outcome for outcome in outcomes if outcome.kind in JUDGED]
    notes = []
    if any(outcome.kind == "few" for outcome in outcomes):
        notes.append(f"Run at least {FEWEST_SEEDS} seeds to decide more.")
    decided = any(outcome.kind in DECIDED for outcome in judged)
    notes += scored_on(scored, seeds=bool(judged))
    if missing:
        runs = "One run is" if missing == 1 else f"{missing} runs are"
        notes.append(f"{runs} not finished, so this may change.")
    if decided and len(judged) >= MANY:
        chance = f"so about {max(1, round(len(judged) / 20))} may stand out by chance"
        notes.append(f"{len(judged)} differences were judged, each at 95%, {chance}.")
    return Verdict(lines, details, decided, notes)


def shared(configs: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> Any:
    """The value that a key has in all configurations; None if they differ in it."""
    values = {config[key] for listed in configs.values() for config in listed}
    return values.pop() if len(values) == 1 else None


def scored_on(measured: Sequence[Measures], *, seeds: bool) -> list[str]:
    """On how many held-out problems these runs or arms were scored, with a warning if these are few.

    All seeds of a task have the same held-out problems. So an interval over seeds says what other seeds would give on
    these problems, and not how far these are from all problems of the kind. With few of them, the second is the larger
    doubt. `seeds`: whether intervals over seeds stand beside this sentence. Nothing is said if the number is not known.
    """
    problems, reaches = (
        [one[key] for one in measured if math.isfinite(one.get(key, math.nan))] for key in ("problems", "avg_reach")
    )
    if not problems:
        return []
    fewest, most = round(min(problems)), round(max(problems))
    least = "" if fewest == most else f"{fewest:,} to "
    said = f"The scores are from {'only ' * (most < FEW_PROBLEMS)}{least}{counted(most, 'held-out problem')}."
    if fewest < FEW_PROBLEMS:
        said += f" Fewer than {FEW_PROBLEMS} are few"
        if reaches:
            said += f": over all problems of this kind, a score may be up to {max(reaches):.2f} higher or lower (95%)"
        said += ". Intervals over seeds leave this out, because every seed has the same problems." if seeds else "."
    return [said]


def _outcome(rows: Rows, name: str, measure: str) -> Outcome:
    """One arm of a table against the first one."""
    both = rows[name]["differences"]
    value, seeds = both["measures"].get(measure), len(both["seeds"])
    if value is None or not math.isfinite(value["mean"]):
        return Outcome(name, "none")
    kind: Kind = "behind" if value["mean"] < 0 else "ahead"
    if seeds < FEWEST_SEEDS:
        kind = "few"
    elif not _excludes_zero(value):
        kind = "same" if value["mean"] == value["half_width"] == 0 else "open"
    return Outcome(name, kind, value["mean"], _signed(value, seeds), seeds)


def _on_table(rows: Rows, k: int | str, temperature: float | None) -> tuple[str, list[str], list[Outcome]]:
    """The sentence about one table, further sentences, and every outcome by avg@k."""
    reference, *others = rows
    if not rows[reference]["seeds"]:
        return f"{reference} has no finished run, so there is nothing to measure the others by.", [], []
    further = {at_temperature(t): f"avg_at_{t}" for t in _temperatures(measure_names(rows))}
    at = "" if not further or temperature is None else at_temperature(temperature)
    found = {}
    for where, measure in {at: "avg", **further}.items():
        one = 1 if where == at_temperature(0) else k  # greedy samples of a problem are all the same
        found[f"avg@{one}{where}"] = [_outcome(rows, name, measure) for name in others]
    usual = next(iter(found.values()))
    lead = next((unit for unit, some in found.items() if any(one.kind in DECIDED for one in some)), next(iter(found)))
    units = [lead, *(unit for unit in found if unit != lead)]
    line, *details = [_sentence(found[unit], reference, unit) for unit in units]
    by_pass = [_outcome(rows, name, "pass") for name in others] if k != 1 else []
    news = [by for one, by in zip(usual, by_pass, strict=False) if by.kind in DECIDED and by.kind != one.kind]
    details += [_sentence(news, reference, f"pass@{k}{at}")] if news else []
    return line, [*_all_fell(rows, k), *details], [one for outcomes in found.values() for one in outcomes]


def _sentence(outcomes: Sequence[Outcome], reference: str, unit: str) -> str:
    """Who beats the reference, who falls short of it, and so on, the largest difference first."""
    clauses: list[str] = []
    said = ""
    for kind, (one, many) in WORDS.items():
        group = sorted((one for one in outcomes if one.kind == kind), key=lambda one: -abs(one.mean))
        if not group:
            continue
        clause = f"{_joined([one.name for one in group])} {many if group[1:] else one} {'it' if clauses else reference}"
        if kind != "none":
            seeds = " to ".join(dict.fromkeys(str(pick(one.seeds for one in group)) for pick in (min, max)))
            over = f" over {seeds} seed{'s' * (seeds != '1')}"
            shown = ", ".join(one.shown for one in group) + ("" if clauses else f" {unit}")
            clause, said = f"{clause} ({shown}{over if over != said else ''})", over
        clauses.append(clause)
    return "; ".join(clauses) + "."


def _all_fell(rows: Rows, k: int | str) -> list[str]:
    """A sentence if every arm, even the best one, ended below the score that it started with."""
    scores = {
        name: [row["measures"].get(key, {}).get("mean", math.nan) for key in ("avg_before", "avg")]
        for name, row in rows.items()
        if row["seeds"]
    }
    if len(scores) < 2 or not all(round(after, 3) < round(before, 3) for before, after in scores.values()):
        return []
    who = "Both arms" if len(scores) == 2 else f"All {len(scores)} arms"
    fell = _joined([f"{name} from {before:.3f} to {after:.3f}" for name, (before, after) in scores.items()])
    return [f"{who} ended below where they started: {fell} avg@{k}."]


def at_temperature(temperature: float | str) -> str:
    """` at temperature 0.6`, to follow a score."""
    value = float(temperature)
    return f" at temperature {value:g}" if value else " with greedy sampling"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
