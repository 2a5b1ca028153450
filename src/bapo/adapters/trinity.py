"""BAPO inside Trinity-RFT: a `PolicyLossFn` named by its dotted path.

    algorithm:
      policy_loss_fn: bapo.adapters.trinity.BapoPolicyLossFn
      policy_loss_fn_args: {preset: weak-model, window: 8}

Trinity calls a policy loss once per micro-batch, with no sign of where an update begins, and no process group. So the
bounds come from the last `window` calls on this rank (`bapo.core.controller`); averaging stays Trinity's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bapo.adapters.shared import not_importable, refuse_uses, settings_of
from bapo.core.controller import BoundController, averageable, floats_of
from bapo.core.entropy_rule import clip_statistics
from bapo.core.loss import clipped_at, update_table

TESTED_VERSIONS = "0.6.0"

try:
    from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
    from trinity.algorithm.utils import aggregate_loss
except ImportError as error:
    raise not_importable("trinity", "Trinity-RFT", TESTED_VERSIONS, "trinity-rft", error) from error

__all__ = ["TESTED_VERSIONS", "BapoPolicyLossFn"]


class BapoPolicyLossFn(PolicyLossFn):
    """The clipped surrogate at bounds solved from the last `window` micro-batches (arXiv:2510.18927)."""

    def __init__(
        self,
        backend: str = "verl",
        window: int = 1,
        dual_clip: float | None = None,
        loss_agg_mode: str = "token-mean",
        **settings: Any,  # of `settings_of`: objective, preset, and fields of ClipSettings
    ) -> None:
        super().__init__(backend=backend)
        try:
            clip_settings = settings_of(**settings)
            refuse_uses(clip_settings, "Trinity tells a policy loss neither the epoch nor the use_count")
        except ValueError as error:
            raise ValueError(f"policy_loss_fn_args: {error}") from None
        self.controller = BoundController(clip_settings, window)
        self.dual_clip = dual_clip
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self,
        logprob: Tensor,  # [sequences, tokens] under the learner now; carries grad
        old_logprob: Tensor,  # same shape; under the policy that sampled
        action_mask: Tensor,  # same shape
        advantages: Tensor,  # same shape
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """L_t = -min(r_t A_t, clip(r_t, low, high) A_t), averaged by Trinity's `aggregate_loss`."""
        mask = action_mask.bool()
        table = update_table(logprob, old_logprob, advantages, mask, self.controller.settings)
        bounds = self.controller.bounds(table)
        clipped = clipped_at(bounds, logprob, old_logprob, advantages, mask, dual_clip=self.dual_clip)
        loss = aggregate_loss(clipped.loss, mask, loss_agg_mode=self.loss_agg_mode)
        metrics = averageable({**bounds.metrics(ends=False), **clip_statistics(clipped.tokens, clipped.retained)})
        return loss, floats_of({**metrics, "pg_loss": loss.detach()})

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """What Trinity starts from before it reads `policy_loss_fn_args`."""
        return {"loss_agg_mode": "token-mean", "window": 1}
