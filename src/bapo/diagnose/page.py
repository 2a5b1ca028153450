"""A diagnosis as one HTML file that loads nothing, in the design of the report: headline, advice, charts, tables.

Everything but the charts is in the page as text, so it can be read without scripts. All text is escaped, because names
of files and columns come from outside.
"""

from __future__ import annotations

from bapo.diagnose.charts import charts
from bapo.diagnose.diagnosis import Diagnosis
from bapo.diagnose.tables import Part, parts, read_as, sentence
from bapo.pages import CHARTS, document, escaped

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
    body = [
        "<main>",
        '<header class="top"><div><h1>Diagnosis</h1>'
        f"<p>{escaped(read_as(diagnosis))}</p></div>"
        '<button class="button" id="theme" type="button" hidden>Dark</button></header>',
        f'<section class="verdict {diagnosis.headline.tone}" id="verdict"><p class="answer">'
        f"{escaped(diagnosis.headline.text)}</p>{_limits(diagnosis.dump.notes)}</section>",
        f'<section><h2>Recommendation</h2><ul class="advice">{_items(diagnosis.advice)}</ul></section>',
        "<section><h2>Problems</h2>"
        + (f'<ul class="advice">{"".join(findings)}</ul>' if findings else "<p>None found.</p>")
        + "</section>",
        '<div id="charts"></div>',
        "<noscript>A script inside this file draws the charts. The tables have the same numbers.</noscript>",
        *map(_section, parts(diagnosis)),
        f'<section><h2>What this dump cannot tell</h2><ul class="advice">{_items(diagnosis.unknown)}</ul></section>',
        "</main>",
    ]
    return document(
        "bapo diagnose",
        body,
        styles=["diagnose/page.css"],
        scripts=[*CHARTS, "diagnose/page.js"],
        values=charts(diagnosis),
    )


def _limits(notes: list[str]) -> str:
    return "".join(f'<p class="limit">{escaped(note[:1].upper() + note[1:].rstrip("."))}.</p>' for note in notes)


def _items(lines: list[str]) -> str:
    return "".join(f"<li>{escaped(line)}</li>" for line in lines)


def _section(part: Part) -> str:
    headings = "".join(f"<th>{escaped(text)}</th>" for text in part.headings) + ("<th></th>" if part.bars else "")
    rows = []
    for index, row in enumerate(part.rows):
        bar = _bar(part.bars[index]) if part.bars else ""
        rows.append("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + bar + "</tr>")
    head = f"<thead><tr>{headings}</tr></thead>" if any(part.headings) else ""
    return (
        f"<section><h2>{escaped(part.title)}</h2><p>{escaped(part.reading)}</p>"
        f'<div class="scroll" tabindex="0"><table class="plain">{head}<tbody>{"".join(rows)}</tbody></table></div>'
        "</section>"
    )


def _bar(share: float) -> str:
    share = share if share == share else 0.0  # NaN if no gradient is left
    return BAR.format(share=share, width=120 * min(1.0, max(0.0, share)))
