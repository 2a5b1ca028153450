"""BAPO inside slime: slime's own policy loss, with two epsilons that are chosen in every call.

    --loss-type custom_loss --custom-loss-function-path bapo.adapters.slime.bapo_loss
    --use-rollout-logprobs --custom-config-path bapo.yaml      # bapo_preset: weak-model, bapo_window: 8

slime's policy loss clips with `args.eps_clip` and `args.eps_clip_high`. So nothing of it is copied: the log-probs are
computed once before it, by slime's own function and without gradients, the bounds are solved from them and from the
last `bapo_window` calls on this rank (`bapo.core.controller`), and slime's loss runs with those epsilons. Importance
weights, KL, entropy and parallelism stay slime's. slime is imported on the first call: it brings Megatron.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bapo.adapters.shared import DEFAULT_EPSILON, as_key, for_clamp, ignored_epsilons, refuse_uses, settings_of
from bapo.core.controller import BoundController, averageable
from bapo.core.settings import refuse_weighing

PREFIX = "bapo_"
"""Options are attributes of slime's arguments: bapo_window, and bapo_<name> for each option of `settings_of`."""


def bapo_loss(
    args: Namespace,
    batch: Mapping[str, Any],  # one micro-batch: lists with a tensor per sample
    logits: Tensor,  # [1, tokens, vocabulary]
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's `policy_loss_function` between the bounds of the window (arXiv:2510.18927)."""
    from slime.backends.megatron_utils import loss as slime_loss

    _refuse(args)
    with torch.no_grad():
        _, found = slime_loss.get_log_probs_and_entropy(
            logits,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=False,
            **slime_loss.get_rollout_top_p_logprob_kwargs(args, batch),
        )
    tokens = _tokens(args, batch, found["log_probs"])
    bounds = _controller(*_options(args)).bounds_of(*tokens)
    clipped = Namespace(**vars(args))
    low = for_clamp(bounds.low, used=False, dtype=tokens[0].dtype)
    clipped.eps_clip, clipped.eps_clip_high = 1 - low, bounds.high - 1
    loss, reported = slime_loss.policy_loss_function(clipped, batch, logits, sum_of_sample_mean)
    # slime adds up what losses report, over micro-batches and ranks, and divides by the samples or by the tokens
    weight = tokens[-1].sum() if args.calculate_per_token_loss else len(batch["response_lengths"])
    ours = averageable(bounds.metrics(ends=False))
    return loss, {**reported, **{name: value * weight for name, value in ours.items()}}


def _tokens(
    args: Namespace, batch: Mapping[str, Any], log_probs: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-probs, behaviour log-probs, advantages and mask of all samples in one row each, as slime's loss has them."""
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    old = old or log_probs
    masks = batch["loss_masks"]
    for i, (row, mask) in enumerate(zip(log_probs, masks, strict=True)):
        if row.numel() != mask.numel():
            raise ValueError(
                f"sample {i} has {row.numel()} log-probs on this rank but a loss mask of {mask.numel()} tokens: "
                "context parallelism cuts it up, and the share would be that of a piece. Set --context-parallel-size 1."
            )
    now, then, advantages, mask = (torch.cat(list(rows)) for rows in (log_probs, old, batch["advantages"], masks))
    return now, then, advantages, mask.bool()


def _options(args: Namespace) -> tuple[tuple[str, Any], ...]:
    """Everything in slime's arguments that is meant for us, in a form that can be a key."""
    ours = ((name, value) for name, value in sorted(vars(args).items()) if name.startswith(PREFIX))
    return as_key((name.removeprefix(PREFIX), value) for name, value in ours)


@cache
def _controller(*options: tuple[str, Any]) -> BoundController:
    """One per process and configuration: slime loads a function, so the window lives here."""
    given = dict(options)
    window = given.pop("window", 1)
    settings = settings_of(**given)
    refuse_weighing(settings, "slime")
    refuse_uses(settings, "slime trains on every response once, and its batches do not say otherwise")
    return BoundController(settings, window)


def _refuse(args: Namespace) -> None:
    """What would be ignored, or would make the window count a micro-batch twice."""
    if args.recompute_loss_function:
        raise ValueError(
            "--recompute-loss-function runs a loss twice, and the window would hold every micro-batch twice. Leave it "
            "out."
        )
    if args.eps_clip != DEFAULT_EPSILON or args.eps_clip_high not in (None, DEFAULT_EPSILON):
        given = f"--eps-clip {args.eps_clip} --eps-clip-high {args.eps_clip_high}"
        raise ignored_epsilons(given, "bapo_low and bapo_high")
    if args.advantage_estimator in ("gspo", "cispo"):
        raise ValueError(
            f"--advantage-estimator {args.advantage_estimator} does not clip token ratios on two sides, so there are "
            "no bounds to choose. Use grpo."
        )
    if getattr(args, "pg_loss_type", None) == "reinforce" or getattr(args, "use_score_centering", False):
        raise ValueError(
            f"--pg-loss-type {getattr(args, 'pg_loss_type', None)} with use_score_centering="
            f"{getattr(args, 'use_score_centering', False)} has no clip, so there are no bounds to choose. Leave both "
            "out: slime's default loss clips."
        )
    if getattr(args, "use_opsm", False):
        raise ValueError(
            "--use-opsm masks tokens inside slime's loss, after the bounds are chosen: the share would count tokens "
            "that are not trained on. Leave it out."
        )
