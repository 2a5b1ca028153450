"""The CUDA engine: a decoding step is one graph launch, and the host looks at the state only every few tokens.

    slots     places in a static key-value cache; a response keeps its slot for the whole sitting
    seats     which slots take part in a step, a list on the device. Captured graphs of several batch sizes read it, so
              responses can come and go, and the batch can shrink, without moving keys and values or capturing again
    state     what each slot feeds next, where it stands and when it ends; the step itself updates it
    records   what each slot sampled, with log-probs and entropies

A step runs the forward pass (`decoder.py`), draws, and moves every slot on (`kernels/sampling.py`) without the host.
The host launches `LOOK` steps, then reads the state once: it collects the responses that ended, prefills newcomers into
the free slots and picks the smallest graph that holds all that run. A response that ends between two looks idles for
the rest of that stretch, half a stretch on average. The token budget is never exceeded: the last stretches are
shortened to fit it.

Weights are copied by `load`, once per version, into the layout that sampling wants (`decoder.py`).
With `parked="rebuild"`, responses parked at the end of a sitting lose their keys and values. When they resume, they are
prefilled under the weights of that time. With `parked="keep"` they stay in their slots and continue at once. This is
cheaper, but their next tokens are sampled from a mixture of old keys and new weights that no single policy would give.
In both cases the recorded log-prob belongs to the distribution that was really sampled from. A resumed run has no kept
keys and values, so it repeats an interrupted run bit for bit only under "rebuild".

The results are as exact as those of `LocalEngine`: float32 softmax of the model's logits, one uniform per (seed,
position).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from bapo.rollout.cuda.decoder import Decoder, unsupported
from bapo.rollout.cuda.graphs import Pool
from bapo.rollout.cuda.kernels.sampling import SlotStatus, State
from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment
from bapo.rollout.randomness import stream
from bapo.rollout.requests import check_engine_sizes, check_idle, check_requests, max_positions, non_finite
from bapo.types import Status

LOOK = 16
"""Steps between two looks of the host."""
REACH_STEP = 256
"""The cache grows in steps of this many tokens per slot."""

STATUSES = {
    SlotStatus.RUNNING: Status.PARKED,
    SlotStatus.STOPPED: Status.STOPPED,
    SlotStatus.TRUNCATED: Status.TRUNCATED,
}


class GraphEngine:
    """Engine on a Llama, Qwen2 or Qwen3 model on this process's GPU."""

    draws_by_position = True
    gives_entropies = True
    continuous = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 256,
        prefill_tokens: int = 32768,
        parked: Literal["rebuild", "keep"] = "rebuild",
    ) -> None:
        """`slots`: responses sampled at the same time. `prefill_tokens`: most tokens in a prefill of several contexts.
        `parked`: what happens to the keys and values of parked responses.
        """
        check_engine_sizes(slots, prefill_tokens)
        if parked not in ("rebuild", "keep"):
            raise ValueError(f"parked={parked!r} is not a known option. Set it to 'rebuild' or 'keep'.")
        reason = unsupported(model)
        if reason is not None:
            raise ValueError(f"GraphEngine cannot run {type(model).__name__}: {reason}. Use LocalEngine.")
        if model.device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(f"GraphEngine needs a GPU, but the model is on {model.device}. Use LocalEngine.")
        self.model, self.slots, self.prefill_tokens, self.parked = model, slots, prefill_tokens, parked
        self.version = NOTHING_LOADED
        self.decoder = Decoder(model)
        self.pool: Pool | None = None
        self.kept: dict[tuple[int, tuple[int, ...]], int] = {}
        """Under "keep": the slot of each parked response, by its seed and tokens."""
        self._sitting: _Sitting | None = None

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `Engine.load`."""
        check_idle(self._sitting, "load")
        self.version = NOTHING_LOADED  # until all of them are in place
        self.decoder.load(weights)
        self.version = version

    @torch.no_grad()
    def submit(self, requests: Sequence[Request], sampling: Sampling, *, token_budget: int | None = None) -> None:
        """See `Engine.submit`."""
        check_idle(self._sitting, "submit")
        check_requests(requests, sampling, token_budget, positions=max_positions(self.model), version=self.version)
        if not requests:
            return
        with self._on_device():
            reach = max(len(request.context) + request.max_new_tokens for request in requests)
            pool = self._pool(reach, stops=len(sampling.stop_ids))
            pool.set_sampling(sampling)
            self._sitting = _Sitting(self, pool, requests, token_budget)
        self.kept = {}  # a sitting that fails may have overwritten any of them

    @torch.no_grad()
    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """See `Engine.collect`."""
        sitting, self._sitting = self._sitting, None  # a sitting that fails is over
        if sitting is None:
            return []
        with self._on_device():
            try:
                sitting.work(None if timeout is None else time.monotonic() + timeout)
                found = sitting.segments(self.version)
            except BaseException:
                sitting.pool.state[State.STATUS] = SlotStatus.IDLE
                raise
            if sitting.over:
                sitting.pool.state[State.STATUS] = SlotStatus.IDLE
                self.kept = sitting.kept if self.parked == "keep" else {}
            else:
                self._sitting = sitting
        return found

    def park(self) -> None:
        """See `Engine.park`."""
        if self._sitting is not None:
            self._sitting.parked = True

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Select the device that Triton launches on. If it runs out of memory, say which settings to lower."""
        device = self.decoder.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                yield
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                f"the device has too little memory to sample with {self.slots} slots: {error}. Lower rollout.slots or "
                "rollout.max_tokens."
            ) from error

    def _pool(self, reach: int, *, stops: int) -> Pool:
        if self.pool is not None and reach <= self.pool.reach and stops <= len(self.pool.stop_ids):
            return self.pool
        self.pool, self.kept = None, {}
        reach = triton.cdiv(reach, REACH_STEP) * REACH_STEP
        self.decoder.prepare(reach)
        self.pool = Pool(self.decoder, self.slots, reach, stops=triton.next_power_of_2(max(8, stops)))
        return self.pool


@dataclass
class _Seated:
    """A request in a slot."""

    index: int
    left: int
    produced: int = 0
    given: int = 0
    """Tokens that `segments` has already returned."""


class _Sitting:
    """One submission, seen from the host."""

    def __init__(self, engine: GraphEngine, pool: Pool, requests: Sequence[Request], budget: int | None) -> None:
        self.engine, self.pool, self.requests = engine, pool, requests
        self.budget = sum(request.max_new_tokens for request in requests) if budget is None else budget
        self.next = 0
        self.parked = False
        self.seated: dict[int, _Seated] = {}
        self.kept = dict(engine.kept)
        self.asked = {_name(request) for request in requests}
        reserved = set(self.kept.values())
        self.free = [slot for slot in reversed(range(pool.slots)) if slot not in reserved]
        self.left: list[tuple[int, NDArray[np.int32], Status]] = []  # last segments not returned yet
        self.given: set[int] = set()  # requests whose last segment has been returned

    @property
    def over(self) -> bool:
        """Whether sampling is over: all responses are complete, the budget is spent, or the rest is parked."""
        return self.parked or self.budget <= 0 or (not self.seated and self.next == len(self.requests))

    def work(self, deadline: float | None) -> None:
        """Sample until the sitting is over or the deadline has passed, for at least one stretch."""
        while not self.over:
            if self._wants_refill():
                self._refill()
            if len(self.seated) > self.budget:
                self._park_last(len(self.seated) - self.budget)
            longest = max(seated.left for seated in self.seated.values())
            self.pool.advance(len(self.seated), min(LOOK, longest, self.budget // len(self.seated)))
            self._look()
            if deadline is not None and time.monotonic() >= deadline:
                return

    def segments(self, version: int) -> list[tuple[int, Segment]]:
        """What was sampled since the last call: last segments of responses that left, pieces of those that go on."""
        if self.over:
            self._leave(dict.fromkeys(self.seated, Status.PARKED))
            never = set(range(len(self.requests))) - self.given - {index for index, _, _ in self.left}
            nothing = np.zeros((3, 0), dtype=np.int32)
            self.left += [(index, nothing, Status.PARKED) for index in sorted(never)]
        pieces: list[tuple[int, NDArray[np.int32], Status | None]] = [*self.left]
        if self.seated:
            first = min(seated.given for seated in self.seated.values())
            last = max(seated.produced for seated in self.seated.values())
            records = self.pool.read(list(self.seated), first, last)
            for column, seated in enumerate(self.seated.values()):
                new = records[:, column, seated.given - first : seated.produced - first]
                pieces.append((seated.index, new, None))
                seated.given = seated.produced
        self.given |= {index for index, _, _ in self.left}
        self.left = []
        return [
            (self.requests[index].id, _segment(records, version, status))
            for index, records, status in pieces
            if records.shape[1] or status is not None
        ]

    def _wants_refill(self) -> bool:
        """A prefill costs a few steps, so slots are refilled a few at a time."""
        idle = self.pool.slots - len(self.seated)
        return self.next < len(self.requests) and (not self.seated or idle >= max(1, self.pool.slots // 8))

    def _refill(self) -> None:
        """Seat the next requests: in the slot that kept their keys and values, or in a free slot after a prefill."""
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
                if not self.free and not self.seated and not newcomers:  # every slot is kept for a later request
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
        """Compute keys and values of contexts except the last token, which the next step feeds. Equal ones run once."""
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
        """Read what the last steps did, and free the slots of responses that ended."""
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
            self._leave(ended)
            self.pool.seat(list(self.seated))

    def _park_last(self, count: int) -> None:
        """Park the last requests in line, because the budget has no token left for them."""
        last = sorted(self.seated, key=lambda slot: self.seated[slot].index)[-count:]
        self._leave(dict.fromkeys(last, Status.PARKED))
        self.pool.seat(list(self.seated))

    def _leave(self, slots: dict[int, Status]) -> None:
        """Collect what these slots sampled and free them, or keep them for the next sitting."""
        if not slots:
            return
        records = self.pool.read(list(slots), 0, max(self.seated[slot].produced for slot in slots))
        for column, (slot, status) in enumerate(slots.items()):
            seated = self.seated.pop(slot)
            self.left.append((seated.index, records[:, column, seated.given : seated.produced], status))
            if status is Status.PARKED and self.engine.parked == "keep":
                request, sampled = self.requests[seated.index], records[0, column, : seated.produced].tolist()
                self.kept[request.seed, (*request.context, *sampled)] = slot
            else:
                self.free.append(slot)


def _segment(records: NDArray[np.int32], version: int, status: Status | None) -> Segment:
    """Tokens, log-probs and entropies of one response, [3, tokens], the last two as the bits of float32."""
    tokens, (logprobs, entropies) = records[0], records[1:].copy().view(np.float32)
    return Segment(tokens.tolist(), logprobs.tolist(), entropies.tolist(), [version] * len(tokens), status)


def _name(request: Request) -> tuple[int, tuple[int, ...]]:
    """What identifies a response: its seed and all of its tokens."""
    return request.seed, tuple(request.context)
