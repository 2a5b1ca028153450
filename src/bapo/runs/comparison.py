"""Arms against each other, over seeds: the numbers of a comparison, and the verdict that says them in words.

    tables = compare_arms(runs, ["reuse-4"], ["grpo", "push-once"])
    judge(tables, configs).lines     # ["push-once beats grpo by 0.043 ± 0.011 avg@8 over 5 seeds."]

`bapo compare` prints both, and the report shows both, so they say the same. A run is a mapping with setting, objective,
seed and measures (`bapo.runs.statistics.measures`). Only finished runs have measures, so only they count.

The interval is Student's t over seeds: it says what other seeds of the same grid would give, which the intervals over
problems in each run do not. A single seed has none. A seed gives every arm the same problems in the same order, so a
difference within a seed is less noisy than the difference of two means.

Every arm is judged against the first arm of its table by avg@k at each temperature. Three seeds or more decide if the
95% interval of their difference excludes zero. Otherwise the arms cannot be told apart, and one or two seeds decide
nothing. pass@k is mentioned where it says something else than avg@k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bapo.config.numerals import counted
from bapo.runs.statistics import FEWEST_SEEDS, aggregate

Measures = Mapping[str, float]
Value = Mapping[str, Any]  # mean, half_width
Rows = dict[str, Any]  # arm -> seeds, measures (name -> Value), and differences from the first arm: seeds, measures
Kind = Literal["ahead", "behind", "open", "few", "one", "missing", "apart", "not a number", "not measured"]

MANY = 10  # from so many judged differences on, the verdict says that some stand out by chance
FEW_PROBLEMS = 100
"""Fewer problems are few. From 100, the 95% interval of a mean of rewards from 0 to 1 reaches at most 0.1 to each side:
1.96 · √(0.25 / 100)."""
DECIDED = ("ahead", "behind")
JUDGED = ("ahead", "behind", "open")
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
    if value is None or value["half_width"] is None:
        return "–"
    if seeds < FEWEST_SEEDS:
        return f"{value['mean']:+.3f}"
    return f"{value['mean']:+.3f} ± {value['half_width']:.3f}{'*' if _excludes_zero(value) else ' '}"


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
    """What the lines leave out, one per table: other temperatures if there are several arms, and pass@k."""
    decided: bool
    """Whether any difference is decided."""
    notes: list[str] = field(default_factory=list)
    """What limits the lines: how many problems were scored, missing runs, and how many differences were judged."""


@dataclass(frozen=True)
class Outcome:
    """One arm against the first one, by one measure."""

    name: str
    kind: Kind
    mean: float = math.nan
    half: float | None = None
    seeds: int = 0  # seeds that both have
    all_seeds: bool = True  # whether both have these seeds and no others

    @property
    def same(self) -> bool:
        """Whether both have the same score in every one of several seeds."""
        return self.kind == "open" and self.mean == self.half == 0

    @property
    def size(self) -> str:
        """The difference without its sign. The interval of two seeds is wider than all that can happen: left out."""
        shown = self.half is not None and self.seeds >= FEWEST_SEEDS
        return f"{abs(self.mean):.3f}" + (f" ± {self.half:.3f}" if shown else "")

    @property
    def signed(self) -> str:
        """The difference with its sign."""
        return f"{self.mean:+.3f}"[0] + self.size


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
    if any(outcome.kind in ("one", "few") for outcome in outcomes):
        if len(contested) > 1:
            notes.append(f"Run at least {FEWEST_SEEDS} seeds to decide more.")
        else:
            lines[0] += f" Run at least {FEWEST_SEEDS} seeds."
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
    """On how many held-out problems these runs or arms were scored, with a warning if that is little.

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
    first, row = next(iter(rows.values())), rows[name]
    seeds, value = row["differences"]["seeds"], row["differences"]["measures"].get(measure)
    if not row["seeds"]:
        return Outcome(name, "missing")
    if not seeds:
        return Outcome(name, "apart")
    if value is None:
        return Outcome(name, "not measured", seeds=len(seeds))
    kind: Kind = "behind" if value["mean"] < 0 else "ahead"
    if not math.isfinite(value["mean"]):
        kind = "not a number"
    elif len(seeds) < FEWEST_SEEDS:
        kind = "one" if len(seeds) == 1 else "few"
    elif not _excludes_zero(value):
        kind = "open"
    same_seeds = len(seeds) == row["seeds"] == first["seeds"]
    return Outcome(name, kind, value["mean"], value["half_width"], len(seeds), same_seeds)


def _on_table(rows: Rows, k: int | str, temperature: float | None) -> tuple[str, list[str], list[Outcome]]:
    """The sentence about one table, further sentences, and every outcome by avg@k."""
    reference, *others = rows
    if not rows[reference]["seeds"]:
        return f"{reference} has no finished run, so there is nothing to measure the others by.", [], []
    further = {at_temperature(t): f"avg_at_{t}" for t in _temperatures(measure_names(rows))}
    at = "" if not further or temperature is None else at_temperature(temperature)
    asked = {at: "avg", **further}
    found = {where: [_outcome(rows, name, measure) for name in others] for where, measure in asked.items()}
    first, *elsewhere = found.items()
    details = _all_fell(rows, k)
    if len(others) == 1:
        line = _duel(reference, k, list(found.items()))
    else:
        line = _field(reference, _unit(at, k), *first)
        details += [f"{at.strip().capitalize()}, {_ahead_and_behind(there, reference)}." for at, there in elsewhere]
    if k != 1:
        by_pass = [_outcome(rows, one.name, "pass") for one in first[1]]
        news = [by for one, by in zip(first[1], by_pass, strict=True) if by.kind in DECIDED and by.kind != one.kind]
        details += [f"By pass@{k}{at}, {_ahead_and_behind(news, reference)}."] if news else []
    return line, details, [one for outcomes in found.values() for one in outcomes]


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


def _unit(at: str, k: int | str) -> str:
    """Greedy samples of a problem are all the same, so there is one."""
    return "avg@1" if at == at_temperature(0) else f"avg@{k}"


def _duel(reference: str, k: int | str, found: Sequence[tuple[str, list[Outcome]]]) -> str:
    """One arm against another: first the temperature that decides something, then the others."""
    lead = next((place for place, (_, (one,)) in enumerate(found) if one.kind in DECIDED), 0)
    at, (one,) = found[lead]
    together: dict[str, list[str]] = {}
    for where, (other,) in [*found[:lead], *found[lead + 1 :]] if one.kind in JUDGED else ():
        words = {"ahead": f"it is ahead by {other.size}", "behind": f"it is behind by {other.size}"}
        said = words.get(other.kind, "they cannot be told apart" if other.kind == "open" else "a score is missing")
        together.setdefault(said, []).append(where.strip())
    clauses = [_clause(one, reference, _unit(at, k), at)]
    return "; ".join([*clauses, *(f"{_joined(places)} {said}" for said, places in together.items())]) + "."


def _clause(one: Outcome, reference: str, unit: str, at: str) -> str:
    if one.same:
        return f"{one.name} and {reference} have the same {unit}{at} in every one of {one.seeds} seeds"
    over = f"over {one.seeds} seeds" if one.all_seeds else f"over the {one.seeds} seeds that both have"
    by_one = f"differs from {reference} by {one.signed} {unit}{at}"
    by_one = f"and {reference} have the same {unit}{at}" if one.size == "0.000" else by_one
    return {
        "ahead": f"{one.name} beats {reference} by {one.size} {unit}{at} {over}",
        "behind": f"{one.name} falls short of {reference} by {one.size} {unit}{at} {over}",
        "open": f"{one.name} and {reference} cannot be told apart{at} ({one.signed} {unit} {over})",
        "few": f"Two seeds are too few to decide between {one.name} and {reference} ({one.signed} {unit}{at})",
        "one": f"One seed decides nothing: {one.name} {by_one}",
        "missing": f"{one.name} has no finished run, so it cannot be compared with {reference} yet",
        "apart": f"{one.name} and {reference} have no seed in common, so they cannot be compared seed by seed",
        "not a number": f"The {unit}{at} of {one.name} or of {reference} is not a number in at least one run",
        "not measured": f"{one.name} or {reference} has runs without {unit}{at}",
    }[one.kind]


def _field(reference: str, unit: str, at: str, outcomes: Sequence[Outcome]) -> str:
    """Several arms against one: the best with its numbers, the others by name."""
    groups = _by_kind(outcomes)
    judged = [one for one in outcomes if one.kind in JUDGED]
    clauses = []
    if ahead := groups.get("ahead"):
        clauses.append(_clause(ahead[0], reference, unit, at))
        if len(ahead) > 1:
            clauses.append(f"{_those(ahead[1:], 'beats', 'beat')} it, too")
    elif judged:
        seeds = " to ".join(dict.fromkeys(str(pick(one.seeds for one in judged)) for pick in (min, max)))
        clauses.append(f"Nothing beats {reference} in {unit}{at} over {seeds} seeds")
    if behind := groups.get("behind"):
        clauses.append(f"{_those(behind, 'falls', 'fall')} short of it")
    if same := [one for one in groups.get("open", ()) if one.same]:
        clauses.append(f"{_those(same, 'has', 'have')} the same {unit} as {reference} in every seed")
    if apart := [one for one in groups.get("open", ()) if not one.same]:
        clauses.append(f"{_those(apart, 'cannot', 'cannot')} be told apart from it")
    few: dict[Kind, str] = {"few": "two seeds are too few to decide", "one": "one seed decides nothing"}
    for kind in (kind for kind in few if kind in groups):
        listed = ", ".join(f"{one.name} {one.signed}" for one in groups[kind])
        words = few[kind] if clauses else few[kind].capitalize()
        clauses.append(f"{words} ({listed} {unit} against {reference})")
    endings: dict[Kind, str] = {
        "not a number": f"a score ({unit}) that is not a number",
        "not measured": f"runs without {unit}",
        "apart": f"no seed in common with {reference}",
        "missing": "no finished run",
    }
    clauses += [f"{_those(groups[kind], 'has', 'have')} {words}" for kind, words in endings.items() if kind in groups]
    return "; ".join(clauses) + "."


def _ahead_and_behind(outcomes: Sequence[Outcome], reference: str) -> str:
    """Who is ahead of and who is behind the reference, by name."""
    groups = _by_kind(outcomes)
    clauses = [
        f"{_those(group, 'is', 'are')} {words} {reference}" + (f" by {group[0].size}" if len(group) == 1 else "")
        for group, words in ((groups.get("ahead"), "ahead of"), (groups.get("behind"), "behind"))
        if group
    ]
    return _joined(clauses) if clauses else f"nothing can be told apart from {reference}"


def _by_kind(outcomes: Sequence[Outcome]) -> dict[Kind, list[Outcome]]:
    """Outcomes by kind, the largest difference first."""
    groups: dict[Kind, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: -abs(one.mean) if math.isfinite(one.mean) else math.inf):
        groups.setdefault(one.kind, []).append(one)
    return groups


def _those(outcomes: Sequence[Outcome], one: str, many: str) -> str:
    """The names of these arms, and the verb that follows one or many of them."""
    return f"{_joined([outcome.name for outcome in outcomes])} {one if len(outcomes) == 1 else many}"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
