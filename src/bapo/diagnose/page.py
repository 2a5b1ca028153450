"""A diagnosis as one HTML file that loads nothing. It follows the reader's light or dark mode and fits any width.

Bars are inline SVG. All text is escaped, because names of files and columns come from outside.
"""

from __future__ import annotations

from html import escape

from bapo.diagnose.diagnosis import Diagnosis
from bapo.diagnose.tables import Part, parts, read_as, sentence

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --dim: #60646c; --line: #d9dce1; --bar: #2f7d95;
  --rest: #e6e9ed; --bad: #b3261e; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #131619; --dim: #9ba1a9; --line: #32373d; --bar: #5fb3cc; --rest: #2a2f35;
    --bad: #ff8a80; --warn: #f0b75a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0; max-width: 46rem; } .dim { color: var(--dim); font-size: .9rem; overflow-wrap: anywhere; }
ul { margin: .5rem 0; padding-left: 1.2rem; max-width: 46rem; } li { margin: .35rem 0; }
.advice { border-left: 3px solid var(--bar); padding-left: .9rem; }
.serious { color: var(--bad); } .remark { color: var(--warn); }
.wide { overflow-x: auto; margin-top: .5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } svg { display: block; }
.fill { fill: var(--bar); } .rest { fill: var(--rest); }
""".strip()

BAR = (
    '<td><svg width="120" height="10" viewBox="0 0 120 10" role="img" aria-label="{share:.0%}">'
    '<rect class="rest" width="120" height="10" rx="2"/>'
    '<rect class="fill" width="{width:.1f}" height="10" rx="2"/></svg></td>'
)


def html_page(diagnosis: Diagnosis) -> str:
    """The whole page."""
    findings = [
        f'<li><strong class="{"serious" if finding.serious else "remark"}">{escape(finding.name)}</strong> '
        f"{escape(sentence(finding, len(diagnosis.dump.updates)))}</li>"
        for finding in diagnosis.findings
    ]
    body = [
        "<h1>bapo diagnose</h1>",
        f'<p class="dim">{escape(read_as(diagnosis))}</p>',
        *(f'<p class="dim">{escape(note)}</p>' for note in diagnosis.dump.notes),
        f'<h2>Recommendation</h2><div class="advice">{_paragraphs(diagnosis.advice)}</div>',
        f"<h2>Problems</h2><ul>{''.join(findings)}</ul>" if findings else "<h2>Problems</h2><p>None found.</p>",
        *map(_section, parts(diagnosis)),
        f"<h2>What this dump cannot tell</h2><ul>{''.join(f'<li>{escape(x)}</li>' for x in diagnosis.unknown)}</ul>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>bapo diagnose</title>'
        f"<style>\n{STYLE}\n</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _paragraphs(lines: list[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _section(part: Part) -> str:
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in part.headings) + ("<th></th>" if part.bars else "")
    rows = []
    for index, row in enumerate(part.rows):
        bar = _bar(part.bars[index]) if part.bars else ""
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + bar + "</tr>")
    head = f"<thead><tr>{headings}</tr></thead>" if any(part.headings) else ""
    return (
        f'<h2>{escape(part.title)}</h2><p class="dim">{escape(part.reading)}</p>'
        f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
    )


def _bar(share: float) -> str:
    share = share if share == share else 0.0  # NaN if no gradient is left
    return BAR.format(share=share, width=120 * min(1.0, max(0.0, share)))
