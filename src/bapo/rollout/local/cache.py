"""A key-value cache for rows of different lengths that all write the same column.

    column         0    1    2    3    4    5    6    7
    row 0          .    a0   a1   a2   a3   a4   a5  [a6]
    row 1          .    .    .    .    b0   b1   b2  [b3]      started three columns later
    row 2          .    .    c0   c1   c2   c3   c4  [c5]
    attended            |--------- 1 … 7 ------------|

A token's column says nothing about its position: rows are aligned at their ends, not at their beginnings. A row that
joins late is written into the columns just before the current one. This is the layout of a left-padded batch seen
through a moving window, so any model that can generate from left-padded prompts can run on it: one padding mask, one
position per row, and column distance equal to position distance (sliding windows come out right). A step writes one
contiguous column, copies nothing, and attends to no more columns than the longest row has tokens.

When the columns run out, `shift` moves the columns that the rows still need back to the left.
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class ColumnCache(Cache):
    """Keys and values of every layer, each [rows, heads, columns, width]; allocated when a layer first writes.

    The owner announces each forward pass: `expect_prefill` before contexts are written, `expect_step` before one token
    per row is written.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._columns = columns
        self._store: dict[int, tuple[Tensor, Tensor]] = {}
        self._targets: Tensor | None = None
        self._sources: Tensor | None = None
        self._window = (0, 0)
        self._count = 0

    def expect_prefill(self, targets: Tensor, sources: Tensor, *, end: int) -> None:
        """The next pass writes whole contexts: batch row sources[i] into cache row targets[i], ending before `end`."""
        self._targets, self._sources, self._window = targets, sources, (0, end)

    def expect_step(self, rows: int, *, low: int, column: int) -> None:
        """The next pass writes one token of each of the first `rows` rows at `column` and attends from `low` on."""
        self._targets, self._count, self._window = None, rows, (low, column + 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer computed and return what it attends to. The model calls this."""
        if layer_idx not in self._store:
            self._store[layer_idx] = self._allocate(key_states), self._allocate(value_states)
        keys, values = self._store[layer_idx]
        low, end = self._window
        if self._targets is not None:
            begin = end - key_states.shape[2]
            keys[self._targets, :, begin:end] = key_states[self._sources]
            values[self._targets, :, begin:end] = value_states[self._sources]
            return key_states, value_states
        keys[: self._count, :, end - 1] = key_states[:, :, 0]
        values[: self._count, :, end - 1] = value_states[:, :, 0]
        return keys[: self._count, :, low:end], values[: self._count, :, low:end]

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros, because masked columns are multiplied by a weight of 0 and 0 * NaN is not 0.
        return states.new_zeros(self._rows, states.shape[1], self._columns, states.shape[3])

    def move(self, sources: Tensor, *, low: int, end: int) -> None:
        """Row sources[i] becomes row i, for the columns from `low` to before `end`."""
        for tensor in chain.from_iterable(self._store.values()):
            tensor[: len(sources), :, low:end] = tensor[sources, :, low:end]

    def shift(self, rows: int, *, low: int, end: int, to: int) -> None:
        """The columns from `low` to before `end` of the first rows now end before column `to`."""
        for tensor in chain.from_iterable(self._store.values()):
            tensor[:rows, :, to - (end - low) : to] = tensor[:rows, :, low:end].clone()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many columns the next query sees before its own."""
        if self._targets is not None:
            return 0
        low, end = self._window
        return end - low - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of columns attended to, and the offset of the first."""
        return self.get_seq_length() + query_length, 0

    def __len__(self) -> int:
        return max(1, len(self._store))


def padding_mask(start: Tensor, *, low: int, end: int) -> Tensor:  # [rows] -> [rows, end - low] bool
    """Which of the columns from `low` to before `end` hold a token of each row, given the column each row starts at."""
    return torch.arange(low, end, device=start.device) >= start[:, None]
