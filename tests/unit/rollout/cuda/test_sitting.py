"""A sitting's decisions, on a pool of paper: budgets, refills, waiting for pages, sharing, keeping.

`PaperPool` does what the device does, with tokens in the place of keys and values. A draw depends on every token that
it sees through the table of pages, so a page that is shared, freed or overwritten wrongly changes what is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.rollout.cuda.kernels.sampling import SlotStatus, State
from bapo.rollout.cuda.pages import Pages, pages_for
from bapo.rollout.cuda.sitting import Sitting
from bapo.rollout.engine import Request, join
from bapo.rollout.randomness import stream
from bapo.types import Status

PAGE, REACH, STOP = 4, 24, 0


def draw(seen: tuple[int, ...], stream: int, position: int) -> int:
    return hash((seen, stream, position)) % 12


def alone(request: Request) -> tuple[list[int], Status]:
    """What a response is, sampled by itself: a literal loop."""
    tokens: list[int] = []
    while len(tokens) < request.max_new_tokens:
        seen = (*request.context, *tokens)
        tokens.append(draw(seen, int(stream(request.seed).view(np.int64)), request.position + len(tokens)))
        if tokens[-1] == STOP:
            return tokens, Status.STOPPED
    return tokens, Status.TRUNCATED


@dataclass
class PaperReading:
    state: np.ndarray

    def wait(self) -> np.ndarray:
        return self.state


class PaperPool:
    """Slots, pages and steps as on the device."""

    def __init__(self, slots: int, pages: int, places: int | None = None) -> None:
        self.slots, self.places, self.reach = slots, places or slots, REACH
        self.pages = Pages(pages, self.places + 1, REACH)
        self.cache = np.full((pages + 1, PAGE), -1)
        self.state = np.zeros((len(State), self.places + 1), dtype=np.int64)
        self.records = np.zeros((3, self.places + 1, REACH), dtype=np.int32)
        self.seats: list[int] = []
        self.prefilled: list[list[int]] = []

    def place(self, slot: int, position: int) -> tuple[int, int]:
        return self.pages.table[slot, position // PAGE], position % PAGE

    def seat(self, slots):
        self.seats = list(slots)

    def start(self, slots, state):
        self.state[:, slots] = state

    def prefill(self, contexts):
        self.prefilled.append([len(context) - cached for cached, context in contexts.values()])
        for slot, (cached, context) in contexts.items():
            for position in range(cached, len(context)):
                self.cache[self.place(slot, position)] = context[position]

    def copy(self, pages):
        source, target = np.array(pages).T
        self.cache[target] = self.cache[source]

    def advance(self, rows, steps):
        assert rows == len(self.seats)
        for _ in range(steps):
            for slot in self.seats:
                self.cache[self.place(slot, self.state[State.LENGTH, slot])] = self.state[State.LAST, slot]
            for slot in self.seats:
                if self.state[State.STATUS, slot] == SlotStatus.RUNNING:
                    self.sample(slot)

    def sample(self, slot):
        line = self.state[:, slot]
        seen = tuple(int(self.cache[self.place(slot, i)]) for i in range(line[State.LENGTH] + 1))
        token = draw(seen, int(line[State.STREAM]), int(line[State.POSITION]))
        logprob = np.float32(-line[State.POSITION]).view(np.int32)
        self.records[:, slot, line[State.PRODUCED]] = token, logprob, logprob
        line[State.LAST] = token
        line[[State.LENGTH, State.PRODUCED, State.POSITION]] += 1
        line[State.LEFT] -= 1
        if token == STOP or not line[State.LEFT]:
            line[State.STATUS] = SlotStatus.STOPPED if token == STOP else SlotStatus.TRUNCATED

    def reading(self):
        return PaperReading(self.state.copy())

    def read(self, slots, first, last):
        return self.records[:, slots, first:last].copy()


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bapo.rollout.cuda.pages.PAGE", PAGE)
        patch.setattr("bapo.rollout.cuda.sitting.HEADROOM", 3)
        yield


def sit(pool, requests, *, budget=None, stretch=2, keep=False, kept=None, deadline=None, prefill_tokens=20):
    """One sitting, collected to its end. Returns a segment per request, and what is kept."""
    budget = sum(request.max_new_tokens for request in requests) if budget is None else budget
    how = {"stretch": stretch, "prefill_tokens": prefill_tokens, "keep": keep, "kept": dict(kept or {})}
    sitting = Sitting(pool, list(requests), budget=budget, **how)
    parts = {request.id: [] for request in requests}
    while not all(listed and listed[-1].status is not None for listed in parts.values()):
        sitting.work(deadline)
        for id, segment in sitting.segments(version=1):
            assert not (parts[id] and parts[id][-1].status is not None), "each request has one last segment"
            parts[id].append(segment)
    assert sitting.over
    return [join(listed) for listed in parts.values()], sitting.kept


@st.composite
def loads(draw_from):
    """Requests in groups with equal contexts, and a pool that may be too small for all of them."""
    prompts = draw_from(st.lists(st.lists(st.integers(1, 11), min_size=1, max_size=11), min_size=1, max_size=4))
    requests = []
    for prompt in prompts:
        for _ in range(draw_from(st.integers(1, 4))):
            limit = draw_from(st.integers(1, REACH - len(prompt)))
            requests.append(Request(prompt, 0, 100 + len(requests), limit, id=len(requests)))
    longest = max(pages_for(len(r.context) + r.max_new_tokens) for r in requests)
    slots = draw_from(st.integers(1, 5))
    return requests, slots, draw_from(st.integers(longest, slots * pages_for(REACH)))


@settings(max_examples=150, deadline=None)
@given(loads(), st.integers(1, 5), st.integers(0, 60), st.booleans())
def test_every_response_is_what_it_is_alone_whatever_waits_parks_or_shares(load, stretch, budget, keep):
    requests, slots, pages = load
    pool = PaperPool(slots, pages)
    going, had, kept = list(requests), {r.id: [] for r in requests}, {}
    for allowed in (budget, None):
        segments, kept = sit(pool, going, budget=allowed, stretch=stretch, keep=keep, kept=kept)
        assert allowed is None or sum(len(segment.tokens) for segment in segments) <= allowed
        for request, segment in zip(going, segments, strict=True):
            positions = range(request.position, request.position + len(segment.tokens))
            assert segment.logprobs == [-float(position) for position in positions]
            had[request.id] += segment.tokens
        ends = {request.id: segment.status for request, segment in zip(going, segments, strict=True)}
        assert pool.pages.free + np.count_nonzero(pool.pages.table[list(kept.values())]) >= pages
        going = [
            replace(
                request,
                context=request.context + segment.tokens,
                position=len(segment.tokens),
                max_new_tokens=request.max_new_tokens - len(segment.tokens),
            )
            for request, segment in zip(going, segments, strict=True)
            if segment.status is Status.PARKED
        ]
        if not going:
            break
    assert not going
    assert not kept
    assert pool.pages.free == pages
    for request in requests:
        tokens, status = alone(request)
        assert had[request.id] == tokens
        assert ends.get(request.id, status) is status


@settings(max_examples=50, deadline=None)
@given(loads(), st.integers(1, 60))
def test_collecting_in_between_decides_nothing(load, budget):
    requests, slots, pages = load
    once, often = PaperPool(slots, pages), PaperPool(slots, pages)
    assert sit(once, requests, budget=budget) == sit(often, requests, budget=budget, deadline=0.0)
    assert once.prefilled == often.prefilled
    assert (once.cache == often.cache).all()


def test_the_last_response_waits_and_is_prefilled_with_what_it_sampled():
    many = [Request([7], 0, seed, 12, id=seed) for seed in range(99)]
    requests = [request for request in many if len(alone(request)[0]) == 12][:2]
    pool = PaperPool(2, 4)  # 16 tokens, and two responses of 12
    segments, _ = sit(pool, requests, stretch=1)
    assert [segment.tokens for segment in segments] == [alone(request)[0] for request in requests]
    assert pool.prefilled == [[8]]  # the second one, with the eight tokens that its two pages had room for


def test_a_group_is_prefilled_once_however_late_its_members_come():
    requests = [Request([7, 8, 9, 10, 11, 1], 0, seed, 8, id=seed) for seed in range(9)]
    pool = PaperPool(3, 3 * pages_for(REACH))
    sit(pool, requests)
    assert pool.prefilled == [[5]]


def test_contexts_are_prefilled_together_up_to_prefill_tokens():
    lengths = (3, 4, 20, 2, 5, 6, 1)
    requests = [Request(list(range(1, 2 + n)), n, 10 + n, 1, id=n) for n in lengths]
    pool = PaperPool(7, 7 * pages_for(REACH))
    sit(pool, requests, prefill_tokens=9)
    assert pool.prefilled == [[3, 4], [20], [2, 5], [6, 1]]


def test_small_pools_make_responses_wait_for_others_to_end():
    """With the pages of one long response, long responses take turns, and the first in line never waits."""
    requests = [Request([7, seed], 0, seed, 20, id=seed) for seed in range(6)]
    pool = PaperPool(4, pages_for(22))
    segments, _ = sit(pool, requests)
    assert [segment.tokens for segment in segments] == [alone(request)[0] for request in requests]
    assert pool.pages.free == pages_for(22)


def converse(pool, requests, deadline=None):
    """A sitting in turns: whoever stopped is told two tokens, and comes back a round later. What all have sampled."""
    going = {request.id: request for request in requests}
    turns = {request.id: [[]] for request in requests}
    how = {"stretch": 2, "prefill_tokens": 20, "keep": False, "kept": {}, "turns": True}
    sitting = Sitting(pool, list(requests), budget=10**6, **how)
    before, ended = [], []
    while sitting.unfinished or before or ended:
        while not sitting.resting:
            sitting.work(deadline)
            for id, segment in sitting.segments(version=1):
                turns[id][-1] += segment.tokens
                request, sampled = going[id], turns[id][-1]
                said = [*sampled, 3 + id % 5, 4]
                if segment.status is Status.STOPPED and request.max_new_tokens > len(said) + 1:
                    context, left = request.context + said, request.max_new_tokens - len(said)
                    position = request.position + len(said)
                    going[id] = replace(request, context=context, position=position, max_new_tokens=left)
                    ended.append(id)
        before, back = ended, before
        ended = []
        for id in back:
            turns[id].append([])
        sitting.add([going[id] for id in sorted(back)])
    assert len({name[0] for name in sitting.kept}) == len(sitting.kept) <= pool.places
    sitting.parked = True
    assert sitting.segments(version=1) == []
    return turns


def literally(request):
    """The same conversation, sampled by itself."""
    turns = []
    while True:
        tokens, status = alone(request)
        turns.append(tokens)
        said = [*tokens, 3 + request.id % 5, 4]
        if status is not Status.STOPPED or request.max_new_tokens <= len(said) + 1:
            return turns
        request = replace(
            request,
            context=request.context + said,
            position=request.position + len(said),
            max_new_tokens=request.max_new_tokens - len(said),
        )


@settings(max_examples=40, deadline=None)
@given(loads(), st.integers(0, 5))
def test_turns_go_on_with_what_is_kept_as_if_there_had_been_no_break(load, more):
    requests, slots, pages = load
    once, often = (PaperPool(slots, pages, slots + more) for _ in range(2))
    turns = converse(once, requests)
    assert turns == {request.id: literally(request) for request in requests}
    assert converse(often, requests, deadline=0.0) == turns
    assert once.prefilled == often.prefilled


def test_with_room_for_all_only_what_was_said_is_prefilled():
    requests = [Request([7, 8, seed], 0, seed, 21, id=seed) for seed in range(40)]
    pool = PaperPool(8, 40 * pages_for(REACH), 40)
    turns = converse(pool, requests)
    breaks = sum(len(listed) - 1 for listed in turns.values())
    assert breaks > 20
    lengths = [length for call in pool.prefilled for length in call]
    assert sorted(lengths) == [2] * len(requests) + [2] * breaks  # the stop token and one of the two that were said
