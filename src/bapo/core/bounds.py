"""BAPO's clip bounds, solved exactly in one pass (arXiv:2510.18927, Algorithm 1).

The paper's search re-measures the positive share after every small move of a bound. But its path is fixed in advance:
high goes up to its end, then low does (or the other way round). The share at a candidate needs only P(high), the signal
of positive tokens, and N(low), that of negative ones; and P at *every* high and N at *every* low are sums over tokens,
which one pass can fill. So:

    signal_table    tokens -> a vector of P at each high, N at each low       (pure sums: tables of parts add up)
    bounds_from_table    table -> the first candidate on the path with P / (P + N) >= target_share

On CUDA each of the two is one kernel (`table_parts`, `bounds_from_parts`); the torch code here says what they compute.
Micro-batches are accumulated by adding their tables, ranks by one all-reduce of one table. Nothing here waits for the
device: bounds stay 0-d tensors. The answer equals the step-by-step loop's on every input, with comparisons and sums
carried out as in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core.checks import check_finite, check_mask, check_not_empty, check_not_negative, check_shapes
from bapo.core.kernels import usable
from bapo.core.settings import ClipSettings, Measure, Order

__all__ = [
    "ClipBounds",
    "ClipSettings",
    "StopReason",
    "bounds_from_table",
    "clip",
    "fixed_bounds",
    "positive_share",
    "signal_table",
    "solve_bounds",
]

CPU_CHUNK = 2**18
"""Tokens per pass on CPU: the temporaries stay near the cache."""
DEVICE_CHUNK = 2**18
"""Tokens per pass elsewhere: bounds the candidates x tokens temporaries."""


LEAST_WEIGHT = 1e-12
"""Of negative tokens, where nothing positive is left to hold a share."""
LANES = 4
"""Sums kept side by side for each cell of the CPU histogram."""


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

    The last three fields describe the search, and are None where the bounds were given.
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
    """Factor on the advantages of negative tokens, which makes up what the bounds could not (`weight_of_remainder`)."""


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
            mask, behavior_logprobs = _checked(ratio, advantages, mask, settings, behavior_logprobs)
            parts = table_parts(ratio, advantages, mask, settings, behavior_logprobs)
            return bounds_from_parts(parts, settings, _working_dtype(ratio))
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior_logprobs)
        if table.device.type == "cpu" and table[-1] == 0:
            check_not_empty(mask, "Skip this update, or check the code that builds the mask.")
        return bounds_from_table(table, settings, dtype=_working_dtype(ratio))
    try:
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior_logprobs)
    except Exception:
        poison_peers(settings, process_group, mask.device)
        raise
    dist.all_reduce(table, group=process_group)
    bounds = bounds_from_table(table, settings, dtype=_working_dtype(ratio))
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
def signal_table(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    *,
    behavior_logprobs: Tensor | None = None,
) -> Tensor:  # [highs + lows + 1], float64
    """P at every candidate high, N at every candidate low, and the number of tokens with a signal.

        measure     P(high), over A > 0             N(low), over A < 0
        surrogate   sum w min(r, high) A            sum w max(r, low) |A|
        gradient    sum w r A [r < high]            sum w r |A| [r > low]

    Plain sums over tokens: add the tables of micro-batches, all-reduce those of ranks.
    """
    mask, behavior_logprobs = _checked(ratio, advantages, mask, settings, behavior_logprobs)
    if usable(mask):
        return table_parts(ratio, advantages, mask, settings, behavior_logprobs).sum(1)
    on_cpu = mask.device.type == "cpu"
    named = {"ratio": ratio, "advantages": advantages, "behavior_logprobs": behavior_logprobs}
    finite = on_cpu and all([check_finite(name, x, mask) for name, x in named.items() if x is not None])  # noqa: C419
    if on_cpu:
        check_not_negative("ratio", ratio, mask)
    dtype = _working_dtype(ratio)
    grids = _grids_of(settings, dtype, mask.device)
    flat = [x.flatten() for x in (ratio, advantages, mask)]
    flat_behavior = None if behavior_logprobs is None else behavior_logprobs.flatten()

    def parts(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, mask.numel(), size):
            part = slice(start, start + size)
            ratios, signal, chosen = flat[0][part].to(dtype), flat[1][part].to(dtype), flat[2][part]
            if flat_behavior is not None:  # in float64, where probabilities down to 1e-300 do not underflow
                signal = signal.double() * flat_behavior[part].double().exp()
            if finite:  # on CPU a product is several times faster than a select; without signal a ratio does no harm
                yield ratios, signal * chosen.view(torch.int8)
            else:
                yield torch.where(chosen, ratios, 0.0), torch.where(chosen, signal, 0.0)

    if on_cpu:
        return _binned_sums(parts(CPU_CHUNK), grids, settings.measure)
    return _compared_sums(parts(DEVICE_CHUNK), grids, settings.measure)


@torch.no_grad()
def bounds_from_table(table: Tensor, settings: ClipSettings, *, dtype: torch.dtype = torch.float32) -> ClipBounds:
    """The first candidate on the path whose positive share reaches the target, else the last one."""
    grids = _grids_of(settings, dtype, table.device)
    if table.shape != (grids.size,):
        raise ValueError(
            f"table has shape {tuple(table.shape)} but these settings give {(grids.size,)}: it was filled with other "
            "settings. Use one ClipSettings for signal_table and bounds_from_table."
        )
    if usable(table):
        return bounds_from_parts(table, settings, dtype)
    return _with_weight(_first_to_reach(table, settings, grids, dtype), settings)


def _first_to_reach(table: Tensor, settings: ClipSettings, grids: _Grids, dtype: torch.dtype) -> ClipBounds:
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
    poison = (table.sum() * 0).to(dtype)  # 0, or NaN where the table is not finite: never a plausible bound or share
    return ClipBounds(
        low=grids.low[grids.path_low[index]].squeeze(0).to(dtype) + poison,
        high=grids.high[grids.path_high[index]].squeeze(0).to(dtype) + poison,
        share=share[index].squeeze(0).to(dtype) + poison,
        share_at_start=share[0].to(dtype) + poison,
        share_at_end=share[-1].to(dtype) + poison,
        stop=stop.squeeze(0),
    )


def _checked(
    ratio: Tensor, advantages: Tensor, mask: Tensor, settings: ClipSettings, behavior_logprobs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The mask as bool, and the behaviour log-probs if they are weights."""
    check_shapes(mask, ratio=ratio, advantages=advantages, behavior_logprobs=behavior_logprobs)
    mask = check_mask(mask)
    if settings.weight == "none":
        return mask, None
    if behavior_logprobs is None:
        raise ValueError(
            "weight='rollout_prob' weighs each token by the probability it was sampled with, so it needs "
            "behavior_logprobs=. Pass them, or use weight='none'."
        )
    return mask, behavior_logprobs


def table_parts(
    ratio: Tensor,  # log-probs under the learner where log_ratio_limit is given
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    log_ratio_limit: float | None = None,
) -> Tensor:  # [highs + lows + 1, parts] float64
    """`signal_table` by one kernel, before the last sum: each part of the tokens has its own column.

    With `log_ratio_limit` the kernel computes the ratios itself and leaves out tokens past the limit.
    """
    from bapo.core.kernels.bounds import signal_partials

    grids = _grids_of(settings, _working_dtype(ratio), ratio.device)
    return signal_partials(
        ratio,
        advantages,
        mask,
        grids.low,
        grids.high,
        grids.thresholds,
        surrogate=settings.measure == "surrogate",
        weighted=settings.weight == "rollout_prob",
        behavior_logprobs=behavior_logprobs,
        log_ratio_limit=log_ratio_limit,
    )


def bounds_from_parts(
    parts: Tensor,  # a table, or one per column
    settings: ClipSettings,
    dtype: torch.dtype,
) -> ClipBounds:
    """`bounds_from_table` by one kernel, which adds up the parts and walks the path."""
    from bapo.core.kernels.bounds import choose_bounds

    grids = _grids_of(settings, dtype, parts.device)
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
    poison = (ratio * signal).sum(dtype=torch.float64) * 0  # a NaN ratio is never kept; it must not vanish
    return torch.where(total == 0, (signal == 0).all().double(), positive / total) + poison


def clip(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The ratio between two bounds, each a number or a tensor."""
    return torch.clip(ratio, low, high)  # type: ignore[arg-type]  # torch's stub knows one kind at a time


def fixed_bounds(ratio: Tensor, signal: Tensor, low: float, high: float) -> ClipBounds:
    """A given pair of bounds with the share (gradient measure) it leaves to positive tokens."""
    share = positive_share(ratio, signal, low, high).to(ratio.dtype)
    return ClipBounds(low=torch.full_like(share, low), high=torch.full_like(share, high), share=share)


@dataclass(frozen=True)
class _Grids:
    """The candidates of one path as tensors on one device."""

    low_step: float
    high_step: float
    low: Tensor  # [lows] float64
    high: Tensor  # [highs] float64
    thresholds: Tensor  # [lows + 1 + highs]: -low descending in size, 0, high ascending; see _binned_sums
    path_low: Tensor  # [candidates] index into low
    path_high: Tensor  # [candidates] index into high

    @property
    def cells(self) -> int:
        """Places in the CPU histogram."""
        return (2 * self.thresholds.numel() + 1) * LANES

    @property
    def size(self) -> int:
        """Length of a signal table: P at each high, N at each low, count of signed tokens."""
        return self.high.numel() + self.low.numel() + 1


def _grids_of(settings: ClipSettings, dtype: torch.dtype, device: torch.device) -> _Grids:
    """The grids do not depend on target, measure or weight: a target that moves finds them ready."""
    return _grids(settings.low, settings.high, settings.low_step, settings.high_step, settings.order, dtype, device)


@lru_cache(maxsize=64)
def _grids(
    low_range: tuple[float, float],
    high_range: tuple[float, float],
    low_step: float,
    high_step: float,
    order: Order,
    dtype: torch.dtype,
    device: torch.device,
) -> _Grids:
    """Built once per path and device, so that no call copies from the host."""
    settings = ClipSettings(low=low_range, high=high_range, low_step=low_step, high_step=high_step, order=order)
    low = torch.tensor(settings.low_grid, dtype=torch.float64, device="cpu")
    high = torch.tensor(settings.high_grid, dtype=torch.float64, device="cpu")
    path_low, path_high = torch.tensor(settings.path, device="cpu").unbind(1)
    exact = torch.cat([-low.flip(0), low.new_zeros(1), high])
    # A ratio of this dtype is >= the real threshold exactly if it is >= the threshold rounded up to this dtype.
    rounded = exact.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return _Grids(
        low_step=low_step,
        high_step=high_step,
        low=low.to(device),
        high=high.to(device),
        thresholds=torch.where(rounded.double() < exact, above, rounded).to(device),
        path_low=path_low.contiguous().to(device),
        path_high=path_high.contiguous().to(device),
    )


def _binned_sums(parts: Iterable[tuple[Tensor, Tensor]], grids: _Grids, measure: Measure) -> Tensor:
    """Sums by histogram: for CPUs, where a scatter is cheap and a pass per candidate is not.

    The signed ratio u = r * sign(A) puts both signs on one line, negative tokens left of 0, positive ones right of it.
    With thresholds -low and high on that line, a token is clipped by a candidate exactly if threshold <= u (on its own
    side of 0), so bin k, the tokens with k thresholds <= u, holds all that a candidate has to know.
    """
    lows, highs = grids.low.numel(), grids.high.numel()
    signed_tokens = torch.zeros(1, dtype=torch.float64, device="cpu")
    weighted_cells, plain_cells = torch.zeros(2, grids.cells, dtype=torch.float64, device="cpu")
    for ratio, signal in parts:
        sign = torch.sgn(signal).to(ratio.dtype)
        cells = _cells(ratio * sign, sign, grids)
        signal = signal.double()
        if measure == "surrogate":
            plain_cells.scatter_add_(0, cells, signal)
        weighted_cells.scatter_add_(0, cells, signal.mul_(ratio))
        signed_tokens += torch.dot(sign, sign)

    # Bins 0..lows hold negative tokens (0 where |r| is largest), the rest positive ones.
    weighted = _sum_by_bin(weighted_cells)
    negative = -weighted[: lows + 1].cumsum(0)[:lows].flip(0)
    positive = weighted[lows + 1 :].cumsum(0)[:highs]
    if measure == "surrogate":
        plain = _sum_by_bin(plain_cells)
        negative = negative + grids.low * -plain[1 : lows + 1].flip(0).cumsum(0)
        positive = positive + grids.high * plain[lows + 2 :].flip(0).cumsum(0).flip(0)
    return torch.cat([positive, negative, signed_tokens])


def _cells(signed_ratio: Tensor, sign: Tensor, grids: _Grids) -> Tensor:
    """Below threshold k is cell 2k, at it 2k + 1, above it 2k + 2; LANES places for each.

    The nearest threshold on the token's own side of 0 is found by arithmetic (right of 0 the first term is at its end,
    left of 0 the second one is), then compared with exactly. Neighbouring tokens add to different lanes of a cell,
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


def _compared_sums(parts: Iterable[tuple[Tensor, Tensor]], grids: _Grids, measure: Measure) -> Tensor:
    """Sums by comparing every token with every candidate: for accelerators, where atomics on few bins would queue."""
    lows = grids.low.numel()
    high_thresholds, low_thresholds = grids.thresholds[lows + 1 :, None], -grids.thresholds[:lows].flip(0)[:, None]
    table = torch.zeros(grids.size, dtype=torch.float64, device=grids.low.device)
    for ratio, signal in parts:
        weighted = ratio.double() * signal.double()

        def contribution(kept: Tensor, side: Tensor, bounds: Tensor) -> Tensor:
            total = torch.where(kept, weighted * side, 0.0).sum(1)  # noqa: B023
            if measure == "surrogate":
                total = total + bounds * torch.where(kept, 0.0, signal * side).sum(1, dtype=torch.float64)  # noqa: B023
            return total

        positive = contribution(ratio < high_thresholds, signal > 0, grids.high)
        negative = -contribution(ratio > low_thresholds, signal < 0, grids.low)
        signed_tokens = (signal != 0).sum(dtype=torch.float64).reshape(1)
        poison = weighted.sum() * 0  # a NaN or infinite ratio fails every comparison; it must not vanish from the sums
        table += torch.cat([positive, negative, signed_tokens]) + poison
    return table


def _working_dtype(tensor: Tensor) -> torch.dtype:
    """float64 stays; everything coarser is worked on in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
