"""A live display that leaves no fragments: not after a change of the terminal's size, not after a key is pressed.

rich moves the cursor up by as many lines as it drew, and draws again. Two things break that count. When a terminal
becomes narrower, it wraps the lines that are there already, so the old picture is taller than it was. And a terminal
echoes keys: the ^C of Ctrl-C at the end of the last line wraps it, and Enter adds a line.

So the picture is drawn anew after a change of size: the screen is cleared, the latest lines that were printed above it
are printed again, and the picture follows. What scrolled off the screen before stays in the terminal's history. And
nothing is echoed while the display is up, if this process is in the terminal's foreground.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleRenderable, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

REMEMBERED = 200
"""How many lines are kept to be printed again. No terminal shows more above the picture."""


class SteadyLive(Live):
    """rich's Live, drawn anew whenever the size of the terminal changes."""

    def __init__(self, console: Console, get_renderable: Callable[[], RenderableType]) -> None:
        super().__init__(console=console, get_renderable=get_renderable, refresh_per_second=4)
        self.drawn_for = console.size
        self.printed: deque[Text] = deque(maxlen=REMEMBERED)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by rich with what is about to be printed; puts the picture below it."""
        with self._lock:
            self.printed += [part for part in renderables if isinstance(part, Text)]
            size = self.console.size
            if size == self.drawn_for or not self.console.is_interactive:
                return super().process_renderables(renderables)
            self.drawn_for = size
            self._live_render.set_renderable(self.renderable)
            picture = self.console.render_lines(self._live_render.renderable, pad=False)
            room = size.height - min(len(picture), size.height)
            others = [part for part in renderables if not isinstance(part, Text)]
            cleared = Control()  # from the upper left corner on; many terminals would save what "clear all" clears
            cleared.segment = Segment("\x1b[H\x1b[J", None, [(ControlType.HOME,)])
            return [cleared, *self._latest(room), *others, self._live_render]

    def _latest(self, room: int) -> list[ConsoleRenderable]:
        """The latest printed texts that fit into so many lines of the terminal as it is now."""
        chosen: list[ConsoleRenderable] = []
        for text in reversed(self.printed):
            room -= len(self.console.render_lines(text, pad=False))
            if room < 0:
                break
            chosen.insert(0, text)
        return chosen


@contextmanager
def unechoed() -> Iterator[None]:
    """Keep a terminal from echoing keys. Does nothing if there is no terminal, or if another job has it."""
    if not _foreground():
        yield
        return
    import termios

    before, silent = termios.tcgetattr(sys.stdin), termios.tcgetattr(sys.stdin)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        if _foreground():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _foreground() -> bool:
    """Whether standard input is a terminal that this process may change: a job in the background would be stopped."""
    try:
        return sys.stdin is not None and sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # no such calls here, or no such stream
        return False
