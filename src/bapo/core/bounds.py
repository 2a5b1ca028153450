"""BAPO's clip bounds, solved exactly in one pass (arXiv:2510.18927, Algorithm 1).

The paper's search re-measures the positive share after every small move of a bound. But its path is fixed in advance:
high goes up to its end, then low does (or the other way round). So the signal is summed at every candidate first, and
the path is walked afterwards:

    signal_table         tokens -> a vector of P at each high, N at each low       (table.py; tables of parts add up)
    bounds_from_table    table -> the first candidate on the path with P / (P + N) >= target_share

On CUDA each of the two is one kernel (`table_parts`, `bounds_from_parts`); the torch code says what they compute.
Nothing here waits for the device: bounds stay 0-d tensors. The answer equals the step-by-step loop's on every input,
with comparisons and sums carried out as in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core.checks import check_not_empty, working_dtype
from bapo.core.kernels import usable
from bapo.core.nan import zero_or_nan
from bapo.core.settings import ClipSettings, Measure
from bapo.core.table import Grids, check_signal, grids_of, signal_table, table_parts

LEAST_WEIGHT = 1e-12
"""Of negative tokens, where nothing positive is left to hold a share."""


class StopReason(IntEnum):
    """Why the search ended where it did."""

    START = 0
    """The first candidate already reached the target."""
    RAISING_HIGH = 1
    """The target was reached while the upper bound moved."""
    RAISING_LOW = 2
    """The target was reached while the lower bound moved."""
    END = 3
    """No candidate reached the target; the last one is used."""
    NO_SIGNAL = 4
    """No token has a non-zero advantage; the first candidate is used."""


@dataclass(frozen=True)
class ClipBounds:
    """Bounds on the ratio, and the positive share they give: 0-d tensors on the inputs' device.

    `share_at_start`, `share_at_end` and `stop` describe the search, and are None where the bounds were given.
    """

    low: Tensor
    high: Tensor
    share: Tensor
    """P / (P + N) at (low, high)."""
    share_at_start: Tensor | None = None
    """The share at the first candidate of the path."""
    share_at_end: Tensor | None = None
    """The share at the last candidate of the path."""
    stop: Tensor | None = None
    """A StopReason, as an integer."""
    negative_weight: Tensor | None = None
    """Factor on the advantages of negative tokens, which makes up what the bounds could not (`weight_of_remainder`);
    None with remainder="leave"."""

    def metrics(self, *, ends: bool = True) -> dict[str, Tensor]:
        """What is known of the bounds, by the names it is logged under; `ends`: also the share at both ends."""
        named = {"clip_low": self.low, "clip_high": self.high, "share": self.share}
        if ends:
            named |= {"share_at_start": self.share_at_start, "share_at_end": self.share_at_end}
        named |= {"stop": self.stop, "negative_weight": self.negative_weight}
        return {name: value for name, value in named.items() if value is not None}


def solve_bounds(
    ratio: Tensor,  # [tokens] or [sequences, tokens]: pi_theta / pi_behavior
    advantages: Tensor,  # same shape
    mask: Tensor,  # same shape; which tokens count
    settings: ClipSettings,
    *,
    behavior_logprobs: Tensor | None = None,  # same shape; needed for weight="rollout_prob"
    process_group: dist.ProcessGroup | None = None,  # sum the signal over these ranks, with one all-reduce
) -> ClipBounds:
    """The bounds for one update, from that update's own tokens (Algorithm 1 of arXiv:2510.18927)."""
    if process_group is None:
        if usable(mask):
            mask, behavior_logprobs = check_signal(ratio, advantages, mask, settings, behavior_logprobs)
            parts = table_parts(ratio, advantages, mask, settings, behavior_logprobs)
            return bounds_from_parts(parts, settings, working_dtype(ratio))
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior_logprobs)
        if table.device.type == "cpu" and table[-1] == 0:
            check_not_empty(mask, "Skip this update, or check the code that builds the mask.")
        return bounds_from_table(table, settings, dtype=working_dtype(ratio))
    try:
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior_logprobs)
    except Exception:
        poison_peers(settings, process_group, mask.device)
        raise
    dist.all_reduce(table, group=process_group)
    bounds = bounds_from_table(table, settings, dtype=working_dtype(ratio))
    if table.device.type == "cpu" and bool(bounds.share.isnan()):
        raise ValueError(
            "the signal summed over process_group is not finite, although this rank's is: another rank got bad input. "
            "Its own error names the sequence."
        )
    return bounds


def poison_peers(settings: ClipSettings, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Join the all-reduce with NaN, so that peers learn of this rank's error instead of waiting for it."""
    size = len(settings.low_grid) + len(settings.high_grid) + 1
    dist.all_reduce(torch.full((size,), math.nan, dtype=torch.float64, device=device), group=process_group)


@torch.no_grad()
def bounds_from_table(table: Tensor, settings: ClipSettings, *, dtype: torch.dtype = torch.float32) -> ClipBounds:
    """The first candidate on the path whose positive share reaches the target, else the last one."""
    grids = grids_of(settings, dtype, table.device)
    if table.shape != (grids.size,):
        raise ValueError(
            f"table has shape {tuple(table.shape)} but these settings give {(grids.size,)}: it was filled with other "
            "settings. Use one ClipSettings for signal_table and bounds_from_table."
        )
    if usable(table):
        return bounds_from_parts(table, settings, dtype)
    return _with_weight(_first_to_reach(table, settings, grids, dtype), settings)


def _first_to_reach(table: Tensor, settings: ClipSettings, grids: Grids, dtype: torch.dtype) -> ClipBounds:
    """The walk along the path in torch operations, all candidates at once."""
    highs = grids.high.numel()
    positive, negative, signed_tokens = table[:highs][grids.path_high], table[highs:-1][grids.path_low], table[-1:]
    total = positive + negative
    # All clipped away at this candidate: 0. No signal at all: 1, the search has nothing to repair. NaN stays NaN.
    share = torch.where(total == 0, (signed_tokens == 0).to(total.dtype), positive / total)

    failed = ~(share >= settings.target_share)
    index = failed.cumprod(0).sum().clamp(max=len(share) - 1).reshape(1)
    raised_high = grids.path_high[index] > grids.path_high[index - 1]
    stop = torch.where(raised_high, StopReason.RAISING_HIGH, StopReason.RAISING_LOW)
    stop = torch.where(index == 0, StopReason.START, stop)
    stop = torch.where(failed.all(), StopReason.END, stop)
    stop = torch.where(signed_tokens == 0, StopReason.NO_SIGNAL, stop)
    bad = zero_or_nan(table.sum()).to(dtype)  # from a table that is not finite comes no plausible bound or share
    return ClipBounds(
        low=grids.low[grids.path_low[index]].squeeze(0).to(dtype) + bad,
        high=grids.high[grids.path_high[index]].squeeze(0).to(dtype) + bad,
        share=share[index].squeeze(0).to(dtype) + bad,
        share_at_start=share[0].to(dtype) + bad,
        share_at_end=share[-1].to(dtype) + bad,
        stop=stop.squeeze(0),
    )


def bounds_from_parts(
    parts: Tensor,  # a table, or one per column
    settings: ClipSettings,
    dtype: torch.dtype,
) -> ClipBounds:
    """`bounds_from_table` by one kernel, which adds up the parts and walks the path."""
    from bapo.core.kernels.bounds import choose_bounds

    grids = grids_of(settings, dtype, parts.device)
    high_first = settings.order == "high_first"
    chosen = choose_bounds(
        parts, grids.low, grids.high, target_share=settings.target_share, high_first=high_first, dtype=dtype
    )
    return _with_weight(ClipBounds(*chosen), settings)


def weight_of_remainder(share: Tensor, target_share: float) -> Tensor:
    """The factor w <= 1 on negative tokens with which positive ones hold the target, P / (P + w N) = target:

        w = min(1, P (1 - target) / (N target)) = min(1, share (1 - target) / ((1 - share) target))

    1 where the share is reached already. Where no positive signal is left to be balanced it is tiny, but not 0: a
    negative token stays one.
    """
    missing = (share * (1 - target_share) / ((1 - share) * target_share)).clamp(min=LEAST_WEIGHT)
    return torch.where(share >= target_share, torch.ones_like(share), missing)


def _with_weight(bounds: ClipBounds, settings: ClipSettings) -> ClipBounds:
    if settings.remainder == "leave":
        return bounds
    return replace(bounds, negative_weight=weight_of_remainder(bounds.share, settings.target_share))


@torch.no_grad()
def positive_share(
    ratio: Tensor, signal: Tensor, low: Tensor | float, high: Tensor | float, measure: Measure = "gradient"
) -> Tensor:  # 0-d float64
    """P / (P + N) at one pair of bounds; `signal` is w * A with masked tokens set to 0. No signal at all: 1."""
    kept = torch.where(signal > 0, ratio < high, ratio > low)
    clipped = clip(ratio, low, high) if measure == "surrogate" else torch.zeros_like(ratio)
    contribution = torch.where(kept, ratio, clipped) * signal
    positive = contribution.clamp(min=0).sum(dtype=torch.float64)
    negative = -contribution.clamp(max=0).sum(dtype=torch.float64)
    total = positive + negative
    bad = zero_or_nan((ratio * signal).sum(dtype=torch.float64))  # a NaN ratio is never kept; it must not vanish
    return torch.where(total == 0, (signal == 0).all().double(), positive / total) + bad


def clip(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The ratio between two bounds, each a number or a tensor."""
    return torch.clip(ratio, low, high)  # type: ignore[arg-type]  # torch's stub knows one kind at a time


def fixed_bounds(ratio: Tensor, signal: Tensor, low: float, high: float) -> ClipBounds:
    """A given pair of bounds with the share (gradient measure) it leaves to positive tokens."""
    share = positive_share(ratio, signal, low, high).to(ratio.dtype)
    return ClipBounds(low=torch.full_like(share, low), high=torch.full_like(share, high), share=share)
