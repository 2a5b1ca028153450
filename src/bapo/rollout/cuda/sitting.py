"""What the CUDA engine has under way, seen from the host: who has which slot and which pages, and for how long.

The host works one stretch behind the device. It queues the next stretch of steps for everybody who is seated, and only
then reads how the stretch before it went. While the device runs on, the host collects the responses that ended, gives
their slots and pages to others and queues the prefill of newcomers. A response that ends idles for the rest of its
stretch and for the next one.

Requests are served in the order in which they were submitted. If pages run out, the response that was submitted last
gives its pages back and waits with what it sampled; when there are enough pages again, it is prefilled with these
tokens, which is also what happens to parked responses. The first response always has what it needs, so sampling never
stands still. What is decided depends on the requests and on what was sampled, never on time: two runs with the same
requests decide the same, however often somebody collects in between.

A response that ended a turn keeps its slot and pages until somebody needs them. If it comes back before, only what was
said to it is prefilled. Its keys and values are those that it would have had without the break.

The token budget is never exceeded, because tokens that are queued count as sampled until the host has looked.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapo.rollout.cuda.graphs import Pool, Reading
from bapo.rollout.cuda.kernels.sampling import SlotStatus, State
from bapo.rollout.engine import Request, Segment
from bapo.rollout.randomness import stream
from bapo.rollout.sittings import non_finite
from bapo.types import Status

AHEAD = 1
"""Stretches that are queued when the host looks at an older one. At 0 the device waits for the host."""
REFILL = 8
"""Newcomers are seated when one in this many slots is idle, because a prefill costs a few steps."""
HEADROOM = 256
"""A newcomer is seated only if the free pages hold its context, and this many tokens more of everybody seated."""

STATUSES = {SlotStatus.STOPPED: Status.STOPPED, SlotStatus.TRUNCATED: Status.TRUNCATED}

Name = tuple[int, tuple[int, ...]]
"""What identifies a response: its seed and all of its tokens."""
Context = tuple[int, Sequence[int]]
"""Tokens, and how many of them the cache holds."""


@dataclass(eq=False)
class Seated:
    """A request in a slot."""

    index: int
    cached: int
    """Tokens in the cache when it was seated."""
    left: int
    """Tokens until the length limit."""
    context: int | None = None
    """Responses with the same number were seated with the same context and keys of the same weights."""
    produced: int = 0
    ahead: int = 0
    """Steps that are queued and not looked at."""
    given: int = 0
    """Tokens that `segments` has already returned."""

    @property
    def grows(self) -> int:
        """Tokens that it may get beyond those that are queued."""
        return max(0, self.left - self.ahead)

    def tokens_after(self, steps: int) -> int:
        """Most tokens in the cache after this many steps more."""
        return self.cached + self.produced + min(self.left, self.ahead + steps)


@dataclass(frozen=True)
class Flight:
    """A stretch that is queued."""

    seated: list[tuple[int, Seated]]
    steps: int
    tokens: int
    """Most tokens that it can give."""
    reading: Reading


@dataclass(eq=False)
class Sitting:
    """What is under way, seen from the host."""

    pool: Pool
    requests: list[Request]
    _: KW_ONLY
    budget: int
    """Most tokens that may still be sampled."""
    stretch: int
    """Steps between two looks."""
    prefill_tokens: int
    keep: bool
    """Whether responses parked in this sitting keep their slots."""
    kept: dict[Name, int]
    """Slots that hold keys and values of responses that may come back."""
    turns: bool = False

    def __post_init__(self) -> None:
        self.parked = False
        self.waiting = deque[int]()
        self.seated: dict[int, Seated] = {}
        self.flights: deque[Flight] = deque()
        self.left: list[tuple[int, NDArray[np.int32], Status | None]] = []  # what left and was not returned yet
        self.asked: dict[int, Name] = {}  # what is kept for the requests that wait, by their index
        reserved = set(self.kept.values())
        self.free = [slot for slot in reversed(range(self.pool.places)) if slot not in reserved]
        self.numbers: dict[tuple[int, ...], int] = {}
        self.contexts: list[int | None] = []
        requests, self.requests = self.requests, []
        self.add(requests)

    def add(self, requests: list[Request]) -> None:
        """Let these wait before all that wait, because they were begun before."""
        begin = len(self.requests)
        self.requests += requests
        numbers = self.numbers
        self.contexts += [None if r.position else numbers.setdefault(tuple(r.context), len(numbers)) for r in requests]
        added = range(begin, len(self.requests))
        for index in added:
            name = _begin_of(self.requests[index], self.kept)
            if name is not None and name not in self.asked.values():
                self.asked[index] = name
        self.waiting.extendleft(reversed(added))
        self.rests_at = self.unfinished // 2

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether slots are made for responses as long as these."""
        return all(len(request.context) + request.max_new_tokens <= self.pool.reach for request in requests)

    @property
    def unfinished(self) -> int:
        """How many responses have a slot or wait for one."""
        return len(self.seated) + len(self.waiting)

    @property
    def resting(self) -> bool:
        """Whether half of what was under way has ended its turn."""
        return self.turns and not self.over and self.unfinished <= self.rests_at

    @property
    def ids(self) -> set[int]:
        """The responses that are under way."""
        return {self.requests[index].id for index in (*self.waiting, *(s.index for s in self.seated.values()))}

    @property
    def over(self) -> bool:
        """Whether sampling is over: all responses are complete, the budget is spent, or the rest is parked."""
        return self.parked or self.budget <= 0 or not (self.unfinished or self.turns)

    def work(self, deadline: float | None) -> None:
        """Sample until the sitting is over, rests, or the deadline has passed and something was sampled."""
        sampled = 0
        while not (self.over or self.resting):
            if self._wants_refill():
                self._refill()
            if not self._launch() or len(self.flights) > AHEAD:
                sampled += self._look()
                if sampled and deadline is not None and time.monotonic() >= deadline:
                    return

    def segments(self, version: int) -> list[tuple[int, Segment]]:
        """What was sampled since the last call: last segments of responses that left, pieces of those that go on."""
        if self.over:
            while self.flights:
                self._look()
            self._leave(dict.fromkeys(self.seated, Status.PARKED))
            nothing = np.zeros((3, 0), dtype=np.int32)
            self.left += [(index, nothing, Status.PARKED) for index in self.waiting]
            self.waiting.clear()
        pieces = self.left
        self.left = []
        if self.seated:
            first = min(seated.given for seated in self.seated.values())
            last = max(seated.produced for seated in self.seated.values())
            records = self.pool.read(list(self.seated), first, last)
            for column, seated in enumerate(self.seated.values()):
                pieces.append((seated.index, records[:, column, seated.given - first : seated.produced - first], None))
                seated.given = seated.produced
        return [
            (self.requests[index].id, _segment(records, version, status))
            for index, records, status in pieces
            if records.shape[1] or status is not None
        ]

    def _spare(self) -> int:
        """Tokens of the budget that are neither sampled nor queued."""
        return self.budget - sum(flight.tokens for flight in self.flights)

    def _wants_refill(self) -> bool:
        """Slots are refilled a few at a time."""
        idle = self.pool.slots - len(self.seated)
        return bool(self.waiting) and (not self.seated or idle >= max(1, self.pool.slots // REFILL))

    def _refill(self) -> None:
        """Seat the next requests: where their keys and values were kept, or in a free slot.

        A context that another seated response has is shared with it; all others are prefilled.
        """
        pages = self.pool.pages
        room = min(self._spare(), self.pool.slots) - len(self.seated)
        reserved = sum(pages.lacking(slot, s.tokens_after(HEADROOM)) for slot, s in self.seated.items())
        holders = {s.context: slot for slot, s in self.seated.items() if s.context is not None}
        newcomers: dict[int, Seated] = {}
        contexts: dict[int, Context] = {}
        copies: list[tuple[int, int]] = []
        while self.waiting and len(newcomers) < room:
            index = self.waiting[0]
            request, context = self.requests[index], self.contexts[index]
            source = None if context is None else holders.get(context)
            alone = not self.seated and not newcomers
            slot = self._slot_for(index, shares=source is not None, reserved=reserved, alone=alone)
            if slot is None:
                break
            self.waiting.popleft()
            newcomer = Seated(index, len(request.context) - 1, request.max_new_tokens)
            if name := self.asked.pop(index, None):
                del self.kept[name]
                contexts[slot] = len(name[1]) - 1, request.context[:-1]
            else:
                self.free.pop()
                newcomer.context = context
                if context is not None:
                    holders.setdefault(context, slot)
                if source is None:
                    contexts[slot] = 0, request.context[:-1]
                elif partly := pages.share(source, slot, newcomer.cached):
                    copies.append(partly)
            pages.extend(slot, newcomer.cached)
            reserved += pages.lacking(slot, newcomer.tokens_after(HEADROOM))
            newcomers[slot] = newcomer
        if newcomers:
            self._prefill(contexts)
            if copies:
                self.pool.copy(copies)
            self._seat(newcomers)

    def _slot_for(self, index: int, *, shares: bool, reserved: int, alone: bool) -> int | None:
        """A slot for a request, with enough pages for it besides the reserved ones; None if it has to wait.

        Slots that are kept for nobody who waits are given up for it. If nobody else is seated, so are all others.
        """
        request, name = self.requests[index], self.asked.get(index)
        cached = len(request.context) - 1
        pages, tokens = self.pool.pages, cached + min(request.max_new_tokens, HEADROOM)
        shared = cached if shares and name is None else 0
        while True:
            slot = self.kept[name] if name else self.free[-1] if self.free else None
            if slot is not None and pages.lacking(slot, tokens, shared=shared) + reserved <= pages.free:
                return slot
            if not self._give_up_kept(everything=alone, except_for=name):
                assert not alone, "the pool is too small for a single response"
                return None

    def _give_up_kept(self, *, everything: bool, except_for: Name | None = None) -> bool:
        """Free a slot that is kept for nobody who waits, or else (`everything`) any that is kept. False: no such."""
        asked = {name: index for index, name in self.asked.items()}
        name = next((name for name in self.kept if name not in asked), None)
        if name is None and everything:
            name = next((name for name in reversed(self.kept) if name != except_for), None)
        if name is None:
            return False
        self.asked.pop(asked.get(name, -1), None)
        slot = self.kept.pop(name)
        self.pool.pages.release(slot)
        self.free.append(slot)
        return True

    def _prefill(self, contexts: dict[int, Context]) -> None:
        """Compute keys and values of contexts except the last token, which the next step feeds."""
        batch: dict[int, Context] = {}
        tokens = 0
        for slot, (cached, context) in contexts.items():
            if len(context) == cached:
                continue
            if batch and tokens + len(context) - cached > self.prefill_tokens:
                self.pool.prefill(batch)
                batch, tokens = {}, 0
            batch[slot] = cached, context
            tokens += len(context) - cached
        if batch:
            self.pool.prefill(batch)

    def _seat(self, newcomers: dict[int, Seated]) -> None:
        lines = np.zeros((len(State), len(newcomers)), dtype=np.int64)
        for column, newcomer in enumerate(newcomers.values()):
            request = self.requests[newcomer.index]
            lines[State.LAST, column] = request.context[-1]
            lines[State.LENGTH, column] = newcomer.cached
            lines[State.LEFT, column] = newcomer.left
            lines[State.STREAM, column] = stream(request.seed).view(np.int64)
            lines[State.POSITION, column] = request.position
            lines[State.STATUS, column] = SlotStatus.RUNNING
        self.pool.start(list(newcomers), lines)
        self.seated |= newcomers
        self.pool.seat(list(self.seated))

    def _launch(self) -> bool:
        """Queue a stretch for everybody who is seated. False if the host has to look before it can decide."""
        spare = self._spare()
        if not self.flights and len(self.seated) > spare:
            last = sorted(self.seated, key=lambda slot: self.seated[slot].index)[spare - len(self.seated) :]
            self._leave(dict.fromkeys(last, Status.PARKED))  # the budget has no token left for them
        growing = [seated.grows for seated in self.seated.values() if seated.grows]
        if not growing:
            return False
        steps = min(self.stretch, max(growing), spare // len(growing))
        if steps < 1 or not self._reserve(steps):
            return False
        self.pool.advance(len(self.seated), steps)
        tokens = sum(min(steps, seated.grows) for seated in self.seated.values())
        for seated in self.seated.values():
            seated.ahead += steps
        self.flights.append(Flight(list(self.seated.items()), steps, tokens, self.pool.reading()))
        return True

    def _reserve(self, steps: int) -> bool:
        """Give everybody who is seated the pages for the next steps. False if that takes a look first."""
        pages = self.pool.pages
        while True:
            tokens = {slot: seated.tokens_after(steps) for slot, seated in self.seated.items()}
            if sum(pages.lacking(slot, needed) for slot, needed in tokens.items()) <= pages.free:
                break
            if self._give_up_kept(everything=True):
                continue
            if self.flights:
                return False  # who has to wait keeps what was sampled, so it must be known
            self._leave({max(self.seated, key=lambda slot: self.seated[slot].index): None})
        for slot, needed in tokens.items():
            pages.extend(slot, needed)
        return True

    def _look(self) -> int:
        """Read what the oldest stretch did, and free the slots of responses that ended. Returns the tokens sampled."""
        flight = self.flights.popleft()
        there = [(slot, seated) for slot, seated in flight.seated if self.seated.get(slot) is seated]
        if not there:
            return 0
        sampled, ended = 0, {}
        lines = flight.reading.wait()[:, [slot for slot, _ in there]].T.tolist()
        for (slot, seated), line in zip(there, lines, strict=True):
            status, produced = SlotStatus(line[State.STATUS]), line[State.PRODUCED]
            if status == SlotStatus.BROKEN:
                raise non_finite(self.requests, seated.index, line[State.POSITION] - 1)
            sampled += produced - seated.produced
            seated.produced, seated.left = produced, line[State.LEFT]
            seated.ahead -= flight.steps
            if status != SlotStatus.RUNNING:
                ended[slot] = STATUSES[status]
        self.budget -= sampled
        self._leave(ended)
        return sampled

    def _leave(self, slots: Mapping[int, Status | None]) -> None:
        """Collect what these slots sampled. They are freed, or kept for the next sitting, and sample no more.

        A response without a status has not ended: it goes back to the head of the line, with what it sampled.
        """
        if not slots:
            return
        records = self.pool.read(list(slots), 0, max(self.seated[slot].produced for slot in slots))
        for column, (slot, status) in enumerate(slots.items()):
            seated = self.seated.pop(slot)
            self.left.append((seated.index, records[:, column, seated.given : seated.produced], status))
            request, sampled = self.requests[seated.index], records[0, column, : seated.produced].tolist()
            if status is not None:
                self.requests[seated.index] = replace(request, context=[])
            if (status is Status.PARKED and self.keep) or (status is Status.STOPPED and self.turns):
                self.kept[request.seed, (*request.context, *sampled)] = slot
                continue
            if status is None:
                self.waiting.appendleft(seated.index)
                self.contexts[seated.index] = None
                self.requests[seated.index] = replace(
                    request,
                    context=request.context + sampled,
                    position=request.position + seated.produced,
                    max_new_tokens=seated.left,
                )
            self.pool.pages.release(slot)
            self.free.append(slot)
        self.pool.seat(list(self.seated))


def _segment(records: NDArray[np.int32], version: int, status: Status | None) -> Segment:
    """What `Pool.read` gives for one response, [3 or 4, tokens], all but the tokens as the bits of float32."""
    tokens = records[0].tolist()
    logprobs, entropies, *masses = records[1:].copy().view(np.float32).tolist()
    return Segment(tokens, logprobs, entropies, [version] * len(tokens), status, *masses)


def _begin_of(request: Request, kept: Iterable[Name]) -> Name | None:
    """What is kept of the response that a request continues."""
    mine = (name for name in kept if name[0] == request.seed)
    return next((name for name in mine if name[1] == tuple(request.context[: len(name[1])])), None)
