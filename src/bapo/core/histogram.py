"""The signal table by histogram: for CPUs, where a scatter is cheap and a pass per candidate is not.

The signed ratio u = r * sign(A) puts both signs on one line, negative tokens left of 0, positive ones right of it. With
thresholds -low and high on that line, a token is clipped by a candidate exactly if threshold <= u (on its own side of
0), so bin k, the tokens with k thresholds <= u, holds all that a candidate has to know. `bounds.py` says what the sums
mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CPU_CHUNK = 2**18
"""Tokens per pass, so that the temporaries stay near the cache."""
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
