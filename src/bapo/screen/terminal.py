"""Writing to a terminal, a pipe or a file: the one place that prints.

Much of what bapo tells comes from strangers: names of files and columns, templates, responses, errors of reward
functions. On a terminal, a control character in it could move the cursor, hide a line or change the title. So every
text passes `visible`, which shows such characters as dots, whether it goes out as a line (`say`, `write_line`), through
rich (`make_console`) or, from libraries, through standard error (`Visible`). What machines read goes out as it is
(`write_exact`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_SIMPLE = ("dumb", "unknown")
"""Values of TERM that name a terminal without a movable cursor."""
_COLOUR = r"(?:0?[0-4]|2[1-4]|[34][0-79]|9[0-7]|10[0-7]|[34]8;5;[0-9]+)"
_COLOURS = re.compile(rf"(\x1b\[(?:{_COLOUR}(?:;{_COLOUR})*)?m)")
"""What makes a text bold, dim, slanted, underlined or one of 256 colours, and does nothing else. It does not hide it:
a stranger's text in --help may be coloured, too, but can be read."""


def can_redraw(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor and show bars and lines."""
    return stream.isatty() and _encoding(stream).lower().startswith("utf") and os.environ.get("TERM") not in _SIMPLE


def make_console(stream: TextIO, *, width: int | None = None) -> Console:
    """A console of rich that redraws the stream in place."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        """A console that shows control characters in any text; those of rich itself stay what they are."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                plain = segment.control or segment.text.isprintable()
                yield segment if plain else Segment(visible(segment.text), segment.style)

    return SafeConsole(file=stream, force_terminal=True, width=width, highlight=False)


def say(text: str = "", *, error: bool = False) -> None:
    """Print the text as a line of its own, now, on standard output or standard error."""
    write_line(sys.stderr if error else sys.stdout, text)


def write_line(stream: TextIO, text: str) -> None:
    """Write the text as a line of its own, now. Control characters, and letters that the stream lacks, are replaced.

    A further line of it, which may be a stranger's, cannot begin as our messages do.
    """
    shown = visible(text.expandtabs(4).replace("\r\n", "\n"))
    encoding = _encoding(stream)
    stream.write(shown.replace("\nbapo:", "\n  bapo:").encode(encoding, errors="replace").decode(encoding) + "\n")
    stream.flush()


def write_exact(text: str) -> None:
    """Write what a machine will read, such as JSON or a script, to standard output as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def visible(text: str) -> str:
    """The text with a dot for every character that is none: control characters, marks of direction, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(letter if letter == "\n" or letter.isprintable() else "·" for letter in text)


def printable(text: str, *, newline: str = "\n") -> str:
    """The same, whatever ends its lines; `newline` takes the place of that."""
    return newline.join(visible(line) for line in text.expandtabs(4).splitlines())


class Visible:
    """A stream for what libraries write: the texts become visible, and only colours are kept."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text."""
        parts = _COLOURS.split(text)
        self.stream.write("".join(part if index % 2 else visible(part) for index, part in enumerate(parts)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write all of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def duration(seconds: float) -> str:
    """`4:10`, `1:02:05` or, from 48 hours on, `26 days`; a question mark if the number is not finite."""
    if not isfinite(seconds) or round(seconds) >= 48 * 3600:
        return f"{seconds / 86400:,.0f} days" if isfinite(seconds) else "?"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def eta(left: float, done: float, seconds: float) -> str:
    """`eta 4:10`: how long the rest takes if it goes on as what was done in these seconds; empty if nothing was."""
    return f"eta {duration(left * seconds / done)}" if done > 0 else ""


def shortened(text: str, length: int) -> str:
    """The words of a text on one line, cut with an ellipsis where they are too long."""
    joined = " ".join(str(text).split())
    return joined if len(joined) <= length else joined[: length - 1] + "…"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: its first column to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(first), *map(str.rjust, texts, others)]).rstrip() for name, *texts in rows]


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"
