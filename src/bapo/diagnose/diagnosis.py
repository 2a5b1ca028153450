"""The whole diagnosis: from a dump to numbers, findings and advice."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bapo.diagnose.advice import Headline, advise, headline, unknowns
from bapo.diagnose.dumps import Dump
from bapo.diagnose.measure import Fate, Numbers, measure, total
from bapo.diagnose.problems import Finding, find_problems
from bapo.diagnose.uses import UNKNOWN, Pushes, Uses, first, later, of_uses, with_uses
from bapo.runs.numbers import strict


@dataclass(frozen=True)
class Diagnosis:
    """Everything `bapo diagnose` has to say about a dump."""

    dump: Dump
    """With uses in every update or in none, and with a note if they were inferred."""
    uses: Uses
    updates: list[Numbers]
    """One entry per update that has a usable token."""
    overall: Numbers | None
    """The numbers over all of these updates; None if there is none."""
    findings: list[Finding]
    headline: Headline
    advice: list[str]
    unknown: list[str]


def diagnose(dump: Dump) -> Diagnosis:
    """Measure every update, look for problems, and put the results into words."""
    dump, uses = with_uses(dump)
    updates = [numbers for update in dump.updates if (numbers := measure(update)) is not None]
    overall = total(updates) if updates else None
    findings = find_problems(dump.updates)
    return Diagnosis(
        dump=dump,
        uses=uses,
        updates=updates,
        overall=overall,
        findings=findings,
        headline=headline(overall, findings, uses),
        advice=advise(overall, findings, uses),
        unknown=unknowns(dump, uses),
    )


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain data; numbers that are not finite become null."""
    plain = {
        "columns": diagnosis.dump.columns,
        "notes": diagnosis.dump.notes,
        "uses": diagnosis.uses.source,
        "headline": diagnosis.headline.text,
        "advice": diagnosis.advice,
        "problems": [asdict(finding) for finding in diagnosis.findings],
        "unknown": diagnosis.unknown,
        "overall": None if diagnosis.overall is None else _numbers(diagnosis.overall),
        "updates": [_numbers(numbers) for numbers in diagnosis.updates],
    }
    result: dict[str, Any] = strict(plain)
    return result


def _numbers(numbers: Numbers) -> dict[str, Any]:
    whole = numbers.fates["grpo"].tokens
    return {
        "name": numbers.name,
        "updates": numbers.updates,
        "tokens": numbers.tokens,
        "positive_tokens": int(whole.positive),
        "negative_tokens": int(whole.negative),
        "responses": numbers.sequences,
        "share": {
            measure: {clip: signal.share for clip, signal in signals.items()}
            for measure, signals in numbers.shares.items()
        },
        "share_error": numbers.share_error,
        "share_sequence_mean": None if numbers.sequence_mean is None else numbers.sequence_mean.share,
        "objectives": {name: _fate(fate) for name, fate in numbers.fates.items()},
        "bounds": {name: [asdict(bounds) for bounds in found] for name, found in numbers.bounds.items()},
        "ratio": numbers.ratios,
        "entropy": numbers.entropy,
        "quadrants": numbers.quadrants,
        "lengths": numbers.lengths,
        "staleness": numbers.staleness,
        "mismatch": numbers.mismatch,
        "push_once": _push_once(numbers),
    }


def _fate(fate: Fate) -> dict[str, float]:
    clipped, clipped_positive, clipped_negative = fate.clipped
    return {
        "clip_fraction": clipped,
        "clip_fraction_positive": clipped_positive,
        "clip_fraction_negative": clipped_negative,
        "blocked_positive": int(fate.blocked.positive),
        "blocked_negative": int(fate.blocked.negative),
        "share": fate.gradient.share,
    }


def _push_once(numbers: Numbers) -> dict[str, Any]:
    """Shares over all tokens and by use, and the sums they are made of. What push once does is null without uses."""
    pushes, whole = numbers.pushes, of_uses(numbers.pushes)
    known = set(pushes) != {UNKNOWN}
    chosen = {"all": whole} | ({"first": first(pushes), "later": later(pushes)} if known else {})
    return {
        "share": whole.share,
        "share_push_once": whole.share_then if known else None,
        **{name: _pushes(part, known) for name, part in chosen.items()},
        "by_use": {str(use): asdict(part) for use, part in pushes.items() if use != UNKNOWN},
    }


def _pushes(part: Pushes, known: bool) -> dict[str, Any]:
    return {
        "negative_tokens": part.negative,
        "log_ratio": part.mean_log_ratio,
        "below": part.below_share,
        "pushed": part.pushed_share,
        "pushed_of_gradient": part.pushed_mass,
        "kept": part.kept_share if known else None,
        "kept_of_gradient": part.kept_mass if known else None,
    }
