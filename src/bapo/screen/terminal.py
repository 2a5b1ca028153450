"""Writing to a terminal, a pipe or a file: what a stream can show, and how to make any text safe to show there."""

from __future__ import annotations

import os
from math import isfinite
from typing import TextIO

from rich.console import Console

__all__ = ["can_redraw", "duration", "make_console", "printable", "write_line"]

_SIMPLE = ("dumb", "unknown")
"""Values of TERM that name a terminal without a movable cursor."""


def can_redraw(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor and show bars and lines."""
    return stream.isatty() and _encoding(stream).lower().startswith("utf") and os.environ.get("TERM") not in _SIMPLE


def make_console(stream: TextIO) -> Console:
    """A console of rich that redraws the stream in place."""
    return Console(file=stream, force_terminal=True, highlight=False)


def write_line(stream: TextIO, text: str) -> None:
    """Write the text as a line of its own, now. Letters that the stream's encoding lacks become question marks."""
    encoding = _encoding(stream)
    stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
    stream.flush()


def printable(text: str, *, newline: str = "\n") -> str:
    """The text without anything that could move the cursor: control characters and lone surrogates become dots."""
    lines = text.expandtabs(4).splitlines()
    return newline.join("".join(letter if letter.isprintable() else "·" for letter in line) for line in lines)


def duration(seconds: float) -> str:
    """`4:10`, `1:02:05` or, from 48 hours on, `26 days`; a question mark if the number is not finite."""
    if not isfinite(seconds):
        return "?"
    if round(seconds) >= 48 * 3600:
        return f"{seconds / 86400:,.0f} days"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"
