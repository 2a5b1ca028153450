"""What `trl.py` starts from: TRL itself, as far as it is there and has what we need, and `BapoConfig`, our options.

Both are checked at once, TRL when it is imported and options when they are given, before a model is loaded.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from bapo.adapters.shared import DEFAULT_EPSILON, SCOPES, ignored_epsilons, not_importable, settings_of
from bapo.core.settings import CLIP_OPTIONS, ClipSettings, refuse_weighing, require_choice

TESTED_VERSIONS = "1.16"
"""TRL versions the tests ran with; others are let in as long as `check_trl` finds what it needs."""

try:
    from trl import GRPOConfig, GRPOTrainer
    from trl import __version__ as trl_version
except ImportError as error:
    raise not_importable("trl", "TRL", TESTED_VERSIONS, "'bapo[trl]'", error) from error

__all__ = ["LOSS_TYPES", "TESTED_VERSIONS", "BapoConfig", "GRPOTrainer", "check_trl", "trl_version"]

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's losses with PPO's two-sided clip of token ratios; the others clip otherwise, or not at all."""


def check_trl(trainer: type, version: str) -> None:
    """Raise an ImportError unless this `GRPOTrainer` still has every place where the bounds go in."""
    uses = {
        "_compute_loss": {"epsilon_low", "epsilon_high", "_get_per_token_logps_and_entropies", "old_per_token_logps"},
        "_prepare_inputs": {"_step", "steps_per_generation", "num_iterations", "_buffered_inputs"},
        # From TRL 1.7 on it also returns the auxiliary loss; earlier versions return two values.
        "_get_per_token_logps_and_entropies": {"compute_entropy", "logits_to_keep", "compute_aux_loss"},
        "get_high_entropy_mask": {"entropies", "mask", "threshold"},
        "get_off_policy_mask": {"advantages", "per_token_logps", "sampling_per_token_logps", "off_policy_threshold"},
        "get_batch_samples": {"num_batches"},
    }
    for method, names in uses.items():
        code = getattr(inspect.unwrap(getattr(trainer, method, None)), "__code__", None)  # type: ignore[arg-type]
        if code is None or not names <= {*code.co_names, *code.co_varnames, *code.co_consts}:
            raise ImportError(
                f"bapo.adapters.trl was tested with TRL {TESTED_VERSIONS}, but TRL {version} is installed and its "
                f"{trainer.__name__}.{method} has changed (expected it to use {', '.join(sorted(names))}). Install a "
                "tested version: pip install 'trl==1.16.*'."
            )


check_trl(GRPOTrainer, trl_version)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class BapoConfig(GRPOConfig):
    """`GRPOConfig` plus where the clip bounds may be. An option left at None has the value of preset or objective."""

    bapo_objective: str | None = _option(
        None,
        "'brake' clips at (0.8, 1.2), or where bapo_low and bapo_high say, and raises the lower bound of tokens that "
        "were trained on before as far as they have fallen. 'grpo' has the same bounds without that, 'push_once' with "
        "bapo_used_low=1, and 'brake_all' the brake on all tokens. 'bapo' searches for the bounds in every update. It "
        "is the default if a preset or an option of the search is given; otherwise 'brake' is.",
    )
    bapo_preset: str | None = _option(
        None,
        "Settings of the search to start from: 'paper', 'weak-model' or 'released-script'. Without one: the paper's "
        "numbers with the measure 'gradient'.",
    )
    bapo_target_share: float | None = _option(
        None, "Share of the signal that positive tokens should hold, in [0, 1]. 0.4 without a preset."
    )
    bapo_low: list[float] | None = _option(  # noqa: RUF009
        None,
        "Start and end of the lower bound on the ratio, such as 0.6 0.9. Two equal numbers fix it. A bound, not an "
        "epsilon: an epsilon of 0.2 is 0.8.",
    )
    bapo_high: list[float] | None = _option(  # noqa: RUF009
        None, "Start and end of the upper bound on the ratio, such as 1.2 3.0. Two equal numbers fix it."
    )
    bapo_low_step: float | None = _option(None, "Distance between candidate lower bounds. 0.02 without a preset.")
    bapo_high_step: float | None = _option(None, "Distance between candidate upper bounds. 0.05 without a preset.")
    bapo_measure: str | None = _option(
        None,
        "How a clipped token counts in the share: 'gradient' (not at all) or 'surrogate' (at its bound, the paper's "
        "Eq. 8 literally).",
    )
    bapo_weight: str | None = _option(
        None, "Weight of a token in the share: 'none', or 'rollout_prob', the probability it was sampled with."
    )
    bapo_order: str | None = _option(None, "Which bound moves first: 'high_first' (paper) or 'low_first'.")
    bapo_remainder: str | None = _option(
        None,
        "What to do where no candidate reaches the target. Only 'leave' is possible: TRL's loss cannot weigh negative "
        "tokens.",
    )
    bapo_used_low: float | None = _option(
        None,
        "Lower bound for tokens that an earlier update was trained on. With 1.0 a negative token is pushed down again "
        "only while it is more likely than when it was sampled. Without it, the bound that the search finds.",
    )
    bapo_brake: float | None = _option(
        None,
        "Delta of the brake: the mean fall in nats of used negative tokens at which their lower bound is 1. 0.03 in "
        "'brake' and 'brake_all', none in 'bapo'.",
    )
    bapo_brake_on: str | None = _option(
        None, "With 'bapo' and bapo_brake: the tokens that the brake acts on, 'used' or 'all'. 'used' if not given."
    )
    bapo_scope: str = _option(
        "update",
        "What one pair of bounds is solved from: 'update', all micro-batches and processes of an optimizer step (with "
        "gradient accumulation one more forward pass without gradients), or 'microbatch', each loss call on its own.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("bapo_scope", self.bapo_scope, SCOPES)
        _ = self.clip_settings
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} has no two-sided clip of token ratios, so there are no bounds to choose."
                f" Use one of {', '.join(LOSS_TYPES)}, or GRPOTrainer."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r}: BAPO balances tokens by their own "
                "ratios, which a sequence-level ratio does not have. Set importance_sampling_level='token'."
            )
        if self.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):
            raise ValueError(
                f"use_liger_kernel=True is not supported with TRL {trl_version}, whose Liger loss clips inside its own "
                "kernel, where no bounds can be given. Leave it out, or install TRL 1.15 or later, which applies only "
                "Liger's layers."
            )
        if self.epsilon != DEFAULT_EPSILON or self.epsilon_high is not None:
            given = f"epsilon={self.epsilon}, epsilon_high={self.epsilon_high}"
            high = self.epsilon if self.epsilon_high is None else self.epsilon_high
            low, high = round(1 - self.epsilon, 9), round(1 + high, 9)
            same = f"bapo_low=[{low}, {low}], bapo_high=[{high}, {high}]"
            raise ignored_epsilons(given, "bapo_low and bapo_high", same)
        highest = self.clip_settings.high[1]
        if self.delta is not None and self.delta < highest:
            raise ValueError(
                f"delta={self.delta} caps every ratio, of positive tokens too, below {highest}, the end of bapo_high: "
                f"bounds above delta would pass tokens that have no gradient. Set delta >= {highest}, or end bapo_high "
                "at delta."
            )

    @property
    def clip_settings(self) -> ClipSettings:
        """These options as the core's ClipSettings."""
        options = {name: getattr(self, f"bapo_{name}") for name in CLIP_OPTIONS}
        try:
            settings = settings_of(self.bapo_objective, self.bapo_preset, **options)
            refuse_weighing(settings, "TRL")
            return settings
        except ValueError as error:
            raise ValueError(f"BapoConfig, options bapo_*: {error}") from None
