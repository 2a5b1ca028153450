"""Keeps one engine at work on requests that come and go, and moves them to new weights without losing a token.

    give    add requests; they begin at the next `work`
    work    let the engine sample for some time; returns what was sampled
    load    change the weights under the requests: park them, load, continue them from their own tokens
    park    give everything back unfinished

An engine may take one submission at a time. New requests then interrupt those under way, which are parked and submitted
again together with the new ones: this costs a prefill, so callers should give requests in large portions. An
interrupted response is not parked for the caller: its segment has no status, and more will come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bapo.rollout.engine import Engine, Request, Sampling, Segment
from bapo.types import Status

if TYPE_CHECKING:
    from torch import Tensor

PARK_SECONDS = 60.0
"""How long an engine may take to return what it was working on."""


class Worker:
    """An engine with the requests that it is working on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: list[Request] = []
        self.under_way: dict[int, Request] = {}
        """What each request under way would ask for if it were submitted now."""
        self.sampling = Sampling()
        self._found: list[tuple[int, Segment]] = []

    def give(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Work on these requests, too, after those that were given before."""
        if sampling != self.sampling and (self.waiting or self.under_way):
            raise RuntimeError("requests with another sampling are under way. First park them.")
        self.sampling = sampling
        self.waiting += requests

    def work(self, seconds: float) -> list[tuple[int, Segment]]:
        """Sample for about this long, and return (request id, segment) for everything sampled since the last call."""
        self._begin_waiting()
        if self.under_way:
            self._take_in(self.engine.collect(seconds))
        found, self._found = self._found, []
        return found

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Continue everything under these weights."""
        self._interrupt()
        self.engine.load(weights, version=version)

    def park(self) -> list[tuple[int, Segment]]:
        """Stop all work. Returns what was sampled since the last call; unfinished responses come back as PARKED."""
        self._interrupt()
        parked = [(request.id, Segment(status=Status.PARKED)) for request in self.waiting]
        found, self._found, self.waiting = self._found + parked, [], []
        return found

    def _begin_waiting(self) -> None:
        if not self.waiting:
            return
        if not self.engine.continuous:
            self._interrupt()
        self.engine.submit(self.waiting, self.sampling)
        self.under_way |= {request.id: request for request in self.waiting}
        self.waiting = []

    def _interrupt(self) -> None:
        """Take everything back from the engine. What is unfinished waits before all others, in the same order."""
        if not self.under_way:
            return
        before = dict(self.under_way)
        self.engine.park()
        deadline = time.monotonic() + PARK_SECONDS
        while self.under_way:
            self._take_in(self.engine.collect(0), interrupted=True)
            if self.under_way and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{type(self.engine).__name__} was asked to park {len(before)} responses, and has not returned "
                    f"{len(self.under_way)} of them for {PARK_SECONDS:.0f} s. Start it again."
                )
        order = {id: place for place, id in enumerate(before)}
        self.waiting.sort(key=lambda request: order.get(request.id, len(order)))  # stable: newcomers keep their order

    def _take_in(self, collected: Iterable[tuple[int, Segment]], *, interrupted: bool = False) -> None:
        for id, segment in collected:
            request = continued(self.under_way.pop(id), segment.tokens)
            if interrupted and segment.status is Status.PARKED:
                self.waiting.append(request)
                segment = replace(segment, status=None)
            elif segment.status is None:
                self.under_way[id] = request
            if segment.tokens or segment.status is not None:
                self._found.append((id, segment))


def continued(request: Request, tokens: Sequence[int]) -> Request:
    """The request for what is left after these tokens."""
    return replace(
        request,
        context=[*request.context, *tokens],
        position=request.position + len(tokens),
        max_new_tokens=request.max_new_tokens - len(tokens),
    )
