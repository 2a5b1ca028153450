"""The static part of the CUDA engine: cache, state and records of all slots, and the CUDA graphs that work on them.

A graph is captured once per batch size and replayed for every token. It reads from the device which slots take
part, so responses come and go without another capture. `engine.py` decides which response has which slot, and for how
long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.rollout.cuda.decoder import Decoder
from bapo.rollout.cuda.kernels.attention import QUERIES, decode_attention, prefill_attention, splits_for
from bapo.rollout.cuda.kernels.sampling import State, sample
from bapo.rollout.engine import Sampling


class Pool:
    """The static part: cache, state and records of all slots, and the graphs that work on them.

    There is one slot more than asked for. Empty seats point at it, and it never runs.
    """

    def __init__(self, decoder: Decoder, slots: int, reach: int, *, stops: int) -> None:
        device = decoder.device
        self.decoder, self.slots, self.reach, self.device = decoder, slots, reach, device
        self.cache = decoder.cache(slots + 1, reach)
        self.state = torch.zeros(len(State), slots + 1, dtype=torch.int64, device=device)
        self.records = torch.zeros(3, slots + 1, reach, dtype=torch.int32, device=device)
        self.seats = torch.full((slots,), slots, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((stops,), -1, dtype=torch.int64, device=device)
        self.temperature = torch.ones(1, device=device)
        self.sizes = batch_sizes(slots)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        on_gpu = device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2

    def set_sampling(self, sampling: Sampling) -> None:
        """Set the temperature and stop tokens of the next steps."""
        stops = sorted(sampling.stop_ids)
        self.stop_ids.copy_(torch.tensor(stops + [-1] * (len(self.stop_ids) - len(stops))))
        self.temperature.fill_(sampling.temperature)

    def seat(self, slots: Sequence[int]) -> None:
        """Let these slots take part in the next steps."""
        self.seats.copy_(torch.tensor([*slots, *[self.slots] * (self.slots - len(slots))]))

    def advance(self, rows: int, steps: int) -> None:
        """Sample `steps` tokens for each of the first `rows` seats. Returns before the device is done."""
        size = next(size for size in self.sizes if size >= rows)
        if self.device.type != "cuda":
            for _ in range(steps):
                self._step(size)
            return
        graph = self._graphs.get(size) or self._capture(size)
        for _ in range(steps):
            graph.replay()

    def _step(self, size: int) -> None:
        slots = self.seats[:size]
        ids, positions = self.state[: State.LENGTH + 1].index_select(1, slots)
        heads = self.decoder.heads
        splits = splits_for(size, self.decoder.kv_heads, self._processors)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return decode_attention(qkv, keys, values, slots, positions, heads=heads, splits=splits)

        logits = self.decoder.forward(ids, slots, positions, self.cache, attend)
        assert logits is not None
        tokens, logprobs, entropies = self.records
        sample(
            logits,
            slots,
            self.state,
            tokens,
            logprobs.view(torch.float32),
            entropies.view(torch.float32),
            stop_ids=self.stop_ids,
            temperature=self.temperature,
        )

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        seated = self.seats.clone()
        self.seats.fill_(self.slots)  # trial runs compile kernels and choose matrix products; they must move no slot
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
        self._graphs[size] = graph
        return graph

    def prefill(self, contexts: dict[int, Sequence[int]]) -> None:
        """Compute keys and values of whole contexts, given by slot."""
        slots, positions, ids, blocks = [], [], [], []
        begin = 0
        for slot, context in contexts.items():
            length = len(context)
            slots.append(np.full(length, slot))
            positions.append(np.arange(length))
            ids.append(np.asarray(context))
            firsts = np.arange(0, length, QUERIES)
            blocks.append(np.stack([begin + firsts, np.minimum(length - firsts, QUERIES)], axis=1))
            begin += length
        tokens = np.stack([np.concatenate(part) for part in (ids, slots, positions)])
        id, slot_of, position = torch.from_numpy(tokens).to(self.device, torch.int64)
        block_table = torch.from_numpy(np.concatenate(blocks)).to(self.device, torch.int64)

        def attend(qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            return prefill_attention(qkv, keys, values, slot_of, position, block_table, heads=self.decoder.heads)

        self.decoder.forward(id, slot_of, position, self.cache, attend, logits=False)

    def read(self, slots: Sequence[int], first: int, last: int) -> NDArray[np.int32]:
        """Read the records from `first` to before `last` of these slots, [3, slots, tokens]. Waits for the device."""
        where = torch.tensor(slots, device=self.device)
        return self.records[:, where, first:last].cpu().numpy()

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of slot sources[i] to slot targets[i]."""
        source, target = torch.tensor([sources, targets], device=self.device)
        for layer in self.cache:
            layer[:, target, :, :length] = layer[:, source, :, :length]


def batch_sizes(slots: int) -> list[int]:
    """Batch sizes that graphs are captured for: powers of two and the numbers half-way between, up to all slots."""
    sizes = {slots}
    size = 8
    while size < slots:
        sizes |= {size, min(slots, size * 3 // 2)}
        size *= 2
    return sorted(sizes)
