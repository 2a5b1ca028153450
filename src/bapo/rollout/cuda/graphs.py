"""The static part of the CUDA engine: cache, state and records of all slots, and the CUDA graphs that work on them.

A graph is captured once per batch size and replayed for every token. It reads from the device which slots take
part, so responses come and go without another capture. `sitting.py` decides which response has which slot, and for how
long; `pages.py` decides which pages of the cache a slot has.

Nothing here waits for the device except `Reading.wait` and `Pool.read`, which read what is finished while the device
goes on.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.rollout.cuda.decoder import Decoder
from bapo.rollout.cuda.kernels.attention import QUERIES, decode_attention, prefill_attention, splits_for
from bapo.rollout.cuda.kernels.sampling import State, sample
from bapo.rollout.cuda.pages import Pages
from bapo.rollout.engine import Sampling
from bapo.rollout.sittings import left_by

SIZES_PER_DOUBLING = 2
"""Batch sizes that graphs are captured for, from one power of two to the next. More of them waste fewer rows, and each
costs a capture."""


class Reading:
    """The state as it will be when the device has done all that is queued now."""

    def __init__(self, state: Tensor) -> None:
        self._event = None
        if state.device.type == "cuda":
            self._copy = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
            self._copy.copy_(state, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._copy = state.clone()

    def wait(self) -> NDArray[np.int64]:
        """The state, [len(State), slots], once the device is that far."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


class Pool:
    """The static part: cache, state and records of all slots, and the graphs that work on them.

    There is one place more than asked for. Empty seats point at it, and it never runs.
    """

    def __init__(self, decoder: Decoder, slots: int, reach: int, *, places: int, pages: int, stops: int) -> None:
        """`slots`: how many may run at a time. `places`: all slots, with those that only keep keys and values."""
        device = decoder.device
        self.decoder, self.slots, self.places, self.reach, self.device = decoder, slots, places, reach, device
        self.pages = Pages(pages, places + 1, reach)
        self.cache = decoder.cache(pages + 1)
        self.table = torch.zeros(self.pages.table.shape, dtype=torch.int32, device=device)
        self.state = torch.zeros(len(State), places + 1, dtype=torch.int64, device=device)
        self.records = torch.zeros(4, places + 1, reach, dtype=torch.int32, device=device)
        self.seats = torch.full((slots,), places, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((stops,), -1, dtype=torch.int64, device=device)
        self.temperature = torch.ones(1, device=device)
        self.sizes = batch_sizes(slots)
        self.truncation: Sampling | None = None
        self._graphs: dict[tuple[int, Sampling | None], torch.cuda.CUDAGraph] = {}
        on_gpu = device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self._reader = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2

    def set_sampling(self, sampling: Sampling) -> None:
        """Set the temperature, truncation and stop tokens of the next steps."""
        stops = sorted(sampling.stop_ids)
        self.stop_ids.copy_(torch.tensor(stops + [-1] * (len(self.stop_ids) - len(stops))))
        self.temperature.fill_(sampling.temperature)
        only = Sampling(top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
        self.truncation = only if sampling.truncates else None

    def seat(self, slots: Sequence[int]) -> None:
        """Let these slots take part in the next steps."""
        seats = np.full(self.slots, self.places, dtype=np.int64)
        seats[: len(slots)] = slots
        self.seats.copy_(self._host(seats), non_blocking=True)

    def start(self, slots: Sequence[int], state: NDArray[np.int64]) -> None:
        """Set the state of these slots, [len(State), slots]."""
        self.state[:, self._put(np.asarray(slots))] = self._put(state)

    def advance(self, rows: int, steps: int) -> None:
        """Sample `steps` tokens for each of the first `rows` seats. Returns before the device is done."""
        self._update_table()
        size = next(size for size in self.sizes if size >= rows)
        on_gpu = self.device.type == "cuda"
        name = size, self.truncation
        step = (self._graphs.get(name) or self._capture(size)).replay if on_gpu else partial(self._step, size)
        for _ in range(steps):
            step()

    def reading(self) -> Reading:
        """The state after all that is queued now."""
        return Reading(self.state)

    def _step(self, size: int) -> None:
        slots = self.seats[:size]
        ids, positions = self.state[: State.LENGTH + 1].index_select(1, slots)
        heads, table = self.decoder.heads, self.table
        splits = splits_for(size, self.decoder.kv_heads, self._processors)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return decode_attention(qkv, keys, values, table, slots, positions, heads=heads, splits=splits)

        logits = self.decoder.forward(ids, slots, positions, self.cache, table, attend)
        assert logits is not None
        tokens, logprobs, entropies, masses = self.records
        records = tokens, logprobs.view(torch.float32), entropies.view(torch.float32)
        if self.truncation is not None:
            left, mass = left_by(self.truncation, logits.float() / self.temperature)
            logits = logits.masked_fill(~left, -torch.inf)
            # A slot that has ended writes behind its last token, where nobody reads.
            masses.view(torch.float32)[slots, self.state[State.PRODUCED, slots]] = mass
        sample(logits, slots, self.state, *records, stop_ids=self.stop_ids, temperature=self.temperature)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        seated = self.seats.clone()
        self.seats.fill_(self.places)  # trial runs compile kernels and choose matrix products; they must move no slot
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(size)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._step(size)
        self.seats.copy_(seated)
        self._graphs[size, self.truncation] = graph
        return graph

    def prefill(self, contexts: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Compute keys and values of contexts, given by slot with how many tokens the cache holds already."""
        slots, positions, ids, blocks = [], [], [], []
        begin = 0
        for slot, (cached, context) in contexts.items():
            length = len(context) - cached
            slots.append(np.full(length, slot))
            positions.append(np.arange(cached, len(context)))
            ids.append(np.asarray(context[cached:]))
            firsts = np.arange(0, length, QUERIES)
            blocks.append(np.stack([begin + firsts, np.minimum(length - firsts, QUERIES)], axis=1))
            begin += length
        id, slot_of, position = self._put(np.stack([np.concatenate(part) for part in (ids, slots, positions)]))
        block_table = self._put(np.concatenate(blocks))
        heads, table = self.decoder.heads, self.table
        self._update_table()

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return prefill_attention(qkv, keys, values, table, slot_of, position, block_table, heads=heads)

        self.decoder.forward(id, slot_of, position, self.cache, table, attend, logits=False)

    def read(self, slots: Sequence[int], first: int, last: int) -> NDArray[np.int32]:
        """Read the records from `first` to before `last` of these slots, [3, slots, tokens]; 4 if tokens are left out.

        They are tokens, log-probs, entropies and log-masses, and must have been sampled according to a `Reading`. On a
        GPU they are read beside what is queued.
        """
        beside: AbstractContextManager[Any] = nullcontext()
        if self._reader is not None:
            beside = torch.cuda.stream(self._reader)
        with beside:
            known = self.records if self.truncation is not None else self.records[:3]
            return known[:, self._put(np.asarray(slots)), first:last].cpu().numpy()

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, given as (from, to)."""
        source, target = self._put(np.asarray(pages).T)
        for layer in self.cache:
            layer[:, target] = layer[:, source]

    def _update_table(self) -> None:
        if self.pages.changed:
            self.table.copy_(self._host(self.pages.table), non_blocking=True)
            self.pages.changed = False

    def _host(self, array: NDArray[Any]) -> Tensor:
        """An array in memory that the device can read without making the host wait."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _put(self, array: NDArray[Any]) -> Tensor:
        """An array of integers on the device."""
        return self._host(array.astype(np.int64)).to(self.device, non_blocking=True)


def batch_sizes(slots: int) -> list[int]:
    """Batch sizes that graphs are captured for: powers of two and numbers between them, up to all slots."""
    sizes = {slots}
    size = 8
    while size < slots:
        between = range(size, 2 * size, max(1, size // SIZES_PER_DOUBLING))
        sizes |= {min(slots, rows) for rows in between}
        size *= 2
    return sorted(sizes)
