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
    decided: bool
    """Whether any difference is decided."""
    notes: list[str] = field(default_factory=list)
    """What limits the lines: runs that are missing, and how many differences were judged."""


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
    def size(self) -> str:
        """The difference without its sign."""
        return f"{abs(self.mean):.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")

    @property
    def signed(self) -> str:
        """The difference with its sign."""
        return f"{self.mean:+.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


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
    lines, judged = [], []
    for table, rows in tables.items():
        if len(rows) < 2:
            continue
        if keys := (unlike or {}).get(table):
            text = f"The scores cannot be compared, because the runs differ in {_joined(keys)}."
        else:
            text, outcomes = _on_table(rows, k, temperature)
            judged += [outcome for outcome in outcomes if outcome.kind in JUDGED]
        lines.append(f"{table}: {text}" if several else text)
    decided = any(outcome.kind in DECIDED for outcome in judged)
    notes = []
    if missing:
        runs = "One run is" if missing == 1 else f"{missing} runs are"
        notes.append(f"{runs} not finished, so this may change.")
    if decided and len(judged) >= MANY:
        notes.append(
            f"{len(judged)} differences were judged, each at 95%, so about {max(1, round(len(judged) / 20))} may stand "
            "out by chance."
        )
    return Verdict(lines, decided, notes)


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


def _on_table(rows: Rows, k: int | str, temperature: float | None) -> tuple[str, list[Outcome]]:
    """The sentences about one table, and every outcome by avg@k."""
    reference, *others = rows
    if not rows[reference]["seeds"]:
        return f"{reference} has no finished run, so there is nothing to measure the others by.", []
    further = temperatures({name for row in rows.values() for name in row["measures"]})
    at = "" if not further or temperature is None else _at(temperature)
    exams = [
        ("avg", f"avg@{k}", at),
        *((f"avg_at_{t}", "avg@1" if not float(t) else f"avg@{k}", _at(t)) for t in further),
    ]
    found = {measure: [outcome(rows, name, measure) for name in others] for measure, _, _ in exams}
    text = _duel(reference, exams, found) if len(others) == 1 else _field(reference, exams, found)
    if k != 1:
        text += _about_pass(rows, reference, found["avg"], f"pass@{k}{at}")
    return text, [outcome for outcomes in found.values() for outcome in outcomes]


def _at(temperature: float | str) -> str:
    value = float(temperature)
    return f" at temperature {value:g}" if value else " with greedy sampling"


def _duel(reference: str, exams: Sequence[tuple[str, str, str]], found: Mapping[str, Sequence[Outcome]]) -> str:
    """One arm against another, at every temperature."""
    first = found[exams[0][0]][0]
    clauses = [_first_clause(first, reference, *exams[0][1:])]
    if first.kind in JUDGED:
        for measure, _, at in exams[1:]:
            other = found[measure][0]
            clauses += [words] if (words := _further_clause(other, at.strip())) else []
    return "; ".join(clauses) + "." + _advice(first)


def _first_clause(one: Outcome, reference: str, unit: str, at: str) -> str:
    if one.kind == "open" and one.mean == one.half == 0:
        return f"{one.name} and {reference} have the same {unit}{at} in every one of {one.seeds} seeds"
    over = f"over {one.seeds} seeds" if one.all_seeds else f"over the {one.seeds} seeds that both have"
    return {
        "ahead": f"{one.name} beats {reference} by {one.size} {unit}{at} {over}",
        "behind": f"{one.name} falls short of {reference} by {one.size} {unit}{at} {over}",
        "open": f"{one.name} and {reference} cannot be told apart{at} ({one.signed} {unit} {over})",
        "few": f"Two seeds are too few to decide between {one.name} and {reference} ({one.signed} {unit}{at})",
        "one": f"One seed decides nothing: {one.name} differs from {reference} by {one.signed} {unit}{at}",
        "missing": f"{one.name} has no finished run, so it cannot be compared with {reference} yet",
        "apart": f"{one.name} and {reference} have no seed in common, so they cannot be compared seed by seed",
        "not a number": f"The {unit}{at} of {one.name} or of {reference} is not a number in at least one run",
        "not measured": f"{one.name} or {reference} has runs without {unit}{at}",
    }[one.kind]


def _further_clause(one: Outcome, at: str) -> str:
    """The same pair at another temperature; empty if it adds nothing."""
    return {
        "ahead": f"{at} it is ahead by {one.size}",
        "behind": f"{at} it is behind by {one.size}",
        "open": f"{at} they cannot be told apart ({one.signed})",
        "not a number": f"{at} a score is not a number",
    }.get(one.kind, "")


def _field(reference: str, exams: Sequence[tuple[str, str, str]], found: Mapping[str, Sequence[Outcome]]) -> str:
    """Several arms against one: a sentence per temperature that groups them by outcome."""
    sentences = []
    for place, (measure, unit, at) in enumerate(exams):
        outcomes = found[measure]
        counts = sorted({one.seeds for one in outcomes if one.kind in JUDGED})
        seeds = f" over {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds" if counts else ""
        clauses = _grouped(outcomes, unit, everything=place == 0)
        if clauses:
            sentences.append(f"Against {reference}{at}{seeds}: {'; '.join(clauses)}.")
    least = min(found[exams[0][0]], key=lambda one: one.seeds or math.inf)
    return " ".join(sentences) + _advice(least)


def _grouped(outcomes: Sequence[Outcome], unit: str, *, everything: bool) -> list[str]:
    """Clauses about arms with the same outcome. `everything`: also those that cannot be judged."""
    by_kind: dict[Kind, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: -one.mean if math.isfinite(one.mean) else math.inf):
        by_kind.setdefault(one.kind, []).append(one)
    names = {kind: _joined([one.name for one in group]) for kind, group in by_kind.items()}
    have = {kind: "have" if len(group) > 1 else "has" for kind, group in by_kind.items()}
    clauses = []
    for kind in DECIDED:
        group = by_kind.get(kind, [])  # type: ignore[call-overload]
        listed = [f"{one.name} is {kind} by {one.size} {unit}" for one in group[:1]]
        clauses += [_joined([*listed, *(f"{one.name} by {one.size}" for one in group[1:])])] if group else []
    if "open" in by_kind:
        clauses.append(f"{names['open']} cannot be told apart from it")
    if not everything:
        return clauses
    for kind, words in (("few", "two seeds are too few to decide"), ("one", "one seed decides nothing")):
        if group := by_kind.get(kind, []):  # type: ignore[call-overload]
            clauses.append(f"{words} ({', '.join(f'{one.name} {one.signed}' for one in group)} {unit})")
    endings: dict[Kind, str] = {
        "not a number": f"a score ({unit}) that is not a number",
        "not measured": f"runs without {unit}",
        "apart": "no seed in common with it",
        "missing": "no finished run",
    }
    return clauses + [f"{names[kind]} {have[kind]} {ending}" for kind, ending in endings.items() if kind in by_kind]


def _about_pass(rows: Rows, reference: str, by_avg: Sequence[Outcome], unit: str) -> str:
    """The arms about which pass@k says something else than avg@k."""
    clauses = []
    for one in by_avg:
        other = outcome(rows, one.name, "pass")
        if other.kind in DECIDED and other.kind != one.kind:
            clauses.append(f"{one.name} is {other.kind} of {reference} by {other.size}".replace("behind of", "behind"))
    return f" By {unit}, {_joined(clauses)}." if clauses else ""


def _advice(one: Outcome) -> str:
    return f" Run at least {FEWEST_SEEDS} seeds." if one.kind in ("one", "few") else ""


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
