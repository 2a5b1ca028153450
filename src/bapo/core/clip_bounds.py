"""ClipBounds: a pair of bounds, the share of the signal it leaves to positive tokens, and the walk that finds it.

Torch code throughout. `bounds.py` solves bounds with it, or with the kernels that compute the same (`dispatch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from bapo.core.checks import compared
from bapo.core.nan import zero_or_nan
from bapo.core.settings import ClipSettings, Measure
from bapo.core.table import grids_of

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
    used_low: float | None = None
    """The lower bound of tokens that were trained on before; None: `low`."""

    def metrics(self, *, ends: bool = True) -> dict[str, Tensor]:
        """All that is known of the bounds, by the names it is logged under. `ends=False` leaves out `share_at_*`."""
        named: dict[str, Tensor | None] = {"clip_low": self.low, "clip_high": self.high, "share": self.share}
        if ends:
            named |= {"share_at_start": self.share_at_start, "share_at_end": self.share_at_end}
        named |= {"stop": self.stop, "negative_weight": self.negative_weight}
        return {name: value for name, value in named.items() if value is not None}


def first_to_reach(table: Tensor, settings: ClipSettings, dtype: torch.dtype) -> ClipBounds:
    """The first candidate on the path whose positive share reaches the target, else the last one: all at once."""
    grids = grids_of(settings, dtype, table.device)
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


def weight_of_remainder(share: Tensor, target_share: float) -> Tensor:
    """The factor w <= 1 on negative tokens with which positive ones hold the target, P / (P + w N) = target:

        w = min(1, P (1 - target) / (N target)) = min(1, share (1 - target) / ((1 - share) target))

    It is 1 where the share is reached already. Where no positive signal is left it is tiny, but not 0, so that negative
    tokens keep their sign.
    """
    missing = (share * (1 - target_share) / ((1 - share) * target_share)).clamp(min=LEAST_WEIGHT)
    return torch.where(share >= target_share, torch.ones_like(share), missing)


def as_settled(bounds: ClipBounds, settings: ClipSettings) -> ClipBounds:
    """The bounds with what the settings add to them: the bound of used tokens, and the weight on negative ones."""
    weight = None
    if settings.remainder == "weigh":
        weight = weight_of_remainder(bounds.share, settings.target_share)
    if weight is None and settings.used_low is None:
        return bounds
    return replace(bounds, negative_weight=weight, used_low=settings.used_low)


def low_of_each(low: Tensor | float, used: Tensor | None, used_low: float | None, dtype: torch.dtype) -> Tensor | float:
    """The lower bound of each token: `used_low` where it was trained on before, else `low`.

    As the larger of the two times 1 or 0, and then at least the smaller: on CPU several times faster than a select, and
    as exact.
    """
    if used_low is None:
        return low
    assert used is not None, "used_low needs uses"
    if isinstance(low, Tensor):
        takes_larger = used.view(torch.int8) ^ (low > used_low).view(torch.int8)
        return takes_larger.to(dtype).mul_(low.clamp(min=used_low)).clamp_(min=low.clamp(max=used_low))
    ones = (~used if low > used_low else used).view(torch.int8).to(dtype)
    larger = ones if max(low, used_low) == 1 else ones.mul_(max(low, used_low))
    return larger.clamp_(min=min(low, used_low))


@torch.no_grad()
def positive_share(
    ratio: Tensor, signal: Tensor, low: Tensor | float, high: Tensor | float, measure: Measure = "gradient"
) -> Tensor:  # 0-d float64
    """P / (P + N) at one pair of bounds; `signal` is w * A with masked tokens set to 0. No signal at all: 1."""
    positive = compared(torch.gt, signal, 0)
    kept = (positive & compared(torch.lt, ratio, high)) | (~positive & compared(torch.gt, ratio, low))
    counted = ratio * kept.view(torch.int8)
    if measure == "surrogate":
        counted = counted + clip(ratio, low, high) * (~kept).view(torch.int8)
    return share_of(counted * signal, signal)


@torch.no_grad()
def share_of(contribution: Tensor, signal: Tensor) -> Tensor:  # 0-d float64
    """P / (P + N) of what each token contributes; 0 where nothing is left of the signal, 1 where there was none."""
    positive = contribution.clamp(min=0).sum(dtype=torch.float64)
    negative = -contribution.clamp(max=0).sum(dtype=torch.float64)
    total = positive + negative
    return torch.where(total == 0, (signal.count_nonzero() == 0).double(), positive / total)


def clip(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The ratio between two bounds, each a number or a tensor; `high` where they are the wrong way round."""
    if isinstance(low, Tensor) == isinstance(high, Tensor):
        return torch.clip(ratio, low, high)  # type: ignore[arg-type]  # torch's stub knows one kind at a time
    pair = (
        x if isinstance(x, Tensor) else torch.full((), x, dtype=ratio.dtype, device=ratio.device) for x in (low, high)
    )
    return torch.clip(ratio, *pair)
