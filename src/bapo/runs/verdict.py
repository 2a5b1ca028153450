"""The answer of a comparison in words, from the numbers of `bapo.runs.comparison`.

    judge(tables, k=8, temperature=0.6) -> Verdict(["push-once beats grpo by 0.043 ± 0.011 avg@8 at temperature 0.6 …"])

Every arm is judged against the first arm of its table by avg@k at each temperature. Three seeds or more decide if the
95% interval of their difference excludes zero. Otherwise the arms cannot be told apart, and one or two seeds decide
nothing. pass@k is mentioned where it says something else than avg@k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bapo.runs.comparison import FEWEST_SEEDS, Rows, excludes_zero, temperatures
from bapo.runs.exam import scored_on

Kind = Literal["ahead", "behind", "open", "few", "one", "missing", "apart", "not a number", "not measured"]
DECIDED = ("ahead", "behind")
JUDGED = ("ahead", "behind", "open")
MANY = 10
"""From so many judged differences on, the verdict says that some stand out by chance."""
EXAM_KEYS = (
    *("task.name", "task.test", "task.prompt_column", "task.answer_column", "task.template", "task.max_prompt_tokens"),
    *("task.reward", "task.gym", "task.gym_test", "rollout.max_tokens", "eval.problems", "eval.k", "eval.temperature"),
)
"""Keys of a configuration that decide what a score means. Runs that differ in one cannot be compared by it."""


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
    seeds: int = 0
    """Seeds that both have."""
    all_seeds: bool = True
    """Whether both have these seeds and no others."""

    @property
    def same(self) -> bool:
        """Whether both have the same score in every one of several seeds."""
        return self.kind == "open" and self.mean == self.half == 0

    @property
    def size(self) -> str:
        """The difference without its sign."""
        return f"{abs(self.mean):.3f}{self._interval}"

    @property
    def signed(self) -> str:
        """The difference with its sign."""
        return f"{self.mean:+.3f}{self._interval}"

    @property
    def _interval(self) -> str:
        """That of two seeds is wider than all that can happen, so it is left out."""
        return "" if self.half is None or self.seeds < FEWEST_SEEDS else f" ± {self.half:.3f}"


def judge(
    tables: Mapping[str, Rows],
    *,
    k: int | str,
    temperature: float | None,  # of avg and pass; None if runs differ in it
    unlike: Mapping[str, Sequence[str]] | None = None,  # table -> keys in which its runs were scored differently
    missing: int = 0,  # runs that are not finished
) -> Verdict:
    """The verdict on each table that has at least two arms."""
    several = sum(len(rows) > 1 for rows in tables.values()) > 1
    lines, details, judged = [], [], []
    scored: list[Mapping[str, Any]] = []
    short = False
    for table, rows in tables.items():
        if len(rows) < 2:
            continue
        if keys := (unlike or {}).get(table):
            text = f"The scores cannot be compared, because the runs differ in {_joined(keys)}."
        else:
            text, more, outcomes = _on_table(rows, k, temperature)
            scored += [row["measures"] for row in rows.values()]
            if more:
                details.append(f"{table}: {' '.join(more)}" if several else " ".join(more))
            judged += [outcome for outcome in outcomes if outcome.kind in JUDGED]
            if any(outcome.kind in ("one", "few") for outcome in outcomes):
                short = True
                text += "" if several else f" Run at least {FEWEST_SEEDS} seeds."
        lines.append(f"{table}: {text}" if several else text)
    decided = any(outcome.kind in DECIDED for outcome in judged)
    notes = [f"Run at least {FEWEST_SEEDS} seeds to decide more."] if short and several else []
    if exam := _exam(scored, seeds=bool(judged)):
        notes.append(exam)
    if missing:
        runs = "One run is" if missing == 1 else f"{missing} runs are"
        notes.append(f"{runs} not finished, so this may change.")
    if decided and len(judged) >= MANY:
        notes.append(
            f"{len(judged)} differences were judged, each at 95%, so about {max(1, round(len(judged) / 20))} may stand "
            "out by chance."
        )
    return Verdict(lines, details, decided, notes)


def _exam(arms: Sequence[Mapping[str, Any]], *, seeds: bool) -> str:
    """What these arms were scored on. An arm without finished runs says nothing about it."""
    problems, reaches = ([arm[key]["mean"] for arm in arms if key in arm] for key in ("problems", "avg_reach"))
    return scored_on(problems, reaches, seeds=seeds)


def differing_exam(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which configurations (under dotted keys) make scores mean different things."""
    return [key for key in EXAM_KEYS if any(config.get(key) != configs[0].get(key) for config in configs)]


def outcome(rows: Rows, name: str, measure: str) -> Outcome:
    """One arm of a table against the first one."""
    first, row = next(iter(rows.values())), rows[name]
    seeds, value = row["differences"]["seeds"], row["differences"]["measures"].get(measure)
    if not row["seeds"]:
        return Outcome(name, "missing")
    if not seeds:
        return Outcome(name, "apart")
    if value is None:
        return Outcome(name, "not measured", seeds=len(seeds))
    mean, half = value["mean"], value["half_width"]
    kind: Kind = "behind" if mean < 0 else "ahead"
    if not math.isfinite(mean):
        kind = "not a number"
    elif len(seeds) < FEWEST_SEEDS:
        kind = "one" if len(seeds) == 1 else "few"
    elif not excludes_zero(value):
        kind = "open"
    return Outcome(name, kind, mean, half, len(seeds), len(seeds) == row["seeds"] == first["seeds"])


def _on_table(rows: Rows, k: int | str, temperature: float | None) -> tuple[str, list[str], list[Outcome]]:
    """The sentence about one table, further sentences, and every outcome by avg@k."""
    reference, *others = rows
    if not rows[reference]["seeds"]:
        return f"{reference} has no finished run, so there is nothing to measure the others by.", [], []
    fallen = _all_fell(rows, k)
    further = temperatures({name for row in rows.values() for name in row["measures"]})
    at = "" if not further or temperature is None else _at(temperature)
    found = {
        where: [outcome(rows, name, measure) for name in others]
        for where, measure in {at: "avg", **{_at(t): f"avg_at_{t}" for t in further}}.items()
    }
    first, *elsewhere = found.items()
    more: list[str] = []
    if len(others) == 1:
        line = _duel(reference, k, list(found.items()))
    else:
        line, more = _field(reference, _unit(at, k), first, elsewhere)
    if k != 1:
        by_pass = [outcome(rows, one.name, "pass") for one in first[1]]
        news = [by for one, by in zip(first[1], by_pass, strict=True) if by.kind in DECIDED and by.kind != one.kind]
        more += [f"By pass@{k}{at}, {_ahead_and_behind(news, reference)}."] if news else []
    return line, [*fallen, *more], [one for outcomes in found.values() for one in outcomes]


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


def _at(temperature: float | str) -> str:
    value = float(temperature)
    return f" at temperature {value:g}" if value else " with greedy sampling"


Found = tuple[str, list[Outcome]]  # where a score was taken (" at temperature 1"), and the outcomes there


def _duel(reference: str, k: int | str, found: Sequence[Found]) -> str:
    """One arm against another: first the temperature that decides something, then the others."""
    lead = next((place for place, (_, (one,)) in enumerate(found) if one.kind in DECIDED), 0)
    at, (one,) = found[lead]
    clauses = [_clause(one, reference, _unit(at, k), at)]
    together: dict[str, list[str]] = {}
    for where, (other,) in [*found[:lead], *found[lead + 1 :]] if one.kind in JUDGED else ():
        words = {"ahead": f"it is ahead by {other.size}", "behind": f"it is behind by {other.size}"}
        said = words.get(other.kind, "they cannot be told apart" if other.kind == "open" else "a score is missing")
        together.setdefault(said, []).append(where.strip())
    return "; ".join([*clauses, *(f"{_joined(places)} {said}" for said, places in together.items())]) + "."


def _unit(at: str, k: int | str) -> str:
    """Greedy samples of a problem are all the same, so there is one."""
    return "avg@1" if at == _at(0) else f"avg@{k}"


def _clause(one: Outcome, reference: str, unit: str, at: str) -> str:
    if one.same:
        return f"{one.name} and {reference} have the same {unit}{at} in every one of {one.seeds} seeds"
    over = f"over {one.seeds} seeds" if one.all_seeds else f"over the {one.seeds} seeds that both have"
    return {
        "ahead": f"{one.name} beats {reference} by {one.size} {unit}{at} {over}",
        "behind": f"{one.name} falls short of {reference} by {one.size} {unit}{at} {over}",
        "open": f"{one.name} and {reference} cannot be told apart{at} ({one.signed} {unit} {over})",
        "few": f"Two seeds are too few to decide between {one.name} and {reference} ({one.signed} {unit}{at})",
        "one": f"One seed decides nothing: {one.name} and {reference} have the same {unit}{at}"
        if one.size == "0.000"
        else f"One seed decides nothing: {one.name} differs from {reference} by {one.signed} {unit}{at}",
        "missing": f"{one.name} has no finished run, so it cannot be compared with {reference} yet",
        "apart": f"{one.name} and {reference} have no seed in common, so they cannot be compared seed by seed",
        "not a number": f"The {unit}{at} of {one.name} or of {reference} is not a number in at least one run",
        "not measured": f"{one.name} or {reference} has runs without {unit}{at}",
    }[one.kind]


def _field(reference: str, unit: str, first: Found, elsewhere: Sequence[Found]) -> tuple[str, list[str]]:
    """Several arms against one: the best with its numbers, the others by name; then the other temperatures."""
    at, outcomes = first
    groups = _by_kind(outcomes)
    judged = [one for one in outcomes if one.kind in JUDGED]
    clauses = []
    if ahead := groups.get("ahead"):
        clauses.append(_clause(ahead[0], reference, unit, at))
        if len(ahead) > 1:
            clauses.append(f"{_names(ahead[1:])} {'beat' if len(ahead) > 2 else 'beats'} it, too")
    elif judged:
        seeds = " to ".join(dict.fromkeys(str(pick(one.seeds for one in judged)) for pick in (min, max)))
        clauses.append(f"Nothing beats {reference} in {unit}{at} over {seeds} seeds")
    if behind := groups.get("behind"):
        clauses.append(f"{_names(behind)} {'fall' if len(behind) > 1 else 'falls'} short of it")
    same = [one for one in groups.get("open", ()) if one.same]
    if same:
        has = "have" if len(same) > 1 else "has"
        clauses.append(f"{_names(same)} {has} the same {unit} as {reference} in every seed")
    if apart := [one for one in groups.get("open", ()) if not one.same]:
        clauses.append(f"{_names(apart)} cannot be told apart from it")
    clauses += _not_judged(groups, unit, reference)
    if not judged:
        clauses[0] = clauses[0][0].upper() + clauses[0][1:] if groups.keys() & {"few", "one"} else clauses[0]
    more = [
        f"{where.strip().capitalize()}, {_ahead_and_behind(there, reference)}." for where, there in elsewhere if there
    ]
    return "; ".join(clauses) + ".", more


def _not_judged(groups: Mapping[Kind, Sequence[Outcome]], unit: str, reference: str) -> list[str]:
    """Clauses about arms whose seeds or scores do not allow a judgement."""
    clauses = []
    few: dict[Kind, str] = {"few": "two seeds are too few to decide", "one": "one seed decides nothing"}
    for kind, words in few.items():
        if kind in groups:
            listed = ", ".join(f"{one.name} {one.signed}" for one in groups[kind])
            clauses.append(f"{words} ({listed} {unit} against {reference})")
    endings: dict[Kind, str] = {
        "not a number": f"a score ({unit}) that is not a number",
        "not measured": f"runs without {unit}",
        "apart": f"no seed in common with {reference}",
        "missing": "no finished run",
    }
    for kind, ending in endings.items():
        if kind in groups:
            clauses.append(f"{_names(groups[kind])} {'have' if len(groups[kind]) > 1 else 'has'} {ending}")
    return clauses


def _ahead_and_behind(outcomes: Sequence[Outcome], reference: str) -> str:
    """Who is ahead of and who is behind the reference, by name."""
    groups = _by_kind(outcomes)
    clauses = [
        f"{_names(group)} {'are' if len(group) > 1 else 'is'} {words} {reference}"
        + (f" by {group[0].size}" if len(group) == 1 else "")
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


def _names(outcomes: Sequence[Outcome]) -> str:
    return _joined([one.name for one in outcomes])


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
