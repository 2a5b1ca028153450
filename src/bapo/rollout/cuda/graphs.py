"""The CUDA engine: a decoding step is one graph launch, and the host looks in only every few tokens.

    slots     places in a static key-value cache; a response keeps its slot for the whole sitting
    seats     which slots take part in a step, a list on the device; captured graphs of several batch sizes read it, so
              responses come and go, and the batch shrinks, without moving keys and values or capturing again
    state     what each slot feeds next, where it stands and when it ends, updated by the step itself
    records   what each slot sampled, with log-probs and entropies

A step runs the forward pass (`decoder.py`), draws, and moves every slot on (`kernels/sampling.py`) without the host.
The host launches `LOOK` steps, then reads the state once: it collects what ended, prefills newcomers into the free
slots and picks the smallest graph that holds the rest. A response that ends between two looks idles for the rest of
that stretch, half a stretch on average. The token budget is never exceeded: the last stretches are as short as it asks.

Weights are copied from the model at the start of every sitting, so what the learner holds then is what is sampled from.
Responses parked at the end of a sitting lose their keys and values (`parked="rebuild"`): resumed, they are prefilled
under the weights of that day. With `parked="keep"` they stay in their slots and are continued at once: cheaper, but
what comes next is sampled from a mixture of old keys and new weights that no single policy would give. The recorded
log-prob is that of the distribution really sampled from in both cases. A resumed run cannot have kept anything, so it
repeats an interrupted one bit for bit only under "rebuild".

Exactness is that of `LocalEngine`: float32 softmax of the model's logits, one uniform per (seed, position).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from bapo.rollout.cuda.decoder import Decoder, unsupported
from bapo.rollout.cuda.kernels.attention import QUERIES, decode_attention, prefill_attention, splits_for
from bapo.rollout.cuda.kernels.sampling import SlotStatus, State, sample
from bapo.rollout.engine import Engine, Request, Sampling, Segment
from bapo.rollout.local.engine import LocalEngine, check_requests, max_positions, non_finite
from bapo.rollout.randomness import stream
from bapo.screen.watch import Teller, Watch
from bapo.types import Status

LOOK = 16
"""Steps between two looks of the host."""
REACH_STEP = 256
"""The cache grows in steps of so many tokens per slot."""

STATUSES = {
    SlotStatus.RUNNING: Status.PARKED,
    SlotStatus.STOPPED: Status.STOPPED,
    SlotStatus.TRUNCATED: Status.TRUNCATED,
}


def in_process_engine(model: PreTrainedModel, *, slots: int, parked: Literal["rebuild", "keep"] = "rebuild") -> Engine:
    """The fastest engine that can run this model where it is."""
    on_gpu = model.device.type == "cuda"
    reason = unsupported(model) if on_gpu else f"it is on {model.device}"
    if reason is None:
        return GraphEngine(model, slots=slots, parked=parked)
    if parked == "keep":
        raise ValueError(
            f"parked='keep' (offpolicy.partial_cache) needs the CUDA engine, which cannot run {type(model).__name__}: "
            f"{reason}. Set 'rebuild'."
        )
    if not on_gpu:
        return LocalEngine(model, slots=slots)
    warnings.warn(
        f"{type(model).__name__} is sampled by the general engine, an order of magnitude slower than with CUDA graphs: "
        f"{reason}.",
        stacklevel=2,
    )
    return LocalEngine(model, slots=slots)


class GraphEngine:
    """Engine on a Llama, Qwen2 or Qwen3 model on this process's GPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 256,
        prefill_tokens: int = 32768,
        parked: Literal["rebuild", "keep"] = "rebuild",
    ) -> None:
        """`slots`: responses sampled side by side. `prefill_tokens`: most tokens in a prefill of several contexts.
        `parked`: what becomes of the keys and values of parked responses.
        """
        if slots < 1:
            raise ValueError(f"slots={slots} leaves no place to sample in. Set slots >= 1.")
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens={prefill_tokens} lets no context in. Set prefill_tokens >= 1.")
        if parked not in ("rebuild", "keep"):
            raise ValueError(f"parked={parked!r} is not a policy. Set 'rebuild' or 'keep'.")
        reason = unsupported(model)
        if reason is not None:
            raise ValueError(f"GraphEngine cannot run {type(model).__name__}: {reason}. Use LocalEngine.")
        if model.device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(f"GraphEngine needs a GPU, but the model is on {model.device}. Use LocalEngine.")
        self.model, self.slots, self.prefill_tokens, self.parked = model, slots, prefill_tokens, parked
        self.decoder = Decoder(model)
        self.pool: Pool | None = None
        self.kept: dict[tuple[int, tuple[int, ...]], int] = {}
        """Seed and tokens of a parked response -> its slot, under "keep"."""

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        version: int,
        token_budget: int | None = None,
        watch: Watch | None = None,
    ) -> list[Segment]:
        """See `Engine.generate`."""
        check_requests(requests, sampling, token_budget, positions=max_positions(self.model))
        if not requests:
            return []
        device = self.decoder.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where Triton launches
                return self._generate(requests, sampling, version, token_budget, Teller(watch, len(requests)))
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                f"no memory on the device to sample with {self.slots} slots: {error}. Lower rollout.slots or "
                "rollout.max_tokens."
            ) from error

    def _generate(
        self, requests: Sequence[Request], sampling: Sampling, version: int, token_budget: int | None, tell: Teller
    ) -> list[Segment]:
        self.decoder.refresh()
        reach = max(len(request.context) + request.max_new_tokens for request in requests)
        pool = self._pool(reach, stops=len(sampling.stop_ids))
        pool.set_sampling(sampling)
        sitting = _Sitting(self, pool, requests, token_budget)
        self.kept = {}  # a sitting that fails has overwritten who knows what
        try:
            segments = sitting.run(version, tell)
        finally:
            pool.state[State.STATUS] = SlotStatus.IDLE
        self.kept = sitting.kept if self.parked == "keep" else {}
        return segments

    def _pool(self, reach: int, *, stops: int) -> Pool:
        if self.pool is not None and reach <= self.pool.reach and stops <= len(self.pool.stop_ids):
            return self.pool
        self.pool, self.kept = None, {}
        reach = triton.cdiv(reach, REACH_STEP) * REACH_STEP
        self.decoder.prepare(reach)
        self.pool = Pool(self.decoder, self.slots, reach, stops=triton.next_power_of_2(max(8, stops)))
        return self.pool


class Pool:
    """The static part: cache, state and records of all slots, and the graphs that work on them.

    One slot more than asked for: seats nobody sits in point at it, and it never runs.
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
        """Temperature and stop tokens of the steps to come."""
        stops = sorted(sampling.stop_ids)
        self.stop_ids.copy_(torch.tensor(stops + [-1] * (len(self.stop_ids) - len(stops))))
        self.temperature.fill_(sampling.temperature)

    def seat(self, slots: Sequence[int]) -> None:
        """These slots take part in the next steps."""
        self.seats.copy_(torch.tensor([*slots, *[self.slots] * (self.slots - len(slots))]))

    def advance(self, rows: int, steps: int) -> None:
        """So many tokens for each of the first `rows` seats. Returns before the device is done."""
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
        self.seats.fill_(self.slots)  # trial runs, which compile kernels and choose matrix products, move nobody
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
        """Keys and values of whole contexts, by slot."""
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

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first `length` keys and values of slot sources[i] also become those of targets[i]."""
        source, target = torch.tensor([sources, targets], device=self.device)
        for layer in self.cache:
            layer[:, target, :, :length] = layer[:, source, :, :length]


@dataclass
class _Seated:
    """A request in a slot."""

    index: int
    left: int
    produced: int = 0


class _Sitting:
    """One call of `generate`, seen from the host."""

    def __init__(self, engine: GraphEngine, pool: Pool, requests: Sequence[Request], budget: int | None) -> None:
        self.engine, self.pool, self.requests = engine, pool, requests
        self.budget = sum(request.max_new_tokens for request in requests) if budget is None else budget
        self.next = self.complete = 0
        self.seated: dict[int, _Seated] = {}
        self.kept = dict(engine.kept)
        self.asked = {_name(request) for request in requests}
        reserved = set(self.kept.values())
        self.free = [slot for slot in reversed(range(pool.slots)) if slot not in reserved]
        self.results: dict[int, tuple[NDArray[np.int32], Status]] = {}

    def run(self, version: int, tell: Teller) -> list[Segment]:
        given = self.budget
        while self.budget > 0:
            tell(self.complete, given - self.budget)
            if self._wants_refill():
                self._refill()
            if not self.seated:
                break
            if len(self.seated) > self.budget:
                self._park_last(len(self.seated) - self.budget)
            longest = max(seated.left for seated in self.seated.values())
            self.pool.advance(len(self.seated), min(LOOK, longest, self.budget // len(self.seated)))
            self._look()
        tell(self.complete, given - self.budget, last=True)
        self._leave(dict.fromkeys(self.seated, Status.PARKED))
        return [self._segment(index, version) for index in range(len(self.requests))]

    def _wants_refill(self) -> bool:
        """A prefill costs a few steps, so slots are refilled a few at a time."""
        idle = self.pool.slots - len(self.seated)
        return self.next < len(self.requests) and (not self.seated or idle >= max(1, self.pool.slots // 8))

    def _refill(self) -> None:
        """Seat the next in line: in the slot that kept their keys and values, or in a free one after a prefill."""
        room = min(self.budget - len(self.seated), len(self.requests) - self.next)
        newcomers: dict[int, int] = {}
        fresh: dict[int, int] = {}
        for index in range(self.next, self.next + room):
            name = _name(self.requests[index])
            if name in self.kept:
                slot = self.kept.pop(name)
            else:
                stranger = next((other for other in self.kept if other not in self.asked), None)
                if not self.free and stranger is not None:
                    self.free.append(self.kept.pop(stranger))
                if not self.free and not self.seated and not newcomers:  # every slot is kept for somebody further back
                    self.free = list(self.kept.values())
                    self.kept = {}
                if not self.free:
                    break
                slot = self.free.pop()
                fresh[slot] = index
            newcomers[slot] = index
        if not newcomers:
            return
        self.next += len(newcomers)
        self._prefill(fresh)
        lines = np.zeros((len(State), len(newcomers)), dtype=np.int64)
        for column, (slot, index) in enumerate(newcomers.items()):
            request = self.requests[index]
            lines[State.LAST, column] = request.context[-1]
            lines[State.LENGTH, column] = len(request.context) - 1
            lines[State.LEFT, column] = request.max_new_tokens
            lines[State.STREAM, column] = stream(request.seed).view(np.int64)
            lines[State.POSITION, column] = request.position
            lines[State.STATUS, column] = SlotStatus.RUNNING
            self.seated[slot] = _Seated(index, left=request.max_new_tokens)
        where = torch.tensor(list(newcomers), device=self.pool.device)
        self.pool.state[:, where] = torch.from_numpy(lines).to(self.pool.device)
        self.pool.seat(list(self.seated))

    def _prefill(self, newcomers: dict[int, int]) -> None:
        """Keys and values of all context tokens but the last, which the next step feeds. Equal ones are run once."""
        seats: dict[tuple[int, ...], list[int]] = {}
        for slot, index in newcomers.items():
            context = tuple(self.requests[index].context[:-1])
            if context:
                seats.setdefault(context, []).append(slot)
        batch: dict[int, Sequence[int]] = {}
        for context, slots in seats.items():
            if batch and sum(map(len, batch.values())) + len(context) > self.engine.prefill_tokens:
                self.pool.prefill(batch)
                batch = {}
            batch[slots[0]] = context
        if batch:
            self.pool.prefill(batch)
        for length in sorted({len(context) for context in seats}):
            pairs = [(s[0], other) for context, s in seats.items() if len(context) == length for other in s[1:]]
            if pairs:
                self.pool.copy([a for a, _ in pairs], [b for _, b in pairs], length)

    def _look(self) -> None:
        """See what the last steps did; those whose response ended leave."""
        state = self.pool.state.cpu().numpy()[:, list(self.seated)]
        ended = {}
        for (slot, seated), line in zip(self.seated.items(), state.T.tolist(), strict=True):
            status, produced = SlotStatus(line[State.STATUS]), line[State.PRODUCED]
            if status == SlotStatus.BROKEN:
                raise non_finite(self.requests, seated.index, line[State.POSITION] - 1)
            self.budget -= produced - seated.produced
            seated.produced, seated.left = produced, line[State.LEFT]
            if status != SlotStatus.RUNNING:
                ended[slot] = STATUSES[status]
        if ended:
            self.complete += len(ended)
            self._leave(ended)
            self.pool.seat(list(self.seated))

    def _park_last(self, count: int) -> None:
        """Leave out the last requests in line: the budget has no token for them."""
        last = sorted(self.seated, key=lambda slot: self.seated[slot].index)[-count:]
        self._leave(dict.fromkeys(last, Status.PARKED))
        self.pool.seat(list(self.seated))

    def _leave(self, slots: dict[int, Status]) -> None:
        """Collect what these slots sampled and free them, or keep them for the next sitting."""
        if not slots:
            return
        longest = max(self.seated[slot].produced for slot in slots)
        where = torch.tensor(list(slots), device=self.pool.device)
        records = self.pool.records[:, where, :longest].cpu().numpy()
        for column, (slot, status) in enumerate(slots.items()):
            seated = self.seated.pop(slot)
            self.results[seated.index] = records[:, column, : seated.produced], status
            if status is Status.PARKED and self.engine.parked == "keep":
                request, sampled = self.requests[seated.index], records[0, column, : seated.produced].tolist()
                self.kept[request.seed, (*request.context, *sampled)] = slot
            else:
                self.free.append(slot)

    def _segment(self, index: int, version: int) -> Segment:
        if index not in self.results:
            return Segment([], [], [], [], Status.PARKED)
        records, status = self.results[index]
        tokens, logprobs, entropies = records[0], *records[1:].view(np.float32)
        return Segment(tokens.tolist(), logprobs.tolist(), entropies.tolist(), [version] * len(tokens), status)


def _name(request: Request) -> tuple[int, tuple[int, ...]]:
    """What a response is known by: its random numbers and all of its tokens."""
    return request.seed, tuple(request.context)


def batch_sizes(slots: int) -> list[int]:
    """Sizes that graphs are captured for: powers of two and the numbers half-way, up to all slots."""
    sizes = {slots}
    size = 8
    while size < slots:
        sizes |= {size, min(slots, size * 3 // 2)}
        size *= 2
    return sorted(sizes)
