"""A diagnosis as text: rich tables on a terminal, plain columns in a file or a pipe."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bapo.diagnose.diagnosis import Diagnosis
from bapo.diagnose.tables import Part, parts, read_as, sentence
from bapo.screen.terminal import make_console, write_drawn

PLAIN_WIDTH = 120
"""Width in characters if the stream is not a terminal."""


def print_diagnosis(diagnosis: Diagnosis, stream: TextIO | None = None) -> None:
    """Print the headline and advice first, then findings, numbers, and what the dump cannot tell."""
    stream = stream or sys.stdout
    plain = not stream.isatty()
    # Drawn into memory first, so that a letter that the stream cannot encode becomes a question mark and not an error.
    page = io.StringIO()
    console = make_console(page, colours=not plain, width=PLAIN_WIDTH if plain else None)
    console.print(Text(diagnosis.headline.text, "bold red" if diagnosis.headline.tone == "wrong" else "bold"))
    console.print()
    console.print(Text(read_as(diagnosis), "dim"))
    for note in diagnosis.dump.notes:
        _item(console, note, "dim")

    _heading(console, "Recommendation")
    for line in diagnosis.advice:
        _item(console, line)
    _heading(console, "Problems" if diagnosis.findings else "Problems: none found")
    for finding in diagnosis.findings:
        name = Text(finding.name, "bold red" if finding.serious else "bold yellow")
        _item(console, Text.assemble(name, f"  {sentence(finding, len(diagnosis.dump.updates))}"))
    for part in parts(diagnosis):
        _heading(console, part.title)
        console.print(Padding(Text(part.reading, "dim"), (0, 0, 0, 2)))
        console.print(_table(part, plain))
    _heading(console, "What this dump cannot tell")
    for line in diagnosis.unknown:
        _item(console, line)

    write_drawn(stream, "\n".join(line.rstrip() for line in page.getvalue().splitlines()))


def _heading(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold cyan"))


def _item(console: Console, line: str | Text, style: str = "") -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3, justify="right")
    grid.add_column()
    grid.add_row("-", line if isinstance(line, Text) else Text(line, style))
    console.print(grid)


def _table(part: Part, plain: bool) -> Table:
    table = Table(
        box=None if plain else box.ROUNDED,
        show_header=any(part.headings),
        border_style="dim",
        padding=(0, 1),
        pad_edge=True,
        header_style="" if plain else "bold",
    )
    for index, heading in enumerate(part.headings):
        numeric = index > 0 and all(
            row[index].lstrip("+-")[:1].isdigit() or row[index] in ("", "none left", "no signal") for row in part.rows
        )
        table.add_column(Text(heading), justify="right" if numeric else "left", overflow="fold")
    for row in part.rows:
        table.add_row(*map(Text, row))
    return table
