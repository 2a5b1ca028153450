"""What the HTML pages of `bapo report`, `bapo eval` and `bapo diagnose` share: the document, the design, the plots.

A page is one file with its style, scripts and values inside. Its content security policy lets it fetch nothing, except
that a live page may ask its own server. Each script is a file here or beside the page that needs it, and defines one
object: `dom` makes elements, `theme` is light or dark, `lines` has the arithmetic of curves, `overlaps` finds lines
that hide each other, and `charts` turns panels into plots of plotly.js.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from math import isfinite
from typing import Any

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src {}; base-uri 'none'; form-action 'none'"
)
CHARTS = ("plotly", "pages/lines.js", "pages/overlaps.js", "pages/charts.js")
"""The scripts that a page with plots needs."""


def document(
    title: str,
    body: Sequence[str],
    *,
    styles: Sequence[str] = (),  # beside pages/page.css
    scripts: Sequence[str] = (),  # beside pages/dom.js and pages/theme.js; "plotly" is plotly.js
    values: Mapping[str, Any] | None = None,  # for the scripts
    live: bool | None = None,  # whether the page follows a run; None if it is not that kind of page
) -> str:
    """A whole page. `title` is text; `body` is HTML."""
    said = "" if live is None else f' data-live="{str(live).lower()}"'
    policy = POLICY.format("'none'" if live is None else "'self'")
    embedded = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"{said}>',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escaped(title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>{''.join(map(_file, ('pages/page.css', *styles)))}</style>",
            "</head>",
            "<body>",
            *body,
            *([] if values is None else [f'<script type="application/json" id="values">{embedded}</script>']),
            *(f"<script>{_file(name)}</script>" for name in ("pages/dom.js", "pages/theme.js", *scripts)),
            "</body>",
            "</html>",
            "",
        ]
    )


def top(title: str, said: str) -> str:
    """The head of a page: its title, a sentence below it, and the button for light or dark."""
    return (
        f'<header class="top"><div><h1>{escaped(title)}</h1><p>{escaped(said)}</p></div>'
        '<button class="button" id="theme" type="button" hidden>Dark</button></header>'
    )


def escaped(value: Any) -> str:
    """Text for a page. Characters that a text file cannot hold (lone surrogates, NUL) become question marks."""
    return html.escape(str(value).replace("\0", "?").encode("utf-8", "replace").decode("utf-8"))


def panel(kind: str, title: str, x: str, series: Iterable[Any] = (), **more: Any) -> dict[str, Any]:
    """A plot for pages/charts.js: its kind, its title, what x is, its series, and what its kind needs besides."""
    return {"kind": kind, "title": title, "x": x, "series": list(series), **more}


def number(value: float | None) -> float | None:
    """The value in six significant digits; None if there is none or it is not finite, because JSON has no NaN."""
    return None if value is None or not isfinite(value) else float(f"{value:.6g}")


def numbers(values: Iterable[float | None]) -> list[float | None]:
    """`number` of each value."""
    return [number(value) for value in values]


def _file(name: str) -> str:
    """The text of a file of this package; plotly.js as the plotly package ships it."""
    if name == "plotly":
        return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    return files("bapo").joinpath(*name.split("/")).read_text(encoding="utf-8")
