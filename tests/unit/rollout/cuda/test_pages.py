"""The pages of the CUDA engine's cache: who owns them, what is shared, when they are free again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.rollout.cuda.pages import PAGE, Pages, pages_for

SLOTS, REACH, POOL = 6, 5 * PAGE, 14


def check(pages: Pages, owned: dict[int, list[int]]) -> None:
    """Table, counts and free pages are those of a plain list of pages per slot."""
    owners = Counter(page for held in owned.values() for page in held)
    assert 0 not in owners
    assert pages.free == POOL - len(owners)
    for slot in range(SLOTS):
        held = owned.get(slot, [])
        assert pages.lacking(slot, (len(held) + 1) * PAGE) == 1
        assert pages.table[slot].tolist() == held + [0] * (pages_for(REACH) - len(held))


TOKENS = st.integers(0, REACH)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, SLOTS - 1), TOKENS),
        st.tuples(st.just("share"), st.integers(0, SLOTS - 1), TOKENS),
        st.tuples(st.just("release"), st.integers(0, SLOTS - 1), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS)
def test_every_page_is_free_or_counted_by_its_owners_whatever_happens(actions):
    pages, owned = Pages(POOL, SLOTS, REACH), {}
    for action, slot, tokens in actions:
        if action == "release":
            pages.release(slot)
            owned.pop(slot, None)
        elif action == "extend" and pages.lacking(slot, tokens) <= pages.free:
            before = owned.get(slot, [])
            pages.extend(slot, tokens)
            owned[slot] = pages.table[slot, : max(len(before), pages_for(tokens))].tolist()
            assert owned[slot][: len(before)] == before
        elif action == "share" and slot in owned:
            tokens = min(tokens, len(owned[slot]) * PAGE)
            target = next((other for other in range(SLOTS) if not owned.get(other)), None)
            if target is None or target == slot or not pages.free:
                continue
            copy = pages.share(slot, target, tokens)
            full = tokens // PAGE
            owned[target] = owned[slot][:full] + ([copy[1]] if copy else [])
            assert (copy is not None) == (tokens % PAGE > 0)
            assert copy is None or (copy[0] == owned[slot][full] and copy[1] not in owned[slot])
        check(pages, owned)
    pages.clear()
    check(pages, {})


def test_full_pages_are_shared_and_the_last_one_is_not():
    pages = Pages(POOL, SLOTS, REACH)
    pages.extend(0, 2 * PAGE + 5)
    source, target = pages.share(0, 1, 2 * PAGE + 5)
    assert pages.table[1, :2].tolist() == pages.table[0, :2].tolist()
    assert (source, target) == (pages.table[0, 2], pages.table[1, 2])
    assert source != target
    assert pages.free == POOL - 4
    pages.release(0)
    assert pages.free == POOL - 3  # the other slot still owns the shared ones
    pages.release(1)
    assert pages.free == POOL


def test_the_table_says_when_it_changed():
    pages = Pages(POOL, SLOTS, REACH)
    assert not pages.changed
    pages.extend(2, 1)
    assert pages.changed
    pages.changed = False
    pages.extend(2, PAGE)  # it has that page
    assert not pages.changed
    pages.release(2)
    assert pages.changed


def test_pages_for_rounds_up():
    assert [pages_for(tokens) for tokens in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]


def test_what_a_slot_does_not_hold_cannot_be_shared():
    pages = Pages(POOL, SLOTS, REACH)
    pages.extend(0, 3)
    with pytest.raises(AssertionError, match="does not hold 65 tokens"):
        pages.share(0, 1, PAGE + 1)
