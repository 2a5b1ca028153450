"""Chooses the engine that samples from a model in this process: CUDA's where it can run the model, else the other."""

from __future__ import annotations

import warnings
from typing import Literal

from transformers import PreTrainedModel

from bapo.rollout.engine import Engine
from bapo.rollout.local.engine import LocalEngine


def engine_for(
    model: PreTrainedModel,
    *,
    slots: int,
    parked: Literal["rebuild", "keep"] = "rebuild",
    cache_tokens: int | None = None,
    float32_head: bool = False,
) -> Engine:
    """The fastest engine that can run this model on its device.

    `parked` and `cache_tokens`: see `GraphEngine`. "keep" needs CUDA; the general engine ignores `cache_tokens`.
    `float32_head`: compute logits in float32, also those of 16-bit weights.
    """
    reason = f"it is on {model.device}"
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        from bapo.rollout.cuda.decoder import unsupported  # needs Triton, which a machine without a GPU may not have
        from bapo.rollout.cuda.engine import GraphEngine

        reason = unsupported(model) or ""
        if not reason:
            return GraphEngine(model, slots=slots, parked=parked, cache_tokens=cache_tokens, float32_head=float32_head)
    if parked == "keep":
        raise ValueError(
            f"offpolicy.partial_cache='keep' needs the CUDA engine, which cannot run {type(model).__name__}: {reason}. "
            "Set it to 'rebuild'."
        )
    if on_gpu:
        warnings.warn(
            f"{type(model).__name__} is sampled by the general engine, which is an order of magnitude slower than the "
            f"CUDA engine. The CUDA engine cannot run it: {reason}."
            + ("" if cache_tokens is None else f" rollout.cache_tokens={cache_tokens} has no effect."),
            stacklevel=2,
        )
    return LocalEngine(model, slots=slots, float32_head=float32_head)
