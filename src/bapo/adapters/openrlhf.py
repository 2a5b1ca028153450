"""BAPO inside OpenRLHF: its `PolicyLoss`, with two epsilons that are chosen in every call.

OpenRLHF has no registry of losses: its actor builds a `PolicyLoss` by name. docs/adapters/openrlhf.md has the patch
that puts `policy_loss(objective="brake", window=8)` there instead. Nothing of the loss is copied: `forward` solves
the bounds, sets the epsilons and calls OpenRLHF's own. Averaging, dual clip, KL and entropy stay where they were.

The actor calls its loss once per micro-batch and follows every call by a collective, so ranks are in step and tables
can be summed over them (`all_ranks`); over an update's micro-batches `window` keeps them (`bapo.core.controller`).

With the brake and with `used_low`, the lower bound is another one from the second epoch on. The actor trains on its
whole buffer in every epoch and then clears it, so the number of the epoch is how often each token was trained on: the
patch sets `uses`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from bapo.adapters.shared import DEFAULT_EPSILON, RatioTo, for_clamp, ignored_epsilons, not_importable, settings_of
from bapo.core.controller import BoundController, averageable
from bapo.core.settings import refuse_weighing, require_choice

TESTED_VERSIONS = "0.11.2"

try:
    from openrlhf.models.loss import PolicyLoss
except ImportError as error:
    raise not_importable("openrlhf", "OpenRLHF", TESTED_VERSIONS, "openrlhf", error) from error

__all__ = ["TESTED_VERSIONS", "BapoPolicyLoss", "policy_loss"]


class BapoPolicyLoss(PolicyLoss):
    """OpenRLHF's `PolicyLoss` at bounds solved from the last `window` micro-batches (arXiv:2510.18927)."""

    clip_eps_low: Tensor | float
    clip_eps_high: Tensor | float
    metrics: dict[str, Tensor]
    """The last call's bounds and share under `bapo/`, because OpenRLHF's fixed return value has no place for them."""
    uses: int | None
    """How often the tokens of the next calls were trained on before; only read with the brake and `used_low`."""

    def __init__(
        self,
        *args: Any,  # OpenRLHF's
        controller: BoundController,
        ratio_to: RatioTo = "rollout",
        **kwargs: Any,  # OpenRLHF's
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.policy_loss_type != "ppo":
            raise ValueError(
                f"actor.policy_loss_type={self.policy_loss_type!r} has one ratio per response, but BAPO balances "
                "tokens by their own. Set --actor.policy_loss_type ppo."
            )
        if (self.clip_eps_low, self.clip_eps_high) != (DEFAULT_EPSILON, DEFAULT_EPSILON):
            given = f"actor.eps_clip_low_high={self.clip_eps_low} {self.clip_eps_high}"
            raise ignored_epsilons(given, "low= and high= of policy_loss")
        refuse_weighing(controller.settings, "OpenRLHF")
        self.controller = controller
        self.ratio_to = ratio_to
        self.metrics = {}
        self.uses = None

    def forward(
        self,
        log_probs: Tensor,  # [sequences, tokens] under the learner now; carries grad
        old_log_probs: Tensor,  # same shape; recomputed by OpenRLHF's actor
        advantages: Tensor,  # same shape
        action_mask: Tensor,  # same shape
        rollout_log_probs: Tensor | None = None,  # same shape; under the policy that sampled
        **kwargs: Any,
    ) -> Any:
        """What OpenRLHF's own `forward` returns, clipped at this call's bounds."""
        if self.ratio_to == "rollout":
            if rollout_log_probs is None:
                raise ValueError(
                    "OpenRLHF keeps the log-probs of the policy that sampled only where its correction is on. Set "
                    "--algo.advantage.is_correction_level token (with ratios to that policy all its weights are 1), or "
                    "policy_loss(ratio_to='old') to take the ones the actor recomputes."
                )
            old_log_probs = rollout_log_probs
        mask = action_mask.bool()
        bounds = self.controller.bounds_of(log_probs, old_log_probs, advantages, mask, uses=self._uses_of(mask))
        low = bounds.low
        if used := bounds.used_low is not None and bool(self.uses):
            low = torch.zeros_like(low) + bounds.used_low
        self.clip_eps_low = 1 - for_clamp(low, used=used, dtype=log_probs.dtype)
        self.clip_eps_high = bounds.high - 1
        self.metrics = averageable(bounds.metrics(ends=False))
        return super().forward(
            log_probs, old_log_probs, advantages, action_mask, rollout_log_probs=rollout_log_probs, **kwargs
        )

    def _uses_of(self, mask: Tensor) -> Tensor | None:
        """The uses of each token, if there is a bound that needs them."""
        rule = self.controller.settings.rule_of_used
        if rule is None:
            return None
        if self.uses is None:
            raise ValueError(
                f"policy_loss({rule}) has to know the epoch, but nobody has set `uses`. Apply the whole "
                "patch of docs/adapters/openrlhf.md, which sets it in the actor's loop over epochs."
            )
        return torch.full_like(mask, self.uses, dtype=torch.int64)


def policy_loss(
    preset: str | None = None,
    window: int = 1,
    *,
    all_ranks: bool = True,
    ratio_to: RatioTo = "rollout",
    **settings: Any,  # of `settings_of`: objective, and fields of ClipSettings
) -> Callable[..., BapoPolicyLoss]:
    """A stand-in for the name `PolicyLoss`: OpenRLHF's arguments make a `BapoPolicyLoss` with these options."""
    require_choice("ratio_to", ratio_to, get_args(RatioTo))
    controller = BoundController(settings_of(preset=preset, **settings), window, all_ranks=all_ranks)
    return functools.partial(BapoPolicyLoss, controller=controller, ratio_to=ratio_to)
