"""How far sampling and learning are, while they go on: what is told, how often, and the words a person reads.

    engine -> Teller -> scheduler or evaluation -> a line in a log, or on a screen
    loop                                        -> the same, after every update

A watch only looks. Nothing that is sampled, scored or learned depends on whether there is one, nor on any clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Learned", "OnScreen", "Sampled", "Tell", "Teller", "Watch", "Watching", "in_lines", "unwatched"]

TELL_SECONDS = 1.0
"""Least time between two calls of a watch by an engine."""
LINE_SECONDS = 30.0
"""Least time between two lines in a log, and before the first: what takes less is not worth one."""
SCREEN_SECONDS = 2.0
"""What takes less does not appear on a screen."""


@dataclass(frozen=True)
class Sampled:
    """How far the responses asked for are."""

    responses: int
    """Complete."""
    asked: int
    """Complete or not."""
    tokens: int
    """Sampled so far, those of incomplete responses included."""

    def line(self, what: str, seconds: float) -> str:
        """`sampling: 412/2048 responses, 96,400 tokens, 1,240 tokens/s`, so many seconds after the beginning."""
        rate = self.tokens / seconds if seconds > 0 else 0.0
        return f"{what}: {self.responses}/{self.asked} responses, {self.tokens:,} tokens, {rate:,.0f} tokens/s"


@dataclass(frozen=True)
class Learned:
    """How far the passes over a rollout are."""

    updates: int
    """Taken."""
    groups: int
    """Visited, counted once per pass."""
    asked: int
    """Visits of all passes."""
    tokens: int
    """Trained on."""

    def line(self, what: str, seconds: float) -> str:
        """`learning: 48/128 groups, 3 updates, 96,400 tokens, 1,240 tokens/s`, so many seconds after the beginning."""
        rate = self.tokens / seconds if seconds > 0 else 0.0
        done = f"{self.groups}/{self.asked} groups, {self.updates} update{'s' if self.updates != 1 else ''}"
        return f"{what}: {done}, {self.tokens:,} tokens, {rate:,.0f} tokens/s"


class Told(Protocol):
    """Anything that can say how far it is."""

    def line(self, what: str, seconds: float) -> str:
        """In words, so many seconds after the beginning."""


Watch = Callable[[Sampled], None]
Tell = Callable[[Told], None]
"""A watch of anything; also a Watch."""
Watching = Callable[[str], AbstractContextManager[Tell | None]]
"""Entered around what goes on, by its name ("sampling", "learning"), which tells the watch how far it is."""


def unwatched(what: str) -> AbstractContextManager[None]:
    """Nobody looks."""
    del what
    return nullcontext()


class Teller:
    """The engine's side: called wherever the host knows the counts anyway, it passes on about one call a second."""

    def __init__(self, watch: Watch | None, asked: int) -> None:
        self.watch, self.asked = watch, asked
        self.due = float("-inf")

    def __call__(self, responses: int, tokens: int, *, last: bool = False) -> None:
        """The counts so far; the first and the last of them are always passed on."""
        if self.watch is not None and (last or time.monotonic() >= self.due):
            self.watch(Sampled(responses, self.asked, tokens))
            self.due = time.monotonic() + TELL_SECONDS


@contextmanager
def in_lines(what: str, say: Callable[[str], None], clock: Callable[[], float]) -> Iterator[Tell]:
    """A watch that says a line now and then, for a log."""
    began = said = clock()

    def watch(told: Told) -> None:
        nonlocal said
        now = clock()
        if now - said >= LINE_SECONDS:
            said = now
            say(told.line(what, now - began))

    yield watch


class OnScreen:
    """A line for a screen that another thread redraws: empty unless something has been going on for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.now: tuple[float, str] | None = None  # since when, and how far it is; replaced whole, so no lock

    @contextmanager
    def doing(self, what: str) -> Iterator[Tell]:
        """A watch for as long as this goes on."""
        began = self.clock()

        def watch(told: Told) -> None:
            self.now = began, told.line(what, self.clock() - began)

        try:
            yield watch
        finally:
            self.now = None

    @property
    def line(self) -> str:
        """What to show now."""
        now = self.now
        return now[1] if now is not None and self.clock() - now[0] >= SCREEN_SECONDS else ""
