"""BAPO inside prime-rl: a custom loss, named by its import path.

    [trainer.loss]
    type = "custom"
    import_path = "bapo.adapters.prime_rl.bapo_loss"
    kwargs = { preset = "weak-model", window = 64 }

prime-rl calls a custom loss once per sequence and divides the sum of all by its own scale. A share over one sequence
means nothing (all its tokens have the same sign), so bounds come from the last `window` sequences of this process
(`bapo.core.controller`). prime-rl is not imported here: it reads `loss` and `metrics` of what is returned.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from bapo.adapters.shared import as_key, refuse_uses, settings_of
from bapo.core.controller import BoundController, averageable


class LossOutputs(NamedTuple):
    """What prime-rl reads of a result, under the names of its own `LossOutputs`."""

    loss: Tensor  # 0-d, summed over tokens
    metrics: dict[str, Tensor]  # 0-d each


def bapo_loss(
    inputs: Any,  # prime-rl's LossInputs, [tokens] each
    window: int = 64,
    dual_clip: float | None = None,
    **settings: Any,  # of `settings_of`: objective, preset, and fields of ClipSettings
) -> LossOutputs:
    """One sequence's clipped surrogate at the bounds of the window (arXiv:2510.18927), summed.

    `loss_weights`, where a version of prime-rl has them, multiply a token's signal as they multiply its loss.
    """
    weights = getattr(inputs, "loss_weights", None)
    out = _controller(window, as_key(settings.items())).policy_loss(
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages if weights is None else inputs.advantages * weights,
        inputs.loss_mask,
        denominator=1.0,
        dual_clip=dual_clip,
    )
    return LossOutputs(out.loss, averageable(out.metrics))


@cache
def _controller(window: int, options: tuple[tuple[str, Any], ...]) -> BoundController:
    """One per process and configuration: prime-rl hands over a function, so the window lives here."""
    settings = settings_of(**dict(options))
    refuse_uses(settings, "prime-rl trains on every rollout once, and its LossInputs do not say otherwise")
    return BoundController(settings, window)
