"""BAPO with Tinker: a loss function for `TrainingClient.forward_backward_custom`.

    from bapo.adapters.tinker import bapo_loss

    training_client.forward_backward_custom(data, bapo_loss(preset="weak-model"))
    training_client.optim_step(types.AdamParams(learning_rate=1e-5))

Tinker hands a custom loss the whole batch, one tensor of log-probs per datum, and sends the gradient back. One call per
`optim_step` is therefore scope `update`, exactly, without anything to share between ranks. Nothing of Tinker is
imported here: each datum is asked for its `loss_fn_inputs`, as Tinker documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bapo.adapters.shared import settings_of
from bapo.core.controller import as_numbers
from bapo.core.loss import policy_loss

TESTED_VERSIONS = "0.36.0"
INPUTS = ("logprobs", "advantages", "mask")
"""What every datum's `loss_fn_inputs` must hold besides `target_tokens`, one value per target token each."""
USES = "uses"
"""The same for the brake and `used_low`: how often the token was trained on before. Only the caller knows."""

CustomLoss = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]


def bapo_loss(
    preset: str | None = None,
    *,
    denominator: float | None = None,
    dual_clip: float | None = None,
    **settings: Any,  # of `settings_of`: objective, and fields of ClipSettings
) -> CustomLoss:
    """The clipped surrogate at bounds solved from all data of a call (arXiv:2510.18927).

    The loss is divided by `denominator`, or by the number of tokens under the mask where none is given. Give one where
    an `optim_step` follows several calls: their gradients add up, and each call still solves bounds of its own.
    """
    clip_settings = settings_of(preset=preset, **settings)

    def loss(data: Sequence[Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        def column(name: str) -> Tensor:
            return torch.cat([_input(datum, i, name, len(logprobs[i])) for i, datum in enumerate(data)])

        behavior, advantages, mask = (column(name) for name in INPUTS)
        counted = clip_settings.rule_of_used is not None or any(USES in datum.loss_fn_inputs for datum in data)
        out = policy_loss(
            torch.cat(list(logprobs)),
            behavior,
            advantages,
            mask,
            settings=clip_settings,
            uses=column(USES) if counted else None,
            denominator=denominator,
            dual_clip=dual_clip,
        )
        return out.loss, as_numbers(out.metrics)

    return loss


def _input(datum: Any, index: int, name: str, targets: int) -> Tensor:
    """One of a datum's inputs as a tensor, with a value for each of its target tokens."""
    if name not in datum.loss_fn_inputs and name == USES:
        raise ValueError(
            f"data[{index}].loss_fn_inputs has no {USES!r}, which brake and used_low need: for each target token, "
            "the number of optim_steps that trained on it before. For new data that is 0."
        )
    if name not in datum.loss_fn_inputs:
        raise ValueError(
            f"data[{index}].loss_fn_inputs has no {name!r}. BAPO needs {', '.join(INPUTS)}, one value per target token:"
            " the log-probs the tokens were sampled with, their advantages, and 1 where a token was sampled, else 0."
        )
    values: Tensor = datum.loss_fn_inputs[name].to_torch()
    if values.shape != (targets,):
        raise ValueError(
            f"data[{index}].loss_fn_inputs[{name!r}] has the shape {tuple(values.shape)}, but the datum has {targets} "
            "target tokens. Give one value per target token."
        )
    return values
