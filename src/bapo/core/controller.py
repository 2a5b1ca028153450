"""BoundController: bounds for trainers whose loss hook sees a part of an update, and never the whole.

Tables add up, so a controller keeps those of the last `window` calls, the present one included, and solves from their
sum. With as many calls in the window as an update has parts, the bounds rest on an update's worth of tokens: the
present part's, and of the parts before it the ones trained on most recently. That is not scope `update` (the first part
of an update is clipped by what the last update's parts said), but its noise is that of an update and not of a part.

    controller = BoundController(ClipSettings(), window=8)
    for each part: bounds = controller.bounds(update_table(logprobs, behavior_logprobs, advantages, mask, settings))

A window of 1 is scope `microbatch`. Nothing is shared between ranks, so there is no collective to wait for.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds, bounds_from_table
from bapo.core.settings import ClipSettings


class BoundController:
    """The bounds of each loss call, from the signal tables of the last `window` calls."""

    def __init__(self, settings: ClipSettings, window: int = 1) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"window={window!r} must be a whole number of loss calls, at least 1. Use the number of micro-batches "
                "of an update, or 1 to solve each call on its own."
            )
        self.settings = settings
        self._tables: deque[Tensor] = deque(maxlen=window)

    def bounds(self, table: Tensor) -> ClipBounds:
        """Bounds from this call's table and those still in the window. A table that is not finite is not kept."""
        self._tables.append(table.detach())
        bounds = bounds_from_table(torch.stack(tuple(self._tables)).sum(0), self.settings)
        if table.device.type == "cpu" and not bool(table.isfinite().all()):
            self._tables.pop()
        return bounds
