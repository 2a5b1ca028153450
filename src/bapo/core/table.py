"""The signal table of an update: what its tokens weigh at every candidate bound, in one pass over them.

The share at a candidate pair needs only P(high), the signal of positive tokens, and N(low), that of negative ones; and
P at *every* high and N at *every* low are sums over tokens. So tables add up: micro-batches are accumulated by adding
theirs, ranks by one all-reduce. On CUDA one kernel fills a table (`dispatch.py`); the torch code here says what it
computes. Comparisons and sums are carried out as in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.core.checks import (
    check_finite,
    check_mask,
    check_not_negative,
    check_shapes,
    check_uses,
    compared,
    require_uses,
    working_dtype,
)
from bapo.core.nan import zero_or_nan
from bapo.core.settings import ClipSettings, Measure, Order

CPU_CHUNK = 2**18
"""Tokens per pass on CPU: the temporaries stay near the cache."""
DEVICE_CHUNK = 2**18
"""Tokens per pass elsewhere: bounds the candidates x tokens temporaries."""
LANES = 4
"""Sums kept side by side for each cell of the CPU histogram."""


class Chunk(NamedTuple):
    """Some tokens, flat, in working precision. Those that do not count have signal 0."""

    ratio: Tensor  # what candidates compare with their bounds
    counted: Tensor  # what a token weighs where a candidate keeps it
    signal: Tensor  # w * A


def summed_signal(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    own_bound: Tensor | None,  # tokens with used_low in place of every low: negative ones that were trained on before
) -> Tensor:  # [highs + lows + 1], float64
    """`bapo.core.bounds.signal_table` in torch operations, of arguments that went through `check_signal`."""
    on_cpu = mask.device.type == "cpu"
    named = {"ratio": ratio, "advantages": advantages, "behavior_logprobs": behavior_logprobs}
    # A list, so that every one of them is checked.
    finite = on_cpu and all([check_finite(name, x, mask) for name, x in named.items() if x is not None])  # noqa: C419
    if on_cpu:
        check_not_negative("ratio", ratio, mask)
    dtype = working_dtype(ratio)
    grids = grids_of(settings, dtype, mask.device)
    flat_ratio, flat_advantages, flat_mask = ratio.flatten(), advantages.flatten(), mask.flatten()
    flat_behavior = None if behavior_logprobs is None else behavior_logprobs.flatten()
    flat_own_bound = None if own_bound is None else own_bound.flatten()

    def chunks(size: int) -> Iterator[Chunk]:
        for start in range(0, mask.numel(), size):
            chunk = slice(start, start + size)
            ratios, signal, chosen = flat_ratio[chunk].to(dtype), flat_advantages[chunk].to(dtype), flat_mask[chunk]
            if flat_behavior is not None:  # in float64, where probabilities down to 1e-300 do not underflow
                signal = signal.double() * flat_behavior[chunk].double().exp()
            if finite:  # on CPU a product is several times faster than a select; without signal a ratio does no harm
                signal = signal * chosen.view(torch.int8)
            else:
                ratios, signal = torch.where(chosen, ratios, 0.0), torch.where(chosen, signal, 0.0)
            counts = Chunk(ratios, ratios, signal)
            yield counts if flat_own_bound is None else _used_apart(counts, flat_own_bound[chunk], settings)

    if on_cpu:
        return binned_sums(chunks(CPU_CHUNK), grids, settings.measure)
    return compared_sums(chunks(DEVICE_CHUNK), grids, settings.measure)


def _used_apart(chunk: Chunk, own_bound: Tensor, settings: ClipSettings) -> Chunk:
    """The chunk with some negative tokens counted at their own bound, whichever candidate looks at them.

    So they stand where no candidate clips them, and weigh what their own bound leaves of them.
    """
    assert settings.used_low is not None
    clipped = own_bound & compared(torch.le, chunk.ratio, rounded_down(settings.used_low, chunk.ratio.dtype))
    kept = (~clipped).view(torch.int8)  # products with 0 and 1: on CPU several times faster than a select
    if settings.measure == "surrogate":  # in float64, where the bound is what it says
        counted = (chunk.counted * kept).double().add_(clipped.view(torch.int8), alpha=settings.used_low)
    else:
        counted = chunk.counted * kept
        if settings.used_low >= settings.low[1]:  # what is kept lies beyond every low, and the rest weighs nothing
            return Chunk(chunk.ratio, counted, chunk.signal)
    beyond_every_low = torch.add(chunk.ratio, own_bound.view(torch.int8), alpha=2)
    return Chunk(beyond_every_low, counted, chunk.signal)


@lru_cache(maxsize=64)
def rounded_down(bound: float, dtype: torch.dtype) -> float:
    """The largest number of this dtype that is not above the bound. A ratio of this dtype exceeds both or neither."""
    rounded = torch.tensor(bound, dtype=dtype, device="cpu")
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return float(below if float(rounded) > bound else rounded)


def check_signal(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    uses: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The mask as bool, and the behaviour log-probs if they are weights."""
    check_shapes(mask, ratio=ratio, advantages=advantages, behavior_logprobs=behavior_logprobs)
    require_uses(settings.used_low, uses)
    check_uses(uses, mask)
    mask = check_mask(mask)
    if settings.weight == "none":
        return mask, None
    if behavior_logprobs is None:
        raise ValueError(
            "weight='rollout_prob' weighs each token by the probability it was sampled with, so it needs "
            "behavior_logprobs=. Pass them, or use weight='none'."
        )
    return mask, behavior_logprobs


@dataclass(frozen=True)
class Grids:
    """The candidates of one path as tensors on one device."""

    size: int  # of a signal table
    low_step: float
    high_step: float
    low: Tensor  # [lows] float64
    high: Tensor  # [highs] float64
    thresholds: Tensor  # [lows + 1 + highs] of the ratios' dtype: -low, 0, high, ascending; see binned_sums
    path_low: Tensor  # [candidates] index into low
    path_high: Tensor  # [candidates] index into high
    used_low: Tensor | None  # 0-d float64: in place of every low, for tokens that were trained on before

    @property
    def cells(self) -> int:
        """Places in the CPU histogram."""
        return (2 * self.thresholds.numel() + 1) * LANES


def grids_of(settings: ClipSettings, dtype: torch.dtype, device: torch.device) -> Grids:
    """The grids of a path. They do not depend on target, measure or weight: a target that moves finds them ready."""
    ranges = settings.low, settings.high, settings.low_step, settings.high_step
    return _grids(*ranges, settings.order, settings.used_low, dtype, device)


@lru_cache(maxsize=64)
def _grids(
    low_range: tuple[float, float],
    high_range: tuple[float, float],
    low_step: float,
    high_step: float,
    order: Order,
    used_low: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Grids:
    """Built once per path, dtype and device, so that no call copies from the host."""
    settings = ClipSettings(low=low_range, high=high_range, low_step=low_step, high_step=high_step, order=order)
    low = torch.tensor(settings.low_grid, dtype=torch.float64, device="cpu")
    high = torch.tensor(settings.high_grid, dtype=torch.float64, device="cpu")
    path_low, path_high = torch.tensor(settings.path, device="cpu").unbind(1)
    exact = torch.cat([-low.flip(0), low.new_zeros(1), high])
    # A ratio of this dtype is >= the real threshold exactly if it is >= the threshold rounded up to this dtype.
    rounded = exact.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return Grids(
        size=settings.table_size,
        low_step=low_step,
        high_step=high_step,
        low=low.to(device),
        high=high.to(device),
        thresholds=torch.where(rounded.double() < exact, above, rounded).to(device),
        path_low=path_low.contiguous().to(device),
        path_high=path_high.contiguous().to(device),
        used_low=None if used_low is None else torch.tensor(used_low, dtype=torch.float64, device="cpu").to(device),
    )


def binned_sums(chunks: Iterable[Chunk], grids: Grids, measure: Measure) -> Tensor:
    """Sums by histogram: for CPUs, where a scatter is cheap and a pass per candidate is not.

    The signed ratio u = r * sign(A) puts both signs on one line, negative tokens left of 0, positive ones right of it.
    With thresholds -low and high on that line, a token is clipped by a candidate exactly if threshold <= u (on its own
    side of 0), so bin k, the tokens with k thresholds <= u, holds all that a candidate has to know. A chunk has at most
    CPU_CHUNK tokens.
    """
    lows, highs = grids.low.numel(), grids.high.numel()
    signed_tokens = torch.zeros(1, dtype=torch.float64, device="cpu")
    weighted_cells, plain_cells = torch.zeros(2, grids.cells, dtype=torch.float64, device="cpu")
    for ratio, counted, signal in chunks:
        sign = torch.sgn(signal).to(ratio.dtype)
        cells = _cells(ratio * sign, sign, grids)
        signal = signal.to(torch.float64, copy=True)
        if measure == "surrogate":
            plain_cells.scatter_add_(0, cells, signal)
        weighted_cells.scatter_add_(0, cells, signal.mul_(counted))
        signed_tokens += torch.dot(sign, sign)

    # Bins 0..lows hold negative tokens (0 where r is largest), the rest positive ones.
    weighted = _sum_by_bin(weighted_cells)
    negative = -weighted[: lows + 1].cumsum(0)[:lows].flip(0)
    positive = weighted[lows + 1 :].cumsum(0)[:highs]
    if measure == "surrogate":
        plain = _sum_by_bin(plain_cells)
        negative = negative + grids.low * -plain[1 : lows + 1].flip(0).cumsum(0)
        positive = positive + grids.high * plain[lows + 2 :].flip(0).cumsum(0).flip(0)
    return torch.cat([positive, negative, signed_tokens])


def _cells(signed_ratio: Tensor, sign: Tensor, grids: Grids) -> Tensor:
    """Below threshold k is cell 2k, at it 2k + 1, above it 2k + 2; LANES places for each.

    The nearest threshold on the token's own side of 0 is found by arithmetic (right of 0 the first term is lows - 1,
    left of 0 the second one is 0), then compared with exactly. Neighbouring tokens add to different lanes of a cell,
    because a CPU must finish one addition to an address before it starts the next.
    """
    lows, highs = grids.low.numel(), grids.high.numel()
    last_low, first_high = float(grids.low[-1]), float(grids.high[0])
    from_low = signed_ratio.mul(1 / grids.low_step).add_(last_low / grids.low_step).clamp_(0, lows - 1)
    from_high = signed_ratio.mul(1 / grids.high_step).sub_(first_high / grids.high_step).clamp_(0, highs - 1)
    near = from_low.add_(from_high).round_().add_(sign).add_(1)
    side = signed_ratio.sub_(grids.thresholds.index_select(0, near.int())).sgn_()
    return near.mul_(2 * LANES).add_(side, alpha=LANES).add_(_lanes(sign.dtype)[: len(sign)]).int().long()


def _sum_by_bin(cells: Tensor) -> Tensor:
    """Lanes summed; at a threshold counts as past it."""
    sums = cells.view(-1, LANES).sum(1)
    return torch.cat([sums[:1], sums[1::2] + sums[2::2]])


@lru_cache(maxsize=2)
def _lanes(dtype: torch.dtype) -> Tensor:
    return (LANES + torch.arange(CPU_CHUNK, device="cpu") % LANES).to(dtype)


def compared_sums(chunks: Iterable[Chunk], grids: Grids, measure: Measure) -> Tensor:
    """Sums by comparing every token with every candidate: for accelerators, where atomics on few bins would queue."""
    lows = grids.low.numel()
    high_thresholds, low_thresholds = grids.thresholds[lows + 1 :, None], -grids.thresholds[:lows].flip(0)[:, None]
    table = torch.zeros(grids.size, dtype=torch.float64, device=grids.low.device)
    for ratio, counted, signal in chunks:
        weighted = counted.double() * signal.double()

        def contribution(kept: Tensor, side: Tensor, bounds: Tensor) -> Tensor:
            total = torch.where(kept, weighted * side, 0.0).sum(1)  # noqa: B023
            if measure == "surrogate":
                total = total + bounds * torch.where(kept, 0.0, signal * side).sum(1, dtype=torch.float64)  # noqa: B023
            return total

        positive = contribution(ratio < high_thresholds, signal > 0, grids.high)
        negative = -contribution(ratio > low_thresholds, signal < 0, grids.low)
        signed_tokens = (signal != 0).sum(dtype=torch.float64).reshape(1)
        # NaN fails every comparison, and an infinite ratio is clipped: neither may vanish.
        table += torch.cat([positive, negative, signed_tokens]) + zero_or_nan(weighted.sum())
    return table
