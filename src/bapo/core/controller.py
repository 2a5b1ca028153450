"""BoundController: bounds for trainers whose loss hook sees a part of an update, and never the whole.

Tables add up, so a controller keeps those of the last `window` calls, including the present one, and solves from their
sum. With as many calls in the window as an update has parts, the bounds rest on an update's worth of tokens: those of
the present part and of the parts just before it. That is not scope `update`, because the first part of an update is
clipped by bounds from the previous update's parts; but the bounds are as little noisy as those of a whole update.

    controller = BoundController(ClipSettings(), window=8)
    for each part: controller.policy_loss(logprobs, behavior_logprobs, advantages, mask, denominator=…).loss.backward()

A window of 1 is scope `microbatch`. Ranks know nothing of each other unless `all_ranks` says so: then every call is one
all-reduce over torch.distributed's default group, which waits until every rank has made its call. Trainers that give
ranks different numbers of loss calls would wait forever.
"""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core.bounds import ClipBounds, StopReason, bounds_from_table, poison_peers
from bapo.core.loss import PolicyLoss, policy_loss, update_table
from bapo.core.settings import ClipSettings


class BoundController:
    """The bounds of each loss call, from the signal tables of the last `window` calls."""

    def __init__(self, settings: ClipSettings, window: int = 1, *, all_ranks: bool = False) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"window={window!r} must be a whole number of loss calls, at least 1. Use the number of micro-batches "
                "of an update, or 1 to solve each call on its own."
            )
        self.settings = settings
        self.all_ranks = all_ranks
        self._tables: deque[Tensor] = deque(maxlen=window)

    def bounds(self, table: Tensor) -> ClipBounds:
        """Bounds from this call's table and those still in the window.

        A table that is not finite makes this call's bounds NaN, and counts as an empty one from then on.
        """
        table = table.detach()
        if self.all_ranks and dist.is_initialized():
            table = table.clone()
            dist.all_reduce(table)
        self._tables.append(table)
        bounds = bounds_from_table(torch.stack(tuple(self._tables)).sum(0), self.settings)
        self._tables[-1] = torch.where(table.isfinite().all(), table, 0)  # on every device, without a host read
        return bounds

    def bounds_of(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        uses: Tensor | None = None,
    ) -> ClipBounds:
        """Bounds from these tokens and the window."""
        try:
            table = update_table(logprobs, behavior_logprobs, advantages, mask, self.settings, uses=uses)
        except Exception:
            if self.all_ranks and dist.is_initialized():
                assert dist.group.WORLD is not None
                poison_peers(self.settings, dist.group.WORLD, mask.device)
            raise
        return self.bounds(table)

    def policy_loss(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        denominator: Tensor | float,
        uses: Tensor | None = None,
        dual_clip: float | None = None,
    ) -> PolicyLoss:
        """`bapo.policy_loss` of one part of an update, at the bounds of the window."""
        bounds = self.bounds_of(logprobs, behavior_logprobs, advantages, mask, uses=uses)
        return policy_loss(
            logprobs,
            behavior_logprobs,
            advantages,
            mask,
            bounds=bounds,
            denominator=denominator,
            uses=uses,
            dual_clip=dual_clip,
        )


def averageable(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A loss call's metrics under `bapo/`, fit for a mean over calls: the reason `stop` becomes a 0 or 1 for each."""
    named = {f"bapo/{name}": value for name, value in metrics.items() if name != "stop"}
    if "stop" in metrics:
        named |= {f"bapo/stop/{reason.name.lower()}": (metrics["stop"] == reason).float() for reason in StopReason}
    return named


def as_numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """`averageable` as floats, with one host read."""
    return floats_of(averageable(metrics))


def floats_of(named: Mapping[str, Tensor]) -> dict[str, float]:
    """0-d tensors as floats, with one host read."""
    return dict(zip(named, torch.stack([value.double() for value in named.values()]).tolist(), strict=True))
