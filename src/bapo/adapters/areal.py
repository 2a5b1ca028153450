"""BAPO inside AReaL: `WithinBounds`, a mixin for AReaL's actor engines.

    class BapoActor(WithinBounds, FSDPPPOActor):
        clip_settings = ClipSettings.preset("weak-model")

An AReaL actor hands every optimizer step to its engine's `train_batch`, with a partial of `grpo_loss_fn` that names the
epsilons. `WithinBounds` runs the step twice: first the engine's own `eval_batch` on the same data, with a loss function
that collects tables; then, after one all-reduce over the data-parallel group, `train_batch` with the epsilons of the
bounds in place of the configured ones. That is exactly scope `update`, however AReaL splits the step. No code of AReaL
is copied or imported here. Its statistics stay, and the bounds join them through what `train_batch` returns.

With the brake and with `used_low`, tokens that were trained on before have another lower bound. AReaL's own trainer
uses every rollout once. A loop that calls `ppo_update` several times with the same data knows how often it did, and
says so in the data: `uses`, shaped like `loss_mask`. AReaL splits and packs it with the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bapo.adapters.shared import DEFAULT_EPSILON, ignored_epsilons, just_above, refuse_nan
from bapo.core.bounds import bounds_over_ranks
from bapo.core.controller import as_numbers
from bapo.core.loss import update_table
from bapo.core.settings import ClipSettings, refuse_weighing

TESTED_VERSIONS = "1.0.4"
USES = "uses"
"""Where a batch says how often its tokens were trained on before."""


class WithinBounds:
    """An AReaL actor engine whose optimizer steps are clipped at solved bounds (arXiv:2510.18927)."""

    clip_settings: ClipSettings = ClipSettings()
    """Where the bounds may be. Set it in the class that combines this one with an engine of AReaL; `settings_of` of
    `bapo.adapters.shared` makes it for an objective that does not search, such as brake."""

    def train_batch(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Callable[[dict[str, Any]], Tensor]
    ) -> dict[str, float]:
        """AReaL's `train_batch`, after one pass without gradients that finds the step's bounds."""
        if not (isinstance(loss_fn, functools.partial) and "eps_clip" in loss_fn.keywords):
            raise ValueError(
                f"{type(self).__name__} clips the policy loss of AReaL's PPOActor, but was given {loss_fn!r}. Use "
                "AReaL's own engine for other losses."
            )
        _refuse(loss_fn.keywords)
        refuse_weighing(self.clip_settings, "AReaL")
        tables: list[Tensor] = []

        def collect(logprobs: Tensor, entropy: Tensor, data: dict[str, Any], **_: Any) -> Tensor:
            four = (logprobs, data["prox_logp"], data["advantages"], data["loss_mask"].bool())
            tables.append(update_table(*four, self.clip_settings, uses=_uses(data, self.clip_settings)))
            return logprobs.new_zeros(())

        self.eval_batch(input_, collect, loss_weight_fn)  # type: ignore[attr-defined]
        bounds = bounds_over_ranks(
            tables,
            self.clip_settings,
            device=self.device,  # type: ignore[attr-defined]
            process_group=self.data_parallel_group,  # type: ignore[attr-defined]
        )
        numbers = as_numbers(bounds.metrics(ends=False))
        refuse_nan(numbers["bapo/share"], "log-probs or advantages")
        low = numbers["bapo/clip_low"]
        low = just_above(low, torch.float32) if low == 1 else low
        chosen = {"eps_clip": 1 - low, "eps_clip_higher": numbers["bapo/clip_high"] - 1}
        within: Callable[..., Tensor] = functools.partial(loss_fn, **chosen)
        used_low = numbers.get("bapo/used_low", self.clip_settings.used_low)
        if used_low is not None:
            within = _by_use(loss_fn, used_low, **chosen)
        return {**super().train_batch(input_, within, loss_weight_fn), **numbers}  # type: ignore[misc]


def _uses(data: dict[str, Any], settings: ClipSettings) -> Tensor | None:
    """How often each token of a micro-batch was trained on before, if the batch says so."""
    if settings.rule_of_used is not None and USES not in data:
        raise ValueError(
            f"clip_settings.{settings.rule_of_used} sets a bound for tokens that were trained on before, but this "
            f"batch has no {USES!r}. AReaL's PPOTrainer uses every rollout once: leave it out. In a loop of your own "
            f"that calls ppo_update several times with the same data, set data[{USES!r}] to the number of calls so "
            "far, in the shape of loss_mask."
        )
    return data.get(USES)


def _by_use(
    loss_fn: Callable[..., Tensor], used_low: float, eps_clip: float, eps_clip_higher: float
) -> Callable[..., Tensor]:
    """AReaL's loss with an epsilon for each token: that of used tokens where it was trained on before."""

    def within(logprobs: Tensor, entropy: Tensor, data: dict[str, Any], **options: Any) -> Tensor:
        again = logprobs.new_full((), 1 - just_above(used_low, logprobs.dtype))
        lower = torch.where(data[USES] > 0, again, eps_clip)
        upper = torch.full_like(lower, eps_clip_higher)  # torch.clamp takes two numbers or two tensors
        return loss_fn(logprobs, entropy, data, eps_clip=lower, eps_clip_higher=upper, **options)

    return within


def _refuse(options: dict[str, Any]) -> None:
    """What BAPO's bounds would silently replace, or do not apply to."""
    low, high = options["eps_clip"], options["eps_clip_higher"]
    if low != DEFAULT_EPSILON or high is not None:
        given = f"actor.eps_clip={low}, actor.eps_clip_higher={high}"
        raise ignored_epsilons(given, "low and high of clip_settings")
    if options.get("use_decoupled_loss", False):
        raise ValueError(
            "actor.use_decoupled_loss=true takes ratios to a third policy, neither the sampler nor the learner. Set "
            "use_decoupled_loss=false and recompute_logprob=false: ratios are then to the policy that sampled."
        )
    if options.get("use_sapo_loss", False) or options.get("importance_sampling_level", "token") != "token":
        raise ValueError(
            "actor.use_sapo_loss and actor.importance_sampling_level=sequence have no two-sided clip of token ratios, "
            "so there are no bounds to choose. Leave both out."
        )
