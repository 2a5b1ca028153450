"""BAPO's clip bounds, solved exactly in one pass (arXiv:2510.18927, Algorithm 1).

The paper's search measures the positive share anew after every small move of a bound. But its path is fixed in advance:
high goes up to its end, then low does (or the other way round). The share at a candidate pair needs only P(high), the
signal of positive tokens, and N(low), that of negative ones. So both are summed at every candidate first, and the path
is walked afterwards:

    signal_table         tokens -> a vector of P at each high, N at each low       (tables of parts add up)
    bounds_from_table    table -> the first candidate on the path with P / (P + N) >= target_share

On CUDA each of the two is one kernel (`kernels/bounds.py`). The torch code here says what they compute; on CPU the sums
are taken by histogram (`sums.py`). Nothing here waits for the device: bounds stay 0-d tensors. The answer equals
the step-by-step loop's on every input, with comparisons and sums carried out as in float64.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core import kernels
from bapo.core.brake import braked, drift_of, drift_sums
from bapo.core.checks import (
    MAX_LOG_RATIO,
    check_finite,
    check_mask,
    check_not_empty,
    check_not_negative,
    check_shapes,
    check_uses,
    holds,
    working_dtype,
    zero_or_nan,
)
from bapo.core.settings import ClipSettings
from bapo.core.sums import CPU_CHUNK, DEVICE_CHUNK, Chunk, at_their_own_bound, binned_sums, compared_sums

LEAST_WEIGHT = 1e-12
"""The weight of negative tokens where no positive signal is left."""


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
    """Factor on the advantages of negative tokens, which corrects what the bounds could not (`weight_of_remainder`);
    None with remainder="leave"."""
    used_low: Tensor | float | None = None
    """The lower bound of tokens that were trained on before; None: `low`. A tensor where the brake sets it."""
    drift: Tensor | None = None
    """How far the negative tokens that the brake looks at have fallen on average; None without a brake."""

    def metrics(self, *, ends: bool = True) -> dict[str, Tensor]:
        """All that is known of the bounds, by the names it is logged under. `ends=False` leaves out `share_at_*`."""
        named: dict[str, Tensor | None] = {"clip_low": self.low, "clip_high": self.high, "share": self.share}
        if ends:
            named |= {"share_at_start": self.share_at_start, "share_at_end": self.share_at_end}
        named |= {"stop": self.stop, "negative_weight": self.negative_weight, "drift": self.drift}
        if isinstance(self.used_low, Tensor):
            named["used_low"] = self.used_low
        return {name: value for name, value in named.items() if value is not None}


def solve_bounds(
    ratio: Tensor,  # [tokens] or [sequences, tokens]: pi_theta / pi_behavior
    advantages: Tensor,  # same shape
    mask: Tensor,  # same shape; which tokens count
    settings: ClipSettings,
    *,
    behavior_logprobs: Tensor | None = None,  # same shape; needed for weight="rollout_prob"
    uses: Tensor | None = None,  # same shape, integers: how often a token was trained on; needed for used_low, brake
    process_group: dist.ProcessGroup | None = None,  # sum the signal over these ranks, with one all-reduce
) -> ClipBounds:
    """The bounds for one update, from that update's own tokens (Algorithm 1 of arXiv:2510.18927)."""
    try:
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior_logprobs, uses=uses)
        if process_group is None:
            check_not_empty(mask, "Skip this update, or check the code that builds the mask.")
    except Exception:
        if process_group is not None:
            poison_peers(settings, process_group, mask.device)
        raise
    return solved_bounds(table, settings, process_group, dtype=working_dtype(ratio))


def solved_bounds(
    table: Tensor,
    settings: ClipSettings,
    process_group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype,
) -> ClipBounds:
    """The bounds of a table, or of those of all ranks. A rank on CPU raises if another one has bad input."""
    if process_group is None:
        return bounds_from_table(table, settings, dtype=dtype)
    dist.all_reduce(table, group=process_group)
    bounds = bounds_from_table(table, settings, dtype=dtype)
    if table.device.type == "cpu" and bool(bounds.share.isnan()):
        raise ValueError(
            "the signal summed over process_group is not finite, although this rank's is: another rank got bad input. "
            "Its own error names the sequence."
        )
    return bounds


def bounds_over_ranks(
    tables: Iterable[Tensor],
    settings: ClipSettings,
    *,
    device: torch.device | int | str,
    process_group: dist.ProcessGroup | None,
) -> ClipBounds:
    """Bounds from the tables of all parts of an update on all ranks: one all-reduce. A rank may have no part at all."""
    table = torch.zeros(settings.table_size, dtype=torch.float64, device=device)
    for part in tables:
        table += part
    dist.all_reduce(table, group=process_group)
    return bounds_from_table(table, settings)


def poison_peers(settings: ClipSettings, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Join the all-reduce with NaN, so that peers learn of this rank's error instead of waiting for it."""
    table = torch.full((settings.table_size,), math.nan, dtype=torch.float64, device=device)
    dist.all_reduce(table, group=process_group)


@torch.no_grad()
def signal_table(
    ratio: Tensor,  # [tokens] or [sequences, tokens]: r = pi_theta / pi_behavior
    advantages: Tensor,  # same shape: A
    mask: Tensor,  # same shape; which tokens count
    settings: ClipSettings,
    *,
    behavior_logprobs: Tensor | None = None,  # same shape; w = exp of them for weight="rollout_prob", else w = 1
    uses: Tensor | None = None,  # same shape, integers: how often a token was trained on; needed for used_low, brake
) -> Tensor:  # [settings.table_size], float64
    """P at every candidate high, N at every candidate low, the number of tokens with a signal, and the brake's sums.

        measure     P(high), over A > 0             N(low), over A < 0
        surrogate   sum w min(r, high) A            sum w max(r, low) |A|
        gradient    sum w r A [r < high]            sum w r |A| [r > low]

    With `used_low`, negative tokens that were trained on before have that bound in place of every candidate low. The
    brake does not change how they count.
    Plain sums over tokens: add the tables of micro-batches, all-reduce those of ranks.
    """
    check_shapes(mask, ratio=ratio, advantages=advantages, behavior_logprobs=behavior_logprobs)
    check_uses(uses, mask, settings.rule_of_used)
    mask = check_mask(mask)
    if settings.weight == "none":
        behavior_logprobs = None
    elif behavior_logprobs is None:
        raise ValueError(
            "weight='rollout_prob' weighs each token by the probability it was sampled with, so it needs "
            "behavior_logprobs=. Pass them, or use weight='none'."
        )
    fill = table_by_kernel if kernels.usable(mask) else table_by_torch
    return fill(ratio, advantages, mask, settings, behavior_logprobs, uses)


def table_by_kernel(
    ratio: Tensor,  # log-probs under the learner where log_ratio_limit is given
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,
    uses: Tensor | None,
    log_ratio_limit: float | None = None,
) -> Tensor:  # [settings.table_size], float64
    """The signal table by a kernel. With `log_ratio_limit` it computes the ratios, and leaves out tokens past it."""
    from bapo.core.kernels.bounds import signal_partials

    assert log_ratio_limit is None or behavior_logprobs is not None, "ratios of log-probs need both policies"
    grids = grids_of(settings, working_dtype(ratio), ratio.device)
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
        uses=uses,
        used_low=grids.used_low,
        brake=settings.brake is not None,
        log_ratio_limit=log_ratio_limit,
    ).sum(1)


def table_by_torch(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: ClipSettings,
    behavior_logprobs: Tensor | None,  # only where they are weights
    uses: Tensor | None,
    both: tuple[Tensor, Tensor] | None = None,  # log-probs under the learner and the sampler, where they are known
) -> Tensor:  # [settings.table_size], float64
    """The signal table in torch operations."""
    on_cpu = mask.device.type == "cpu"
    named = {"ratio": ratio, "advantages": advantages, "behavior_logprobs": behavior_logprobs}
    # A list, so that every one of them is checked.
    finite = on_cpu and all([check_finite(name, x, mask) for name, x in named.items() if x is not None])  # noqa: C419
    if on_cpu:
        check_not_negative("ratio", ratio, mask)
    dtype = working_dtype(ratio)
    grids, surrogate = grids_of(settings, dtype, mask.device), settings.measure == "surrogate"
    flat_ratio, flat_advantages, flat_mask = ratio.flatten(), advantages.flatten(), mask.flatten()
    flat_behavior = None if behavior_logprobs is None else behavior_logprobs.flatten()
    negative = flat_mask  # those with a bound of their own, or that the brake looks at
    if settings.used_low is not None or settings.brake is not None:
        negative = holds(torch.lt, flat_advantages, 0)
        negative = negative if uses is None else negative & uses.flatten().bool()

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
            tokens = Chunk(ratios, ratios, signal)
            yield (
                tokens
                if settings.used_low is None
                else at_their_own_bound(tokens, negative[chunk], settings.used_low, surrogate, settings.low[1])
            )

    candidates = grids.low, grids.high, grids.thresholds
    if on_cpu:
        table = binned_sums(chunks(CPU_CHUNK), *candidates, steps=grids.steps, surrogate=surrogate)
    else:
        table = compared_sums(chunks(DEVICE_CHUNK), *candidates, surrogate=surrogate)
    if settings.brake is None:
        return table
    return torch.cat([table, _drift_sums_of(flat_ratio, both, negative & flat_mask)])


def _drift_sums_of(ratio: Tensor, both: tuple[Tensor, Tensor] | None, looked_at: Tensor) -> Tensor:
    """The brake's sums over these tokens, without those past the ratio limit."""
    if both is not None:
        return drift_sums(both[0].detach().flatten(), both[1].flatten(), looked_at)
    log_ratio = torch.where(looked_at, ratio, 1.0).double().log()
    looked_at = looked_at & ~(log_ratio.abs() >= MAX_LOG_RATIO)
    return drift_sums(torch.where(looked_at, log_ratio, 0.0), torch.zeros_like(log_ratio), looked_at)


@torch.no_grad()
def bounds_from_table(
    table: Tensor,  # [settings.table_size], float64
    settings: ClipSettings,
    *,
    dtype: torch.dtype = torch.float32,
) -> ClipBounds:
    """The first candidate on the path whose positive share reaches the target, else the last one."""
    size = grids_of(settings, dtype, table.device).table_size
    if table.shape != (size,):
        raise ValueError(
            f"table has shape {tuple(table.shape)} but these settings give ({size},): it was filled with other "
            "settings. Use one ClipSettings for signal_table and bounds_from_table."
        )
    walk = walked_by_kernel if kernels.usable(table) else first_to_reach
    bounds = walk(table, settings, dtype)
    if settings.remainder == "weigh":
        bounds = replace(bounds, negative_weight=weight_of_remainder(bounds.share, settings.target_share))
    return bounds if settings.used_low is None else replace(bounds, used_low=settings.used_low)


def walked_by_kernel(table: Tensor, settings: ClipSettings, dtype: torch.dtype) -> ClipBounds:
    """The walk as one kernel."""
    from bapo.core.kernels.bounds import choose_bounds

    grids = grids_of(settings, dtype, table.device)
    found, brake = choose_bounds(
        table,
        grids.low,
        grids.high,
        target_share=settings.target_share,
        high_first=settings.order == "high_first",
        dtype=dtype,
        brake=settings.brake,
    )
    return ClipBounds(*found) if brake is None else _raised(ClipBounds(*found), settings, *brake)


def first_to_reach(table: Tensor, settings: ClipSettings, dtype: torch.dtype) -> ClipBounds:
    """The walk in torch operations: the shares of all candidates at once, and the first that is large enough."""
    grids = grids_of(settings, dtype, table.device)
    highs, lows = grids.high.numel(), grids.low.numel()
    at_high, at_low, signed_tokens, brake_sums = torch.split(table, [highs, lows, 1, len(table) - highs - lows - 1])
    positive, negative = at_high[grids.path_high], at_low[grids.path_low]
    share = share_of_sums(positive, negative, signed_tokens)
    failed = ~(share >= settings.target_share)
    index = failed.cumprod(0).sum().clamp(max=len(share) - 1).reshape(1)
    raised_high = grids.path_high[index] > grids.path_high[index - 1]
    stop = torch.where(raised_high, StopReason.RAISING_HIGH, StopReason.RAISING_LOW)
    stop = torch.where(index == 0, StopReason.START, stop)
    stop = torch.where(failed.all(), StopReason.END, stop)
    stop = torch.where(signed_tokens == 0, StopReason.NO_SIGNAL, stop)
    bad = zero_or_nan(table.sum()).to(dtype)  # from a table that is not finite comes no plausible bound or share
    low = grids.low[grids.path_low[index]].squeeze(0)
    bounds = ClipBounds(
        low=low.to(dtype) + bad,
        high=grids.high[grids.path_high[index]].squeeze(0).to(dtype) + bad,
        share=share[index].squeeze(0).to(dtype) + bad,
        share_at_start=share[0].to(dtype) + bad,
        share_at_end=share[-1].to(dtype) + bad,
        stop=stop.squeeze(0),
    )
    return bounds if settings.brake is None else with_brake(bounds, settings, drift_of(brake_sums) + bad, low + bad)


def share_of_sums(positive: Tensor, negative: Tensor, signed_tokens: Tensor) -> Tensor:
    """P / (P + N). All clipped away: 0. No signal at all: 1, there is nothing to repair. NaN stays NaN."""
    total = positive + negative
    return torch.where(total == 0, (signed_tokens == 0).to(total.dtype), positive / total)


def with_brake(bounds: ClipBounds, settings: ClipSettings, drift: Tensor, low: Tensor) -> ClipBounds:
    """The bounds with the brake on at this drift. `low`: the lower one before it was rounded."""
    assert settings.brake is not None
    return _raised(bounds, settings, braked(low, drift, settings.brake), drift)


def _raised(bounds: ClipBounds, settings: ClipSettings, low: Tensor, drift: Tensor) -> ClipBounds:
    """The bounds with the lower one that the brake sets: of used tokens, or of all."""
    dtype, field = bounds.low.dtype, "low" if settings.brake_on == "all" else "used_low"
    return replace(bounds, drift=drift.to(dtype), **{field: low.to(dtype)})


def weight_of_remainder(share: Tensor, target_share: float) -> Tensor:
    """The factor w <= 1 on negative tokens with which positive ones hold the target, P / (P + w N) = target:

        w = min(1, P (1 - target) / (N target)) = min(1, share (1 - target) / ((1 - share) target))

    It is 1 where the share is reached already. Where no positive signal is left it is tiny, but not 0, so that negative
    tokens keep their sign.
    """
    missing = (share * (1 - target_share) / ((1 - share) * target_share)).clamp(min=LEAST_WEIGHT)
    return torch.where(share >= target_share, torch.ones_like(share), missing)


@dataclass(frozen=True)
class Grids:
    """The candidates of one path as tensors on one device."""

    steps: tuple[float, float]  # between candidates, of low and of high
    low: Tensor  # [lows] float64
    high: Tensor  # [highs] float64
    thresholds: Tensor  # [lows + 1 + highs] of the ratios' dtype: -low, 0, high, ascending; what ratios compare with
    path_low: Tensor  # [candidates] index into low
    path_high: Tensor  # [candidates] index into high
    used_low: Tensor | None  # 0-d float64: in place of every low, for tokens that were trained on before
    table_size: int


@lru_cache(maxsize=64)
def grids_of(settings: ClipSettings, dtype: torch.dtype, device: torch.device) -> Grids:
    """The grids of these settings. They are kept, so that no call copies from the host."""
    used_low = settings.used_low
    low = torch.tensor(settings.low_grid, dtype=torch.float64, device="cpu")
    high = torch.tensor(settings.high_grid, dtype=torch.float64, device="cpu")
    path_low, path_high = torch.tensor(settings.path, device="cpu").unbind(1)
    exact = torch.cat([-low.flip(0), low.new_zeros(1), high])
    # A ratio of this dtype is >= the real threshold exactly if it is >= the threshold rounded up to this dtype.
    rounded = exact.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return Grids(
        steps=(settings.low_step, settings.high_step),
        low=low.to(device),
        high=high.to(device),
        thresholds=torch.where(rounded.double() < exact, above, rounded).to(device),
        path_low=path_low.contiguous().to(device),
        path_high=path_high.contiguous().to(device),
        used_low=None if used_low is None else torch.tensor(used_low, dtype=torch.float64, device="cpu").to(device),
        table_size=settings.table_size,
    )
