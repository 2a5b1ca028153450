"""Which pages of the key-value cache belong to which slot: bookkeeping alone, without tensors on a device.

A page holds the keys and values of `PAGE` consecutive tokens. A slot has pages for the tokens that it holds, not for
the longest response there could be. Slots with equal contexts share the pages that the context fills, because nobody
writes there again. Every page counts its owners and is free when the last of them leaves.

Page 0 belongs to nobody. A slot's table points there where the slot has no page, so that empty seats, and responses
that have ended and run on until the host looks, have a place to write to.
"""

import numpy as np

PAGE = 64
"""Tokens per page."""


def pages_for(tokens: int) -> int:
    """The number of pages that hold this many tokens."""
    return -(-tokens // PAGE)


class Pages:
    """The pages of all slots."""

    def __init__(self, pages: int, slots: int, reach: int) -> None:
        """`pages`: how many may be given out, page 0 not counted. `reach`: most tokens of a slot."""
        self.table = np.zeros((slots, pages_for(reach)), dtype=np.int32)
        """The pages of each slot, in the order of its tokens; 0 where it has none."""
        self.changed = False
        """Whether the table has changed since somebody set this to False."""
        self._held = [0] * slots
        self._owners = [0] * (pages + 1)
        self._free = list(range(pages, 0, -1))

    @property
    def free(self) -> int:
        """How many pages belong to nobody."""
        return len(self._free)

    def lacking(self, slot: int, tokens: int, *, shared: int = 0) -> int:
        """How many free pages a slot needs to hold this many tokens, the first of which another slot shares with it."""
        return max(0, pages_for(tokens) - shared // PAGE - self._held[slot])

    def extend(self, slot: int, tokens: int) -> None:
        """Give a slot the pages that it lacks to hold this many tokens."""
        for _ in range(self.lacking(slot, tokens)):
            self._append(slot, self._free.pop())

    def share(self, source: int, target: int, tokens: int) -> tuple[int, int] | None:
        """Give an empty slot the first `tokens` of another one.

        Full pages get one more owner. If the last page is partly filled, the target gets a page of its own, and what
        is returned says which page has to be copied to which.
        """
        assert not self._held[target], f"slot {target} has pages already"
        assert self._held[source] >= pages_for(tokens), f"slot {source} does not hold {tokens} tokens"
        full = tokens // PAGE
        for page in self.table[source, :full].tolist():
            self._append(target, page)
        if tokens % PAGE == 0:
            return None
        self.extend(target, tokens)
        return int(self.table[source, full]), int(self.table[target, full])

    def release(self, slot: int) -> None:
        """Take all pages from a slot."""
        for page in reversed(self.table[slot, : self._held[slot]].tolist()):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
        self.table[slot] = 0
        self._held[slot] = 0
        self.changed = True

    def clear(self) -> None:
        """Take all pages from all slots."""
        for slot in range(len(self._held)):
            self.release(slot)

    def _append(self, slot: int, page: int) -> None:
        self.table[slot, self._held[slot]] = page
        self._held[slot] += 1
        self._owners[page] += 1
        self.changed = True
