"""A diagnosis as one HTML file that loads nothing, in the design of the report: headline, advice, charts, tables.

Everything but the charts is in the page as text, so it can be read without scripts. All text is escaped, because names
of files and columns come from outside. The charts are values for the page's scripts: the share, kept and blocked
tokens, and the bounds of each rule. Every rule is an arm in the sense of pages/charts.js. With several updates the
share and the bounds are curves over them; with one update they are bars and ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bapo.diagnose.diagnosis import Diagnosis
from bapo.diagnose.measure import SETTINGS, Numbers, Signal
from bapo.diagnose.tables import Part, parts, read_as, sentence
from bapo.pages import CHARTS, document, escaped, number, numbers, panel, top

Panel = dict[str, Any]
FIXED = "(0.8, 1.2)"  # what a page calls GRPO's clip
SHARES: dict[str, Callable[[Numbers], Signal | None]] = {
    "unclipped": lambda update: update.shares["gradient"]["unclipped"],
    FIXED: lambda update: update.fates["grpo"].gradient,
    "brake": lambda update: update.fates["brake"].gradient if "brake" in update.fates else None,
    "push once": lambda update: update.fates["push_once"].gradient if "push_once" in update.fates else None,
    "bapo": lambda update: update.fates["bapo"].gradient,
}
"""Rules whose share is drawn -> the gradient that they leave of an update."""
RULES = list(dict.fromkeys([*SHARES, *SETTINGS]))
ROW = 25  # height of a row, in pixels
BAR = (
    '<td><svg class="bar" width="120" height="10" viewBox="0 0 120 10" role="img" aria-label="{share:.0%}">'
    '<rect class="rest" width="120" height="10" rx="2"/>'
    '<rect class="fill" width="{width:.1f}" height="10" rx="2"/></svg></td>'
)


def html_page(diagnosis: Diagnosis) -> str:
    """The whole page."""
    findings = [
        f'<li><b class="{"serious" if finding.serious else "remark"}">{escaped(finding.name)}</b> '
        f"{escaped(sentence(finding, len(diagnosis.dump.updates)))}</li>"
        for finding in diagnosis.findings
    ]
    notes = (escaped(note[:1].upper() + note[1:].rstrip(".")) for note in diagnosis.dump.notes)
    limits = [f'<p class="limit">{note}.</p>' for note in notes]
    body = [
        "<main>",
        top("Diagnosis", read_as(diagnosis)),
        f'<section class="verdict {diagnosis.headline.tone}" id="verdict"><p class="answer">'
        f"{escaped(diagnosis.headline.text)}</p>{''.join(limits)}</section>",
        f'<section><h2>Recommendation</h2><ul class="advice">{_items(diagnosis.advice)}</ul></section>',
        "<section><h2>Problems</h2>"
        + (f'<ul class="advice">{"".join(findings)}</ul>' if findings else "<p>None found.</p>")
        + "</section>",
        '<div id="charts"></div>',
        "<noscript>A script inside this file draws the charts. The tables have the same numbers.</noscript>",
        *map(_section, parts(diagnosis)),
        f'<section><h2>What this dump cannot tell</h2><ul class="advice">{_items(diagnosis.unknown)}</ul></section>'
        if diagnosis.unknown
        else "",
        "</main>",
    ]
    return document(
        "bapo diagnose",
        body,
        styles=["diagnose/diagnosis.css"],
        scripts=[*CHARTS, "diagnose/diagnosis.js"],
        values=charts(diagnosis),
    )


def _items(lines: list[str]) -> str:
    return "".join(f"<li>{escaped(line)}</li>" for line in lines)


def _section(part: Part) -> str:
    headings = "".join(f"<th>{escaped(text)}</th>" for text in part.headings) + ("<th></th>" if part.bars else "")
    bars = map(_bar, part.bars) if part.bars else [""] * len(part.rows)
    rows = [
        "<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + bar + "</tr>"
        for row, bar in zip(part.rows, bars, strict=True)
    ]
    head = f"<thead><tr>{headings}</tr></thead>" if any(part.headings) else ""
    return (
        f"<section><h2>{escaped(part.title)}</h2><p>{escaped(part.reading)}</p>"
        f'<div class="scroll" tabindex="0"><table class="plain">{head}<tbody>{"".join(rows)}</tbody></table></div>'
        "</section>"
    )


def _bar(share: float) -> str:
    share = share if share == share else 0.0  # NaN if no gradient is left
    return BAR.format(share=share, width=120 * min(1.0, max(0.0, share)))


def charts(diagnosis: Diagnosis) -> dict[str, Any]:
    """The values of the page: its arms, and figures of panels. Without a usable token there is no figure."""
    updates, overall = diagnosis.updates, diagnosis.overall
    page = {"title": "bapo diagnose", "arms": [{"objective": rule, "setting": ""} for rule in RULES]}
    if overall is None:
        return {**page, "figures": []}
    dotted = "the fixed clip (0.8, 1.2)" if len(updates) > 1 else "a ratio of 1"
    first = over_updates(updates) if len(updates) > 1 else [shares(overall), ranges(overall)]
    share = {
        "title": "Share and bounds",
        "caption": "The share of the gradient that tokens of positive advantage hold, and the bounds on the ratio that "
        f"each setting of BAPO would choose. Dotted: BAPO's target, and {dotted}.",
        "panels": [{"id": f"share-{place}"} | one for place, one in enumerate(first)],
    }
    kept = {
        "title": "Kept and blocked, by side",
        "caption": "Tokens of negative advantage to the left, of positive advantage to the right. Pale: the rule "
        "blocks their gradient. Every rule has its default options.",
        "panels": [{"id": "sides"} | sides(overall)],
    }
    return {**page, "figures": [share, kept]}


def over_updates(updates: Sequence[Numbers]) -> list[Panel]:
    """Curves over updates: the share that each rule leaves, and both bounds."""
    names = [update.name for update in updates]
    target = SETTINGS["bapo"].target_share
    shares = {
        rule: numbers(None if (found := signal(update)) is None else found.share for update in updates)
        for rule, signal in SHARES.items()
    }
    panels = [_curves("Positive share of the gradient", names, shares, target, f"target {target:g}")]
    for side, key, fixed in (("Upper", "high", 1.2), ("Lower", "low", 0.8)):
        bounds = {
            rule: numbers(getattr(chosen[0], key) if (chosen := update.searched(rule)) else None for update in updates)
            for rule in SETTINGS
        }
        panels.append(_curves(f"{side} bound that each rule would choose", names, bounds, fixed, f"{fixed:g}"))
    return panels


def _curves(title: str, names: Sequence[str], lines: Mapping[str, list[float | None]], mark: float, text: str) -> Panel:
    """A line for each rule; x is the place of an update, and its ticks are some of the updates' names."""
    short = all(len(name) <= 8 for name in names)
    every = -(-len(names) // 6)
    ticks = [{"at": at, "text": name} for at, name in enumerate(names) if at % every == 0] if short else None
    drawn = {RULES.index(rule): values for rule, values in lines.items() if any(value is not None for value in values)}
    series = [{"arm": arm, "runs": [values], "x": list(range(len(names)))} for arm, values in drawn.items()]
    x = "update" if short else "update, in the order of the dump"
    return panel("curves", title, x, series, markers=False, marks=[{"value": mark, "text": text}], ticks=ticks)


def shares(overall: Numbers) -> Panel:
    """The share that each rule leaves of one update."""
    rows = {rule: number(found.share) for rule, signal in SHARES.items() if (found := signal(overall)) is not None}
    target = SETTINGS["bapo"].target_share
    shown = [{"name": rule, "value": value, "arm": RULES.index(rule)} for rule, value in rows.items()]
    mark = {"value": target, "text": f"target {target:g}"}
    return panel("shares", "Positive share of the gradient", "", target=mark, rows=shown)


def ranges(overall: Numbers) -> Panel:
    """Both bounds that each setting would choose for one update."""
    found = {rule: chosen[0] for rule in SETTINGS if (chosen := overall.searched(rule))}
    rows = [{"name": FIXED, "low": 0.8, "high": 1.2, "arm": RULES.index(FIXED)}]
    rows += [{"name": r, "low": number(b.low), "high": number(b.high), "arm": RULES.index(r)} for r, b in found.items()]
    return panel("ranges", "Bounds that each rule would choose", "ratio", rows=rows)


def sides(overall: Numbers) -> Panel:
    """Tokens that each objective keeps and blocks, as shares of all tokens with an advantage."""
    rows = []
    for name, fate in overall.fates.items():
        (positive, negative), blocked = (fate.tokens.positive, fate.tokens.negative), fate.blocked
        parts = negative - blocked.negative, blocked.negative, positive - blocked.positive, blocked.positive
        rows.append({"name": name, "parts": numbers(part / (fate.tokens.whole or 1.0) for part in parts)})
    title, x = "Tokens that each rule keeps and blocks, by side", "share of the tokens with an advantage"
    return panel("sides", title, x, rows=rows, height=ROW * len(rows) + 90)
