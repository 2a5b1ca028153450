"""One place of a fleet: the actor that lives there now, the call that it has, and the requests that it works on.

A member has at most one call under way: start, load, work, park or end. It keeps what is left of each of its requests,
so that nothing that has arrived is sampled again after a death. Which requests it gets, and when its actor is given up,
is for the fleet to decide (`fleet.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment
from bapo.rollout.worker import continued
from bapo.screen.watch import ActorLine
from bapo.train.cluster.hosts import Published
from bapo.train.cluster.ray import Actor, Call, Hello

Doing = Literal["start", "load", "work", "park", "end", "nothing"]
DOING: dict[Doing, str] = {
    "start": "starting",
    "load": "loading weights",
    "work": "sampling",
    "park": "parking",
    "end": "being replaced",
    "nothing": "idle",
}
"""What a member does, in words."""
WORK_SECONDS = 0.5
"""How long a member samples before it answers."""
RECENT_ANSWERS = 32
"""The speed of a member is that of so many answers."""


class Member:
    """One place of the fleet."""

    def __init__(self, name: str, actor: Actor) -> None:
        self.name = name
        self.restarts = -1
        self.asked: Published | None = None
        """The weights that it was last asked to load."""
        self.given: dict[int, Request] = {}
        """What is left of each request that it works on, as another member could continue it."""
        self.portion: list[Request] = []
        """What it is given with its next call."""
        self.failures = 0
        """Failures in a row that are not deaths."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_ANSWERS)
        """When its last answers came, and with how many tokens."""
        self.renew(actor)

    def renew(self, actor: Actor) -> None:
        """Let this actor live here, and wait for it to start."""
        self.actor = actor
        self.hello: Hello | None = None
        self.version = NOTHING_LOADED
        self.restarts += 1
        self._recent.clear()
        self.call: Call | None = actor.call("hello", what="start")
        self.doing: Doing = "start"

    def end(self) -> None:
        """Begin to end the actor, and take its requests away. Without a call, there is nothing to wait for."""
        self.given, self.portion = {}, []
        self.hello, self.version = None, NOTHING_LOADED
        self.call, self.doing = self.actor.kill(), "end"

    def ask(self, doing: Literal["load", "work", "park"], *given: Any, what: str) -> None:
        """Give it a call."""
        self.call, self.doing = self.actor.call(doing, *given, what=what), doing

    def load(self, published: Published) -> None:
        """Ask it to load these weights and to check them."""
        self.asked = published
        given = (published.parcel, published.version, published.fingerprint, published.probe)
        self.ask("load", *given, what=f"load the weights of version {published.version}")

    def work(self, sampling: Sampling) -> None:
        """Ask it to sample for its requests, old and new, for a moment."""
        requests, self.portion = self.portion, []
        self.given |= {request.id: request for request in requests}
        self.ask("work", requests, sampling, WORK_SECONDS, what="sample")

    def keep(self, segments: Iterable[tuple[int, Segment]]) -> None:
        """Remember what it has sampled since its last answer."""
        tokens = 0
        for id, segment in segments:
            self.given[id] = continued(self.given[id], segment.tokens)
            tokens += len(segment.tokens)
            if segment.status is not None:
                del self.given[id]
        self._recent.append((time.monotonic(), tokens))

    @property
    def unfinished(self) -> list[Request]:
        """What is left of its requests, whether it has begun them or not."""
        return [*self.given.values(), *self.portion]

    def line(self) -> ActorLine:
        """What a person sees of it: what it does, and since when if it starts, which may take long."""
        doing = DOING["nothing" if self.call is None and not self.unfinished else self.doing]
        if self.doing == "start" and self.call is not None:
            doing = f"{doing} for {self.call.seconds:.0f} s"
        rate = self._rate() if self.given else 0.0
        return ActorLine(self.name, doing, self.version, rate, len(self.given), self.restarts)

    def _rate(self) -> float:
        """Tokens per second over the last answers."""
        if len(self._recent) < 2:
            return 0.0
        seconds = time.monotonic() - self._recent[0][0]
        return sum(tokens for _, tokens in list(self._recent)[1:]) / max(1e-9, seconds)
