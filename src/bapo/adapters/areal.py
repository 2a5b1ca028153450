"""BAPO inside AReaL: `WithinBounds`, to be put in front of an actor engine of AReaL's.

    class BapoActor(WithinBounds, FSDPPPOActor):
        clip_settings = ClipSettings.preset("weak-model")

An AReaL actor hands every optimizer step to its engine's `train_batch`, with a partial of `grpo_loss_fn` that names the
epsilons. So one step is gone through twice: first the engine's own `eval_batch` on the same data, with a loss function
that adds up tables; one all-reduce over the data-parallel group; then `train_batch` with the epsilons of the bounds in
place of the configured ones. That is scope `update`, exactly, however AReaL splits the step. Nothing of AReaL is copied
or imported here, and its statistics go on; the bounds join them through what `train_batch` returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapo.core.bounds import bounds_from_table
from bapo.core.controller import as_numbers
from bapo.core.loss import update_table
from bapo.core.settings import ClipSettings, refuse_weighing

TESTED_VERSIONS = "1.0.4"
AREAL_EPSILON = 0.2


class WithinBounds:
    """An AReaL actor engine whose optimizer steps are clipped at solved bounds (arXiv:2510.18927)."""

    clip_settings: ClipSettings = ClipSettings()
    """Where the bounds may be; set it in the class that names an engine of AReaL's."""

    def train_batch(
        self,
        input_: Any,
        loss_fn: Callable[..., Tensor],
        loss_weight_fn: Callable[[dict[str, Any]], Tensor],
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
            tables.append(update_table(*four, self.clip_settings))
            return logprobs.new_zeros(())

        self.eval_batch(input_, collect, loss_weight_fn)  # type: ignore[attr-defined]
        bounds = bounds_from_table(self._summed(tables), self.clip_settings)
        numbers = as_numbers(bounds.metrics(ends=False))
        if numbers["bapo/share"] != numbers["bapo/share"]:
            raise ValueError(
                "the log-probs or advantages of this update hold NaN or infinity on some rank. "
                "bapo.core.checks.check_tokens names the token."
            )
        chosen = {"eps_clip": 1 - numbers["bapo/clip_low"], "eps_clip_higher": numbers["bapo/clip_high"] - 1}
        within = functools.partial(loss_fn.func, *loss_fn.args, **{**loss_fn.keywords, **chosen})
        return {**super().train_batch(input_, within, loss_weight_fn), **numbers}  # type: ignore[misc]

    def _summed(self, tables: list[Tensor]) -> Tensor:
        """One table of all micro-batches on all data-parallel ranks: the one collective of ours."""
        size = len(self.clip_settings.low_grid) + len(self.clip_settings.high_grid) + 1
        device = self.device  # type: ignore[attr-defined]
        table = torch.zeros(size, dtype=torch.float64, device=device)  # a rank may have nothing to train on
        for part in tables:
            table += part
        dist.all_reduce(table, group=self.data_parallel_group)  # type: ignore[attr-defined]
        return table


def _refuse(options: dict[str, Any]) -> None:
    """What BAPO's bounds would silently replace, or do not apply to."""
    low, high = options["eps_clip"], options["eps_clip_higher"]
    if low != AREAL_EPSILON or high is not None:
        raise ValueError(
            f"actor.eps_clip={low}, actor.eps_clip_higher={high} would be ignored: BAPO chooses both bounds. Leave "
            "them out; low and high of clip_settings say where the bounds may be (equal numbers fix them)."
        )
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
