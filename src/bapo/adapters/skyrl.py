"""BAPO inside SkyRL: a policy loss for its `PolicyLossRegistry`.

    from bapo.adapters.skyrl import register

    register(preset="weak-model", window=8)      # in your main, then trainer.algorithm.policy_loss_type=bapo

SkyRL divides the advantages of a mini-batch before it sends them to its workers, calls the loss once per micro-batch
and adds up. So the loss here is a plain sum, and the bounds come from the last `window` calls (`bapo.core.controller`).
Ratios are to the policy that sampled, whose log-probs SkyRL keeps; `ratio_to="old"` takes those its trainer recomputed.
KL and entropy terms are SkyRL's own.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from bapo.adapters.shared import DEFAULT_EPSILON, RatioTo, ignored_epsilons, not_importable, refuse_uses, settings_of
from bapo.core.controller import BoundController, as_numbers
from bapo.core.settings import require_choice

TESTED_VERSIONS = "0.3.0"

try:
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import (
        apply_off_policy_correction,
        off_policy_correction_enabled,
    )
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
except ImportError as error:
    raise not_importable("skyrl", "SkyRL", TESTED_VERSIONS, "'skyrl[fsdp]'", error) from error

__all__ = ["TESTED_VERSIONS", "BapoPolicyLoss", "register"]


class BapoPolicyLoss:
    """The clipped surrogate at bounds solved from the last `window` micro-batches (arXiv:2510.18927), summed.

    An object rather than a function: SkyRL sends it to every worker by cloudpickle, where it keeps a window of its own.
    """

    def __init__(
        self,
        preset: str | None = None,
        window: int = 1,
        *,
        all_ranks: bool = False,
        ratio_to: RatioTo = "rollout",
        dual_clip: float | None = None,
        **settings: Any,  # of `settings_of`: objective, and fields of ClipSettings
    ) -> None:
        require_choice("ratio_to", ratio_to, get_args(RatioTo))
        clip_settings = settings_of(preset=preset, **settings)
        refuse_uses(clip_settings, "SkyRL does not tell a loss which of its update_epochs_per_batch it is in")
        self.controller = BoundController(clip_settings, window, all_ranks=all_ranks)
        self.ratio_to = ratio_to
        self.dual_clip = dual_clip

    def __call__(
        self,
        log_probs: Tensor,  # [sequences, tokens] under the learner now; carries grad
        old_log_probs: Tensor | None,  # same shape; recomputed by SkyRL's trainer
        advantages: Tensor,  # same shape; divided by SkyRL so that losses add up
        config: Any,  # SkyRL's AlgorithmConfig
        loss_mask: Tensor | None = None,  # same shape
        rollout_logprobs: Tensor | None = None,  # same shape; under the policy that sampled
    ) -> tuple[Tensor, dict[str, float]]:
        """L = sum_t -min(r_t A_t, clip(r_t, low, high) A_t), and metrics that may be averaged."""
        _refuse_epsilons(config)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
        corrections: dict[str, float] = {}
        if self.ratio_to == "rollout":
            behavior = _rollout_logprobs(rollout_logprobs, config)
        else:
            assert old_log_probs is not None
            behavior = old_log_probs
            advantages, weights, corrections = apply_off_policy_correction(
                advantages, old_log_probs, rollout_logprobs, mask.to(advantages.dtype), config.off_policy_correction
            )
            mask = weights.bool()
        out = self.controller.policy_loss(
            log_probs, behavior, advantages, mask, denominator=1.0, dual_clip=self.dual_clip
        )
        return out.loss, {**as_numbers(out.metrics), **corrections}


def register(name: str = "bapo", **options: Any) -> BapoPolicyLoss:
    """Put `BapoPolicyLoss(**options)` into SkyRL's registry, for `trainer.algorithm.policy_loss_type=<name>`."""
    loss = BapoPolicyLoss(**options)
    PolicyLossRegistry.register(name, loss)
    return loss


def _refuse_epsilons(config: Any) -> None:
    if (config.eps_clip_low, config.eps_clip_high) != (DEFAULT_EPSILON, DEFAULT_EPSILON):
        given = f"trainer.algorithm.eps_clip_low={config.eps_clip_low}, eps_clip_high={config.eps_clip_high}"
        raise ignored_epsilons(given, "low= and high= of register")


def _rollout_logprobs(rollout_logprobs: Tensor | None, config: Any) -> Tensor:
    if rollout_logprobs is None:
        raise ValueError(
            "SkyRL has no log-probs of the policy that sampled. Set generator.sampling_params.logprobs=1 (SkyRL's"
            " default), or register(ratio_to='old') to take the ones its trainer recomputes."
        )
    if off_policy_correction_enabled(config.off_policy_correction):
        raise ValueError(
            "trainer.algorithm.off_policy_correction would correct twice: ratios to the policy that sampled need no "
            "further weights. Leave it out, or register(ratio_to='old')."
        )
    return rollout_logprobs
