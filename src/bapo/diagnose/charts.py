"""The charts of the page, as values for its scripts: the share, kept and blocked tokens, and the bounds of each rule.

Every rule is an arm in the sense of pages/charts.js. With several updates the share and the bounds are curves over
them; with one update they are bars and ranges. Curves of more than MAX_POINTS updates are cut into equal stretches:
signals of a stretch are added up, and bounds are averaged over its updates with a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from statistics import fmean
from typing import Any

from bapo.diagnose.diagnosis import Diagnosis
from bapo.diagnose.measure import SETTINGS, Numbers, Signal
from bapo.runs.numbers import number, numbers

Panel = dict[str, Any]
MAX_POINTS = 400
FIXED = "(0.8, 1.2)"
"""What a page calls GRPO's clip."""
SHARES: dict[str, Callable[[Numbers], Signal | None]] = {
    "unclipped": lambda update: update.shares["gradient"]["unclipped"],
    FIXED: lambda update: update.fates["grpo"].gradient,
    "push once": lambda update: update.fates["push_once"].gradient if "push_once" in update.fates else None,
    "bapo": lambda update: update.fates["bapo"].gradient,
}
"""Rules whose share is drawn -> the gradient that they leave of an update."""
RULES = list(dict.fromkeys([*SHARES, *SETTINGS]))
ROW = 25
"""Height of a row, in pixels."""


def charts(diagnosis: Diagnosis) -> dict[str, Any]:
    """The values of the page: its arms, and figures of panels. Without a usable token there is no figure."""
    updates, overall = diagnosis.updates, diagnosis.overall
    figures: list[dict[str, Any]] = []
    if overall is not None:
        dotted = "the fixed clip (0.8, 1.2)" if len(updates) > 1 else "a ratio of 1"
        first = over_updates(updates) if len(updates) > 1 else [shares(overall), ranges(overall)]
        figures = [
            {
                "title": "Share and bounds",
                "caption": "The share of the gradient that tokens of positive advantage hold, and the bounds on the "
                f"ratio that each setting of BAPO would choose. Dotted: BAPO's target, and {dotted}.",
                "panels": [{"id": f"share-{place}"} | panel for place, panel in enumerate(first)],
            },
            {
                "title": "Kept and blocked, by side",
                "caption": "Tokens of negative advantage to the left, of positive advantage to the right. Pale: the "
                "rule blocks their gradient. Every rule has its default options.",
                "panels": [{"id": "sides"} | sides(overall)],
            },
        ]
    return {
        "title": "bapo diagnose",
        "arms": [{"objective": rule, "setting": ""} for rule in RULES],
        "figures": figures,
    }


def over_updates(updates: Sequence[Numbers]) -> list[Panel]:
    """Curves over updates: the share that each rule leaves, and both bounds."""
    width = -(-len(updates) // MAX_POINTS)
    stretches = [updates[at : at + width] for at in range(0, len(updates), width)]
    left = [_series(rule, [_share(stretch, signal) for stretch in stretches]) for rule, signal in SHARES.items()]
    target = SETTINGS["bapo"].target_share
    return [
        _curves("Positive share of the gradient", left, stretches, {target: f"target {target:g}"}),
        *(
            _curves(
                f"{side} bound that each rule would choose",
                [_series(rule, [_bound(stretch, rule, key) for stretch in stretches]) for rule in SETTINGS],
                stretches,
                {fixed: f"{fixed:g}"},
            )
            for side, key, fixed in (("Upper", "high", 1.2), ("Lower", "low", 0.8))
        ),
    ]


def _share(stretch: Sequence[Numbers], signal: Callable[[Numbers], Signal | None]) -> float | None:
    found = [one for update in stretch if (one := signal(update)) is not None]
    return number(reduce(lambda a, b: a + b, found, Signal()).share)


def _bound(stretch: Sequence[Numbers], rule: str, key: str) -> float | None:
    found = [getattr(bounds, key) for update in stretch for bounds in update.searched(rule)]
    return number(fmean(found)) if found else None


def _series(rule: str, values: Sequence[float | None]) -> dict[str, Any]:
    return {"arm": RULES.index(rule), "runs": [list(values)]}


def _curves(
    title: str, series: Sequence[dict[str, Any]], stretches: Sequence[Sequence[Numbers]], marks: dict[float, str]
) -> Panel:
    """One panel; x is the place of an update, and its ticks are some of the updates' names."""
    names = [stretch[0].name for stretch in stretches]
    short = all(len(name) <= 8 for name in names)
    every = -(-len(names) // 6)
    return {
        "kind": "curves",
        "title": title,
        "x": "update" if short else "update, in the order of the dump",
        "markers": False,
        "marks": [{"value": value, "text": text} for value, text in marks.items()],
        "ticks": [{"at": at, "text": name} for at, name in enumerate(names) if at % every == 0] if short else None,
        "series": [
            one | {"x": list(range(len(names)))} for one in series if any(value is not None for value in one["runs"][0])
        ],
    }


def shares(overall: Numbers) -> Panel:
    """The share that each rule leaves of one update."""
    rows = {rule: number(found.share) for rule, signal in SHARES.items() if (found := signal(overall)) is not None}
    target = SETTINGS["bapo"].target_share
    return {
        "kind": "shares",
        "title": "Positive share of the gradient",
        "x": "",
        "target": {"value": target, "text": f"target {target:g}"},
        "rows": [{"name": rule, "value": value, "arm": RULES.index(rule)} for rule, value in rows.items()],
        "series": [],
    }


def ranges(overall: Numbers) -> Panel:
    """Both bounds that each setting would choose for one update."""
    found = {rule: chosen[0] for rule in SETTINGS if (chosen := overall.searched(rule))}
    rows = [{"name": FIXED, "low": 0.8, "high": 1.2, "arm": RULES.index(FIXED)}]
    rows += [{"name": r, "low": number(b.low), "high": number(b.high), "arm": RULES.index(r)} for r, b in found.items()]
    return {"kind": "ranges", "title": "Bounds that each rule would choose", "x": "ratio", "rows": rows, "series": []}


def sides(overall: Numbers) -> Panel:
    """Tokens that each objective keeps and blocks, as shares of all tokens with an advantage."""
    rows = []
    for name, fate in overall.fates.items():
        whole = (fate.tokens.positive + fate.tokens.negative) or 1.0
        blocked = fate.blocked
        parts = (
            *(fate.tokens.negative - blocked.negative, blocked.negative),
            *(fate.tokens.positive - blocked.positive, blocked.positive),
        )
        rows.append({"name": name, "parts": numbers(part / whole for part in parts)})
    return {
        "kind": "sides",
        "title": "Tokens that each rule keeps and blocks, by side",
        "x": "share of the tokens with an advantage",
        "rows": rows,
        "height": ROW * len(rows) + 90,
        "series": [],
    }
