"""Reports how far sampling and learning are while they run: what is reported, how often, and in which words.

    scheduler or evaluation -> a line in a log, or on a screen, about once a second
    loop                    -> the same, after every update

A watch only observes. Nothing that is sampled, scored or learned depends on a watch or on any clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

LINE_SECONDS = 30.0
"""The least time between two lines in a log, and before the first. Shorter work gets no line."""
SCREEN_SECONDS = 2.0
"""Work that takes less time does not appear on the screen."""


@dataclass(frozen=True)
class Learned:
    """How far the passes over a rollout are."""

    updates: int
    """Updates taken."""
    groups: int
    """Groups visited, counted once per pass."""
    asked: int
    """Visits in all passes together."""
    tokens: int
    """Tokens trained on."""

    def line(self, what: str, seconds: float) -> str:
        """`learning: 48/128 groups, 3 updates, 96,400 tokens, 1,240 tokens/s`, this many seconds after the start."""
        rate = self.tokens / seconds if seconds > 0 else 0.0
        done = f"{self.groups}/{self.asked} groups, {self.updates} update{'s' if self.updates != 1 else ''}"
        return f"{what}: {done}, {self.tokens:,} tokens, {rate:,.0f} tokens/s"


@dataclass(frozen=True)
class ActorLine:
    """What an actor of a cluster does."""

    name: str
    doing: str
    version: int
    """The version of its weights."""
    tokens_per_second: float
    responses: int
    """Responses it is working on."""
    restarts: int

    def facts(self) -> dict[str, str]:
        """Its numbers under their headings. An actor that samples and learns nothing now has the speed `-`."""
        return {
            "version": "" if self.version < 0 else str(self.version),
            "tok/s": f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "-",
            "responses": str(self.responses or ""),
            "restarts": str(self.restarts or ""),
        }


class Told(Protocol):
    """Anything that can say how far it is. With a number `every`, a log has a line about it as often as that."""

    def line(self, what: str, seconds: float) -> str:
        """One line of words, this many seconds after the start."""


Tell = Callable[[Told], None]
"""A function that is told how far something is."""


@contextmanager
def in_lines(what: str, say: Callable[[str], None], clock: Callable[[], float]) -> Iterator[Tell]:
    """A watch for a log. It says a line now and then."""
    began = said = clock()

    def watch(told: Told) -> None:
        nonlocal said
        now = clock()
        if now - said >= getattr(told, "every", LINE_SECONDS):
            said = now
            say(told.line(what, now - began))

    yield watch


class OnScreen:
    """A line for a screen that another thread redraws. It is empty unless some work has been running for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.now: tuple[float, str] | None = None  # since when, and how far it is; replaced as a whole, so no lock

    @contextmanager
    def doing(self, what: str) -> Iterator[Tell]:
        """A watch for as long as this work runs."""
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
