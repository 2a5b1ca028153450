"""An evaluation as one HTML file: overview, then every problem with its responses. It opens without a network.

All text stands in the page as it was written, escaped, because models and data sets write markup. The script only sorts
the tables and switches between light and dark; without it the page shows the same. A page of many long responses would
be too large to open. Beyond `BUDGET` characters it therefore shows at most two responses per problem, one that solves
it and one that does not, and cuts the middle out of long ones. responses.jsonl keeps everything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bapo.config.numerals import counted
from bapo.evaluate.estimates import SOLVED, Row
from bapo.evaluate.options import sampling_of
from bapo.evaluate.progress import endings_in_words, figures_table
from bapo.pages import document, top
from bapo.pages import escaped as _text
from bapo.screen.terminal import shortened

BUDGET = 8_000_000  # most characters of responses in one page
SHORTEST_CUT = 400  # no response is cut to fewer characters than this
COLUMNS = ("Problem", "Responses", "avg", "maj", "Length", "Truncated", "Failed")  # headings of the table of problems


def page(rows: Sequence[Row], results: dict[str, Any], *, budget: int = BUDGET) -> str:
    """The HTML document."""
    shown, limit, note = _within_budget(rows, budget)
    title = f"{results['model']} on {', '.join(results['data_sets'])}"
    body = [
        "<main>",
        _top(results, title),
        _overview(results),
        _failures(results),
        *(_problems(name, [r for r in shown if r["data"] == name], results, limit) for name in results["data_sets"]),
        f'<p class="note">{_text(note)}</p>' if note else "",
        _configuration(results),
        "</main>",
    ]
    return document(f"{title} · bapo eval", body, styles=["evaluate/results.css"], scripts=["evaluate/results.js"])


def _top(results: dict[str, Any], title: str) -> str:
    responses, tokens = counted(results["k"], "response"), results["max_tokens"]
    how = "greedy" if results["temperature"] == 0 else sampling_of(results).words
    return top(title, f"{responses} per problem, {how}, at most {tokens} tokens, seed {results['seed']}")


def _overview(results: dict[str, Any]) -> str:
    k = results["k"]
    headings, *rows = figures_table(results, powers=[j for j in results["overall"]["pass"] if j != str(k)])
    said = "Means over problems with 95% intervals. Lengths are in tokens. A response on which the verifier failed "
    said += "counts 0."
    if len(results["data_sets"]) > 1:
        mean = results["mean_over_data_sets"]["avg"]
        said += f" Overall gives every problem the same weight; the mean of the data sets' avg@{k} is {mean:.3f}."
    if endings := results["overall"].get("endings"):
        said += f" Episodes ended so: {endings_in_words(endings)}."
    if results["overall"]["maj"] is None:
        said += " maj@k is missing where the verifier does not extract the answers that would vote."
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in [("th", headings), *(("td", row) for row in rows)]
    )
    return (
        f'<section id="overview"><h2>Overview</h2><p>{said}</p><div class="scroll"><table><thead>{head}</thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _failures(results: dict[str, Any]) -> str:
    causes = results["overall"]["failure_causes"]
    if not causes:
        return ""
    listed = "".join(f"<li>{count} × {_text(cause)}</li>" for cause, count in list(causes.items())[:12])
    return f'<div class="warning"><strong>Responses on which the verifier failed</strong><ul>{listed}</ul></div>'


def _problems(name: str, rows: Sequence[Row], results: dict[str, Any], limit: int | None) -> str:
    table = {(line["data"], line["id"]): line for line in results["problem_table"]}
    lines = sorted(((table[row["data"], row["id"]], row) for row in rows), key=lambda pair: pair[0]["avg"])
    headings = "".join(
        f'<th{" aria-sort=ascending" if label == "avg" else ""}><button type="button">{label}</button></th>'
        for label in COLUMNS
    )
    bodies = "".join(_problem(line, row, limit) for line, row in lines)
    return (
        f'<section class="data"><h2>{_text(name)}</h2><p>The hardest problems come first. ■: the response '
        "solves the problem. □: it does not. ×: the verifier failed. Open a problem to read its responses.</p>"
        f'<div class="scroll"><table class="each"><thead><tr>{headings}</tr></thead>{bodies}</table></div></section>'
    )


def _problem(line: dict[str, Any], row: Row, limit: int | None) -> str:
    cells = [
        (line["id"], f"<code>{_text(shortened(line['id'], 28))}</code>"),
        (line["solved"], f'<span class="strip">{line["verdicts"]}</span>'),
        (line["avg"], f"{line['avg']:.3f}"),
        (line["maj"], "–" if line["maj"] is None else f"{line['maj']:.2f}"),
        (line["length"], f"{line['length']:.0f}"),
        (line["truncated"], str(line["truncated"])),
        (line["failures"], str(line["failures"])),
    ]
    tds = "".join(f'<td data-value="{_text("" if value is None else value)}">{shown}</td>' for value, shown in cells)
    responses = "".join(_response(response, limit) for response in row["responses"])
    reference = row["reference"] if isinstance(row["reference"], str) else json.dumps(row["reference"])
    return (
        f'<tbody><tr>{tds}</tr><tr class="more"><td colspan="{len(COLUMNS)}"><details><summary>'
        f'<span class="ask">{_text(shortened(row["prompt"], 160))}</span></summary>'
        f'<pre class="prompt" dir="auto">{_text(row["prompt"])}</pre>'
        f'<p class="reference">Reference: <code>{_text(shortened(reference, 400))}</code></p>{responses}'
        "</details></td></tr></tbody>"
    )


def _response(response: dict[str, Any], limit: int | None) -> str:
    reward = response["reward"]
    mark = "failed" if reward is None else f"{reward:g}"
    right = " right" if reward is not None and reward > SOLVED else ""
    facts = [f"{response['tokens']} tokens", response["status"]]
    if "ending" in response:
        facts.append(f"{counted(response['turns'], 'turn')}, {response['ending']}")
    if response["answer"] is not None:
        facts.append(f"answer {shortened(response['answer'], 80)}")
    if response["failure"]:
        facts.append(shortened(response["failure"], 200))
    return (
        f'<div class="response"><small><span class="reward{right}">{mark}</span>{_text(" · ".join(facts))}</small>'
        f'<pre dir="auto">{_text(_cut(response["text"], limit))}</pre></div>'
    )


def _configuration(results: dict[str, Any]) -> str:
    figures = ("data_sets", "overall", "mean_over_data_sets", "problem_table")
    identity = {key: json.dumps(value) for key, value in results.items() if key not in figures}
    listed = "".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in identity.items())
    return (
        '<section id="configuration"><h2>Configuration</h2><details><summary>Everything that determines the result'
        f"</summary><dl>{listed}</dl></details></section>"
    )


def _within_budget(rows: Sequence[Row], budget: int) -> tuple[Sequence[Row], int | None, str]:
    """The rows to show, the length that a text is cut to (None: not at all), and a note that says so."""

    def characters(chosen: Sequence[Row]) -> int:
        return sum(len(response["text"]) for row in chosen for response in row["responses"])

    if characters(rows) <= budget:
        return rows, None, ""
    chosen = []
    for row in rows:
        firsts: dict[bool, Any] = {}
        for response in row["responses"]:
            firsts.setdefault((response["reward"] or 0.0) > SOLVED, response)
        chosen.append({**row, "responses": list(firsts.values())})
    note = "This page shows at most two responses per problem, one that solves it and one that does not"
    if characters(chosen) <= budget:
        return chosen, None, f"{note}; responses.jsonl has all of them."
    limit = max(SHORTEST_CUT, budget // sum(len(row["responses"]) for row in chosen))
    cut = f"{note}, and leaves out the middle of those over {limit:,} characters; responses.jsonl has them all."
    return chosen, limit, cut


def _cut(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters …]\n{text[-half:]}"
