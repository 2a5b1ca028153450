"""The general in-process engine: samples from any transformers causal LM, with the weights the learner holds right now.

It is given a loaded model and keeps no copy of it. `load` copies only the weights that are not already in place, so
nothing moves if the learner trains the same model. The work happens inside `collect`. Requests wait in line for a fixed
number of slots; contexts are prefilled together; then every step feeds the last token of each slot and samples the
next. A response that ends frees its slot for the next in line, so no response waits for the longest. The rows have
different positions and lengths; `cache.py` explains how they share a cache.
Nothing survives the row: a response that comes back, in its next turn or after it was parked, is prefilled again.

What is exact. Each log-prob belongs to the sampled token under the distribution it was drawn from: it is the float32
log-softmax of the model's logits over the temperature. The draw inverts the cumulative distribution at the uniform of
(seed, position), see `randomness.py`. Greedy sampling is the limit of temperature 0: all mass on the best token, so
log-prob and entropy are 0. Truncation sets the logits of what it leaves out to minus infinity (`sittings.py`).

What is not. Matrix kernels may round differently for different batch shapes, so log-probs can change by about 1e-6
(4e-3 in bfloat16) with the other responses in the batch. A token changes only where its uniform falls that close to an
edge of the cumulative distribution: rare in float32, likely somewhere in a long response in bfloat16.

`engine_for` chooses the CUDA engine instead where it can run the model.

Left out: beams, and models whose state is not a list of keys and values.
"""

import inspect
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from bapo.core.wide import wide_linear
from bapo.rollout.engine import Engine, Precision, Request, Sampling, Segment
from bapo.rollout.local.cache import ColumnCache, padding_mask
from bapo.rollout.randomness import stream, uniforms
from bapo.rollout.sittings import InProcessEngine, copy_weights, left_by, non_finite
from bapo.types import Status

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_IDLE = -1
"""The owner of a row that has no request."""


class LocalEngine(InProcessEngine):
    """Engine on a model in this process. Shares its weights; restores its train mode after every call."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int = 128, prefill_tokens: int = 16384, float32_head: bool = False
    ) -> None:
        """`slots`: responses sampled at the same time. `prefill_tokens`: most tokens in a prefill of several rows.
        `float32_head`: compute logits in float32, also those of 16-bit weights.
        """
        super().__init__(model, slots=slots, prefill_tokens=prefill_tokens)
        _check_model(model)
        self.float32_head = float32_head
        self._changes = 0
        self.accepted = inspect.signature(model.forward).parameters

    def _fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(weights, dict(self.model.named_parameters()))
        self._changes = self._changes_so_far()

    def _changes_so_far(self) -> int:
        """How often the model's weights were changed in place: the learner may share them."""
        return sum(parameter._version for parameter in self.model.parameters())

    def _sit_down(self, requests: list[Request], sampling: Sampling, budget: int, turns: bool) -> "_Sitting":
        if self._changes != self._changes_so_far():
            raise RuntimeError(
                f"the model's weights have changed since version {self.version} was loaded, so its tokens would get a "
                "wrong version. Call load with the learner's current version first."
            )
        return _Sitting(self, requests, sampling, budget, turns)

    @contextmanager
    def _working(self, sitting: "_Sitting") -> Iterator[None]:
        with evaluating(self.model), wide_head(self.model) if self.float32_head else nullcontext():
            yield

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: ColumnCache) -> Tensor:
        """Logits after the last token of each row, [rows, vocabulary]."""
        extra = {"position_ids": positions, "logits_to_keep": 1}
        extra = {name: value for name, value in extra.items() if name in self.accepted}
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra)
        logits: Tensor = output.logits[:, -1]
        return logits


def engine_for(
    model: PreTrainedModel,  # in this process
    *,
    slots: int,
    parked: Literal["rebuild", "keep"] = "rebuild",
    cache_tokens: int | None = None,
    float32_head: bool = False,
    precision: Precision = "model",
) -> Engine:
    """The fastest engine that can run this model on its device: CUDA's where it can, else the general one.

    `parked`, `cache_tokens`, `precision`: see `GraphEngine`. "keep" and eight bits need CUDA; the general engine
    ignores `cache_tokens`.
    `float32_head`: compute logits in float32, also those of 16-bit weights.
    """
    reason: str | None = f"it is on {model.device}"
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        from bapo.rollout.cuda.decoder import unsupported  # needs Triton, which a machine without a GPU may not have
        from bapo.rollout.cuda.engine import GraphEngine

        if (reason := unsupported(model, precision)) is None:
            how = {"cache_tokens": cache_tokens, "float32_head": float32_head, "precision": precision}
            return GraphEngine(model, slots=slots, parked=parked, **how)  # type: ignore[arg-type]
    for asked, key, instead in (
        (parked == "keep", "offpolicy.partial_cache='keep'", "'rebuild'"),
        (precision != "model", f"rollout.precision={precision!r}", "'model'"),
    ):
        if asked:
            raise ValueError(
                f"{key} needs the CUDA engine, which cannot run {type(model).__name__}: {reason}. Set it to {instead}."
            )
    if on_gpu:
        warnings.warn(
            f"{type(model).__name__} is sampled by the general engine, which is an order of magnitude slower than the "
            f"CUDA engine. The CUDA engine cannot run it: {reason}."
            + ("" if cache_tokens is None else f" rollout.cache_tokens={cache_tokens} has no effect."),
            stacklevel=2,
        )
    return LocalEngine(model, slots=slots, float32_head=float32_head)


class _Sitting:
    """What is under way. A row is a place in the batch. The first `self.rows` rows run, whether owned or idle.

    Host arrays, one entry per slot: `owner` (which request), `start` (column of its first token), `left` (tokens until
    the length limit), `position` (response tokens so far), `stream`. Device: `last`, the token to feed next.
    """

    def __init__(
        self, engine: LocalEngine, requests: list[Request], sampling: Sampling, budget: int, turns: bool
    ) -> None:
        self.engine, self.requests, self.sampling, self.budget, self.turns = engine, requests, sampling, budget, turns
        self.device = engine.model.device
        slots = min(engine.slots, len(requests))
        self.reach = _reach(requests)
        self.longest_context = max(len(request.context) for request in requests)
        self.columns = self.reach + max(32, self.reach // 4)
        self.cache = ColumnCache(slots, self.columns)
        self.column = self.longest_context - 1

        self.parked = False
        self.slots, self.rows, self.alive, self.next = slots, 0, 0, 0
        self.rests_at = len(requests) // 2
        self.owner = np.full(slots, _IDLE, dtype=np.int64)
        self.start, self.left, self.position = (np.zeros(slots, dtype=np.int64) for _ in range(3))
        self.stream = np.zeros(slots, dtype=np.uint64)
        self.last = torch.zeros(slots, dtype=torch.int64, device=self.device)

        self.stop_ids = np.array(sorted(sampling.stop_ids), dtype=np.int64)
        self.ended: dict[int, Status] = {}  # requests whose last segment has not been returned yet
        self.given: set[int] = set()  # requests whose last segment has been returned
        self.owners: list[NDArray[np.int64]] = []
        self.tape: list[tuple[Tensor, ...]] = []

    @property
    def over(self) -> bool:
        """Whether sampling is over: all responses are complete, the budget is spent, or the rest is parked."""
        return self.parked or self.budget <= 0 or not (self.unfinished or self.turns)

    @property
    def unfinished(self) -> int:
        """How many responses have a row or wait for one."""
        return self.alive + len(self.requests) - self.next

    @property
    def resting(self) -> bool:
        """Whether half of what was under way has ended its turn."""
        return self.turns and not self.over and self.unfinished <= self.rests_at

    @property
    def ids(self) -> set[int]:
        """The responses whose last segment has not been returned."""
        return {request.id for index, request in enumerate(self.requests) if index not in self.given}

    def fits(self, requests: list[Request]) -> bool:
        """Whether there are rows and columns for these, too."""
        wide = self.slots == self.engine.slots or self.unfinished + len(requests) <= self.slots
        return wide and (not requests or _reach(requests) <= self.reach)

    def add(self, requests: list[Request]) -> None:
        """Let these wait before all that wait, because they were begun before."""
        self.requests[self.next : self.next] = requests
        self.longest_context = max(self.longest_context, *(len(request.context) for request in requests), 0)
        self.rests_at = self.unfinished // 2

    def work(self, deadline: float | None) -> None:
        """Sample until the sitting is over, rests, or the deadline has passed, for at least one step."""
        while not (self.over or self.resting):
            if self._wants_refill():
                self._refill()
            if self.alive > self.budget:
                self._park_last(self.alive - self.budget)
            if self.column == self.columns:
                self._shift()
            self._step()
            if deadline is not None and time.monotonic() >= deadline:
                return

    # Which request has which row.

    def _wants_refill(self) -> bool:
        """A prefill costs about a step, so slots are refilled a few at a time."""
        idle = self.slots - self.alive
        return self.next < len(self.requests) and (self.alive == 0 or idle >= max(1, self.slots // 8))

    def _refill(self) -> None:
        idle = np.flatnonzero(self.owner == _IDLE)
        count = min(len(idle), len(self.requests) - self.next, self.budget - self.alive)
        if count <= 0:
            return
        rows = idle[:count]
        newcomers = range(self.next, self.next + count)
        if max(len(self.requests[index].context) for index in newcomers) > self.column + 1:
            self._shift()
        self.next += count
        self.owner = self.owner.copy()
        self.owner[rows] = newcomers
        for row, index in zip(rows.tolist(), newcomers, strict=True):
            request = self.requests[index]
            self.start[row] = self.column - len(request.context) + 1
            self.left[row] = request.max_new_tokens
            self.position[row] = request.position
            self.stream[row] = stream(request.seed)
        self.last[self._tensor(rows)] = self._tensor([self.requests[index].context[-1] for index in newcomers])
        self._prefill(rows.tolist(), newcomers)
        self._settle(max(self.rows, int(rows[-1]) + 1))

    def _prefill(self, rows: Sequence[int], newcomers: Sequence[int]) -> None:
        """Compute keys and values of contexts except the last token, which the next step feeds. Equal ones run once."""
        seats: dict[tuple[int, ...], list[int]] = {}
        for row, index in zip(rows, newcomers, strict=True):
            context = tuple(self.requests[index].context[:-1])
            if context:
                seats.setdefault(context, []).append(row)
        for batch in _batches(sorted(seats, key=len), self.engine.prefill_tokens):
            width = max(map(len, batch))
            ids = self._tensor([(0,) * (width - len(context)) + context for context in batch])
            padding = self._tensor([width - len(context) for context in batch])
            positions = (torch.arange(width, device=self.device) - padding[:, None]).clamp_(min=0)
            ragged = len(batch[0]) < width
            mask = padding_mask(padding, low=0, end=width) if ragged else None
            targets = [(row, source) for source, context in enumerate(batch) for row in seats[context]]
            into, come_from = self._tensor(targets).unbind(1)
            self.cache.expect_prefill(into, come_from, end=self.column)
            self.engine.forward(ids, positions, mask, self.cache)

    def _park_last(self, count: int) -> None:
        """Vacate the rows of the last requests in line, because the budget has no token left for them."""
        seated = np.flatnonzero(self.owner >= 0)
        self._vacate(seated[np.argsort(self.owner[seated])[-count:]])

    def _vacate(self, rows: NDArray[np.int64]) -> None:
        """Make these rows idle. They keep running until they are refilled, and attend only to themselves."""
        self.owner = self.owner.copy()
        self.owner[rows] = _IDLE
        self.start[rows] = self.column
        alive = int((self.owner >= 0).sum())
        if self.next == len(self.requests) and 0 < alive <= 0.75 * self.rows:
            self._compact()
        else:
            self._settle(self.rows)

    def _compact(self) -> None:
        """Close the gaps that idle rows leave: move the owned rows to the front."""
        keep = np.flatnonzero(self.owner >= 0)
        count = len(keep)
        sources = self._tensor(keep)
        self.cache.move(sources, low=int(self.start[keep].min()), end=self.column)
        self.last[:count] = self.last[sources]
        for array in (self.start, self.left, self.position, self.stream):
            array[:count] = array[keep]
        self.owner = np.concatenate([self.owner[keep], np.full(self.slots - count, _IDLE)])
        self._settle(count)

    def _shift(self) -> None:
        """Move the window to the left, as far as the longest row and the contexts in line allow, or to the right."""
        home = max(self.column - self.low, self.longest_context - 1)
        self.cache.shift(self.rows, low=self.low, end=self.column, to=home)
        self.start -= self.column - home
        self.column = home
        self._settle(self.rows)

    def _settle(self, rows: int) -> None:
        """Compute what all steps until the next change of rows have in common."""
        self.rows = rows
        seated = self.owner[:rows] >= 0
        self.alive = int(seated.sum())
        self.start[:rows][~seated] = self.column
        self.low = int(self.start[:rows].min()) if rows else self.column
        self.ragged = bool((self.start[:rows] > self.low).any())
        self.start_on_device = self._tensor(self.start[:rows])

    # What a step does.

    def _step(self) -> None:
        rows, low, column = self.rows, self.low, self.column
        mask = padding_mask(self.start_on_device, low=low, end=column + 1) if self.ragged else None
        self.cache.expect_step(rows, low=low, column=column)
        logits = self.engine.forward(self.last[:rows, None], (column - self.start_on_device)[:, None], mask, self.cache)
        draws = torch.from_numpy(uniforms(self.stream[:rows], self.position[:rows])).to(self.device)
        kept: tuple[Tensor, ...] = ()
        if self.sampling.truncates:
            left, mass = left_by(self.sampling, logits.float() / self.sampling.temperature)
            logits, kept = logits.masked_fill(~left, -torch.inf), (mass,)
        tokens, logprobs, entropies = draw(logits, draws, temperature=self.sampling.temperature)
        self.last[:rows] = tokens

        owner = self.owner[:rows]
        seated = owner >= 0
        sampled = tokens.cpu().numpy()
        broken = seated & ~np.isfinite(logprobs.cpu().numpy())
        if broken.any():
            raise non_finite(self.requests, int(owner[broken][0]), int(self.position[:rows][broken][0]))
        self.owners.append(owner)
        self.tape.append((tokens, logprobs, entropies, *kept))

        self.column += 1
        self.position[:rows] += 1
        self.left[:rows] -= 1
        self.budget -= self.alive
        stopped = seated & np.isin(sampled, self.stop_ids)
        ended = stopped | (seated & (self.left[:rows] == 0))
        if ended.any():
            for index, by_stop in zip(owner[ended].tolist(), stopped[ended].tolist(), strict=True):
                self.ended[index] = Status.STOPPED if by_stop else Status.TRUNCATED
            self._vacate(np.flatnonzero(ended))

    def segments(self, version: int) -> list[tuple[int, Segment]]:
        """What was sampled since the last call, sorted by request.

        The tape has the tokens in the order of the steps, so a stable sort leaves every response in order.
        """
        if self.over:
            left = set(range(len(self.requests))) - self.given - self.ended.keys()
            self.ended |= dict.fromkeys(left, Status.PARKED)
        empty = np.zeros(0, dtype=np.int64)
        owners = np.concatenate(self.owners) if self.owners else empty
        order = np.argsort(owners, kind="stable")
        owners = owners[order]
        columns = [torch.cat(part).cpu().numpy()[order] for part in zip(*self.tape, strict=True)] or [empty] * 3
        found = []
        for index in sorted({*np.unique(owners).tolist(), *self.ended} - {_IDLE}):
            low, high = np.searchsorted(owners, [index, index + 1])
            tokens, logprobs, entropies, *kept = (column[low:high].tolist() for column in columns)
            masses = [mass for part in kept for mass in part]
            values = tokens, logprobs, entropies, [version] * len(tokens)
            found.append((self.requests[index].id, Segment(*values, self.ended.get(index), masses)))
        self.given |= self.ended.keys()
        self.ended, self.owners, self.tape = {}, [], []
        return found

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)


def draw(
    logits: Tensor,  # [rows, vocabulary]
    uniform: Tensor,  # [rows] float64 in [0, 1 - 2^-52]
    *,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # token, its log-prob, entropy of the distribution; [rows] each
    """Draw one token per row by inversion: the first whose cumulative probability exceeds uniform * total.

    With u <= 1 - 2^-52, u * total rounds to less than total, so a token of probability 0 is never drawn. The cumulative
    sum is in float64: in float32 its error over a large vocabulary would exceed the error of the logits. Non-finite
    logits give a NaN log-prob, whatever the token.
    """
    logits = logits.float()
    if temperature == 0:
        best, tokens = logits.max(dim=-1)
        nothing = best - best  # 0, or NaN where `best` is not finite
        return tokens, nothing, nothing
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    probs = logprobs.exp()
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0], torch.special.entr(probs).sum(-1)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block; afterwards every module returns to its own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def wide_head(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's output head gives float32. What the model does with its logits afterwards stays the same."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    head.forward = lambda states: wide_linear(states, head.weight, head.bias)
    try:
        yield
    finally:
        del head.forward


def _reach(requests: Sequence[Request]) -> int:
    """The most tokens that one of these may have."""
    return max(len(request.context) + request.max_new_tokens for request in requests)


def _batches(contexts: list[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Split contexts, sorted by length, so that rows times width is at most `tokens` in each batch of several rows."""
    batch: list[tuple[int, ...]] = []
    for context in contexts:
        if batch and (len(batch) + 1) * len(context) > tokens:
            yield batch
            batch = []
        batch.append(context)
    if batch:
        yield batch


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"LocalEngine got a {name}, but it needs the transformers model itself. Pass the model inside the wrapper: "
            "model.get_base_model() of a PEFT model (its adapters stay active), model.module of a parallel model."
        )
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if getattr(model, "_is_stateful", False) or other:
        raise ValueError(
            f"{name} keeps state other than keys and values ({', '.join(sorted(other)) or 'recurrent'}), which rows of "
            "different lengths cannot share. Use a model with attention layers only, or another engine."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; LocalEngine continues one context. Use a decoder-only model.")
