"""BAPO's clip bounds, solved exactly in one pass (arXiv:2510.18927, Algorithm 1).

The paper's search re-measures the positive share after every small move of a bound. But its path is fixed in advance:
high goes up to its end, then low does (or the other way round). So the signal is summed at every candidate first, and
the path is walked afterwards:

    signal_table         tokens -> a vector of P at each high, N at each low       (tables of parts add up)
    bounds_from_table    table -> the first candidate on the path with P / (P + N) >= target_share

Each of the two is one kernel on CUDA and torch code elsewhere; `dispatch.py` chooses, `table.py` and `clip_bounds.py`
have the torch code. Nothing here waits for the device: bounds stay 0-d tensors. The answer equals the step-by-step
loop's on every input, with comparisons and sums carried out as in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core import dispatch
from bapo.core.checks import check_not_empty, working_dtype
from bapo.core.clip_bounds import ClipBounds, StopReason, as_settled
from bapo.core.settings import ClipSettings
from bapo.core.table import grids_of

__all__ = [
    "ClipBounds",
    "StopReason",
    "bounds_from_parts",
    "bounds_from_table",
    "bounds_over_ranks",
    "poison_peers",
    "signal_table",
    "solve_bounds",
]


@torch.no_grad()
def signal_table(
    ratio: Tensor,  # [tokens] or [sequences, tokens]: r = pi_theta / pi_behavior
    advantages: Tensor,  # same shape: A
    mask: Tensor,  # same shape; which tokens count
    settings: ClipSettings,
    *,
    behavior_logprobs: Tensor | None = None,  # same shape; w = exp of them for weight="rollout_prob", else w = 1
    uses: Tensor | None = None,  # same shape, integers: how often a token was trained on; needed for used_low
) -> Tensor:  # [highs + lows + 1], float64
    """P at every candidate high, N at every candidate low, and the number of tokens with a signal.

        measure     P(high), over A > 0             N(low), over A < 0
        surrogate   sum w min(r, high) A            sum w max(r, low) |A|
        gradient    sum w r A [r < high]            sum w r |A| [r > low]

    With `used_low`, negative tokens that were trained on before have that bound in place of every candidate low.
    Plain sums over tokens: add the tables of micro-batches, all-reduce those of ranks.
    """
    return dispatch.summed(dispatch.parts_of_ratios(ratio, advantages, mask, settings, behavior_logprobs, uses))


def solve_bounds(
    ratio: Tensor,  # [tokens] or [sequences, tokens]: pi_theta / pi_behavior
    advantages: Tensor,  # same shape
    mask: Tensor,  # same shape; which tokens count
    settings: ClipSettings,
    *,
    behavior_logprobs: Tensor | None = None,  # same shape; needed for weight="rollout_prob"
    uses: Tensor | None = None,  # same shape, integers: how often a token was trained on; needed for used_low
    process_group: dist.ProcessGroup | None = None,  # sum the signal over these ranks, with one all-reduce
) -> ClipBounds:
    """The bounds for one update, from that update's own tokens (Algorithm 1 of arXiv:2510.18927)."""
    if process_group is None:
        if dispatch.usable(mask):
            return dispatch.solved_by_kernel(ratio, advantages, mask, settings, behavior_logprobs, uses)
        parts = dispatch.parts_of_ratios(ratio, advantages, mask, settings, behavior_logprobs, uses)
        if mask.device.type == "cpu" and not parts[-1].any():
            check_not_empty(mask, "Skip this update, or check the code that builds the mask.")
        return bounds_from_parts(parts, settings, working_dtype(ratio))
    try:
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior_logprobs, uses=uses)
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
def bounds_from_table(table: Tensor, settings: ClipSettings, *, dtype: torch.dtype = torch.float32) -> ClipBounds:
    """The first candidate on the path whose positive share reaches the target, else the last one."""
    size = (grids_of(settings, dtype, table.device).size,)  # kept ready, unlike settings.table_size
    if table.shape != size:
        raise ValueError(
            f"table has shape {tuple(table.shape)} but these settings give {size}: it was filled with other settings. "
            "Use one ClipSettings for signal_table and bounds_from_table."
        )
    return bounds_from_parts(table, settings, dtype)


@torch.no_grad()
def bounds_from_parts(parts: Tensor, settings: ClipSettings, dtype: torch.dtype) -> ClipBounds:
    """`bounds_from_table` of one table, or of the sum of a table per column."""
    return as_settled(dispatch.choose_bounds(parts, settings, dtype), settings)
