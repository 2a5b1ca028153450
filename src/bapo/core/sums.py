"""The sums of the signal table in torch operations. `bounds.py` says what they mean.

On a CPU they are taken by histogram, because a scatter is cheap there and a pass per candidate is not. Elsewhere every
token is compared with every candidate (`compared_sums`), and on CUDA a kernel does that.

The signed ratio u = r * sign(A) puts both signs on one line, negative tokens left of 0, positive ones right of it. With
thresholds -low and high on that line, a token is clipped by a candidate exactly if threshold <= u (on its own side of
0), so bin k, the tokens with k thresholds <= u, holds all that a candidate has to know.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.core.checks import holds, zero_or_nan

CPU_CHUNK = 2**18
"""Tokens per pass, so that the temporaries stay near the cache."""
DEVICE_CHUNK = 2**18
"""Tokens per pass where there is neither a CPU nor a kernel: limits the temporaries, candidates x tokens."""
LANES = 4
"""Sums kept side by side for each cell of the histogram."""


class Chunk(NamedTuple):
    """Some tokens, flat, in working precision. Those that do not count have signal 0."""

    ratio: Tensor  # what candidates compare with their bounds
    counted: Tensor  # what a token weighs where a candidate keeps it
    signal: Tensor  # w * A


def binned_sums(
    chunks: Iterable[Chunk],  # CPU_CHUNK tokens each, or fewer
    low: Tensor,  # [lows] float64, candidates
    high: Tensor,  # [highs] float64
    thresholds: Tensor,  # [lows + 1 + highs] of the ratios' dtype: -low from the last to the first, 0, high
    *,
    steps: tuple[float, float],  # between candidates, of low and of high
    surrogate: bool,
) -> Tensor:  # [highs + lows + 1] float64: the signal table
    """P at every high, N at every low, and the number of tokens with a signal."""
    lows, highs = low.numel(), high.numel()
    signed_tokens = torch.zeros(1, dtype=torch.float64, device="cpu")
    cells = (2 * thresholds.numel() + 1) * LANES
    weighted_cells, plain_cells = torch.zeros(2, cells, dtype=torch.float64, device="cpu")
    for ratio, counted, signal in chunks:
        sign = torch.sgn(signal).to(ratio.dtype)
        places = _places(ratio * sign, sign, low, high, thresholds, steps)
        signal = signal.to(torch.float64, copy=True)
        if surrogate:
            plain_cells.scatter_add_(0, places, signal)
        weighted_cells.scatter_add_(0, places, signal.mul_(counted))
        signed_tokens += torch.dot(sign, sign)

    # Bins 0..lows hold negative tokens (0 where r is largest), the rest positive ones.
    weighted = _sum_by_bin(weighted_cells)
    negative = -weighted[: lows + 1].cumsum(0)[:lows].flip(0)
    positive = weighted[lows + 1 :].cumsum(0)[:highs]
    if surrogate:
        plain = _sum_by_bin(plain_cells)
        negative = negative + low * -plain[1 : lows + 1].flip(0).cumsum(0)
        positive = positive + high * plain[lows + 2 :].flip(0).cumsum(0).flip(0)
    return torch.cat([positive, negative, signed_tokens])


def _places(
    signed_ratio: Tensor, sign: Tensor, low: Tensor, high: Tensor, thresholds: Tensor, steps: tuple[float, float]
) -> Tensor:
    """Where each token is added. Below threshold k is cell 2k, at it 2k + 1, above it 2k + 2; LANES places for each.

    The nearest threshold on the token's own side of 0 is found by arithmetic (right of 0 the first term is lows - 1,
    left of 0 the second one is 0), then compared with exactly. Neighbouring tokens add to different lanes of a cell,
    because a CPU must finish one addition to an address before it starts the next.
    """
    low_step, high_step = steps
    last_low, first_high = float(low[-1]), float(high[0])
    from_low = signed_ratio.mul(1 / low_step).add_(last_low / low_step).clamp_(0, low.numel() - 1)
    from_high = signed_ratio.mul(1 / high_step).sub_(first_high / high_step).clamp_(0, high.numel() - 1)
    near = from_low.add_(from_high).round_().add_(sign).add_(1)
    side = signed_ratio.sub_(thresholds.index_select(0, near.int())).sgn_()
    return near.mul_(2 * LANES).add_(side, alpha=LANES).add_(_lanes(sign.dtype)[: len(sign)]).int().long()


def _sum_by_bin(cells: Tensor) -> Tensor:
    """Lanes summed; at a threshold counts as past it."""
    sums = cells.view(-1, LANES).sum(1)
    return torch.cat([sums[:1], sums[1::2] + sums[2::2]])


@lru_cache(maxsize=2)
def _lanes(dtype: torch.dtype) -> Tensor:
    return (LANES + torch.arange(CPU_CHUNK, device="cpu") % LANES).to(dtype)


def at_their_own_bound(chunk: Chunk, used_negative: Tensor, used_low: float, surrogate: bool, last_low: float) -> Chunk:
    """The chunk with used negative tokens counted at their own bound, whichever candidate looks at them.

    So they stand where no candidate clips them, and weigh what their own bound leaves of them.
    """
    clipped = used_negative & holds(torch.le, chunk.ratio, rounded_down(used_low, chunk.ratio.dtype))
    kept = (~clipped).view(torch.int8)  # products with 0 and 1: on CPU several times faster than a select
    if surrogate:  # in float64, where the bound is what it says
        counted = (chunk.counted * kept).double().add_(clipped.view(torch.int8), alpha=used_low)
    else:
        counted = chunk.counted * kept
        if used_low >= last_low:  # what is kept lies beyond every low, and the rest weighs nothing
            return Chunk(chunk.ratio, counted, chunk.signal)
    beyond_every_low = torch.add(chunk.ratio, used_negative.view(torch.int8), alpha=2)
    return Chunk(beyond_every_low, counted, chunk.signal)


@lru_cache(maxsize=64)
def rounded_down(bound: float, dtype: torch.dtype) -> float:
    """The largest number of this dtype that is not above the bound. A ratio of this dtype exceeds both or neither."""
    rounded = torch.tensor(bound, dtype=dtype, device="cpu")
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return float(below if float(rounded) > bound else rounded)


def compared_sums(
    chunks: Iterable[Chunk],  # DEVICE_CHUNK tokens each, or fewer; the rest as in `binned_sums`
    low: Tensor,
    high: Tensor,
    thresholds: Tensor,
    *,
    surrogate: bool,
) -> Tensor:
    """The same by comparing every token with every candidate: for accelerators, where atomics on few bins queue."""
    lows = low.numel()
    high_thresholds, low_thresholds = thresholds[lows + 1 :, None], -thresholds[:lows].flip(0)[:, None]
    table = torch.zeros(lows + 1 + high.numel(), dtype=torch.float64, device=low.device)
    for ratio, counted, signal in chunks:
        weighted = counted.double() * signal.double()

        def contribution(kept: Tensor, side: Tensor, bounds: Tensor) -> Tensor:
            total = torch.where(kept, weighted * side, 0.0).sum(1)  # noqa: B023
            if surrogate:
                total = total + bounds * torch.where(kept, 0.0, signal * side).sum(1, dtype=torch.float64)  # noqa: B023
            return total

        positive = contribution(ratio < high_thresholds, signal > 0, high)
        negative = -contribution(ratio > low_thresholds, signal < 0, low)
        signed_tokens = (signal != 0).sum(dtype=torch.float64).reshape(1)
        # NaN fails every comparison, and an infinite ratio is clipped: neither may vanish.
        table += torch.cat([positive, negative, signed_tokens]) + zero_or_nan(weighted.sum())
    return table
