"""Checks and limits that all engines share, so that they refuse the same things in the same words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bapo.rollout.engine import Request, Sampling


def max_positions(model: Any) -> int | None:
    """The longest sequence that a transformers model is made for; None if its config does not say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else None


@torch.no_grad()
def copy_weights(weights: Iterable[tuple[str, Tensor]], places: Mapping[str, Tensor]) -> None:
    """Copy every weight to its place, by name. A weight that already lies there is not copied.

    All places must be filled, because an engine with some old weights would sample from a policy that never existed.
    """
    missing = set(places)
    for name, tensor in weights:
        if name not in places:
            raise ValueError(
                f"the engine has no place for the weight {name!r}: it was built for another model, or the head has "
                "been tied or untied since. Build a new engine."
            )
        if tensor.shape != places[name].shape:
            raise ValueError(
                f"the weight {name!r} has shape {tuple(tensor.shape)}, but the engine was built for "
                f"{tuple(places[name].shape)}. Build a new engine."
            )
        if tensor.data_ptr() != places[name].data_ptr():
            places[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(
            f"{len(missing)} weights were not loaded ({min(missing)!r}, for example), so the engine would sample with "
            "old ones. Load all weights, or build a new engine if a head was tied or untied since."
        )


def check_engine_sizes(slots: int, prefill_tokens: int) -> None:
    """Refuse sizes that would let nothing be sampled."""
    if slots < 1:
        raise ValueError(f"slots={slots} leaves no room to sample in. Set slots >= 1.")
    if prefill_tokens < 1:
        raise ValueError(f"prefill_tokens={prefill_tokens} lets no context in. Set prefill_tokens >= 1.")


def check_idle(under_way: object | None, verb: str) -> None:
    """Refuse a verb while requests are under way."""
    if under_way is not None:
        raise RuntimeError(f"{verb} was called while requests are under way. First park and collect them.")


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    token_budget: int | None,
    *,
    positions: int | None,
    version: int,
) -> None:
    """Refuse requests that cannot be sampled, and name them."""
    if version < 0:
        raise RuntimeError("the engine has no weights yet. Call load(weights, version=...) before submit.")
    if not sampling.temperature >= 0:
        raise ValueError(
            f"sampling.temperature={sampling.temperature} is not a temperature. Set it to 0 (greedy) or a positive "
            "number."
        )
    if token_budget is not None and token_budget < 0:
        raise ValueError(f"token_budget={token_budget} is negative. Set it to 0 or more, or to None for no limit.")
    if len({request.id for request in requests}) < len(requests):
        raise ValueError("two requests have the same id, so their segments could not be told apart. Use unique ids.")
    for index, request in enumerate(requests):
        if not request.context:
            raise ValueError(
                f"request {index} (seed {request.seed}) has an empty context, so there is nothing to continue. "
                "Start it with a beginning-of-sequence token."
            )
        if request.max_new_tokens < 1:
            raise ValueError(
                f"request {index} (seed {request.seed}) has max_new_tokens={request.max_new_tokens}, so it may not "
                "grow. Set max_new_tokens >= 1, or leave the request out."
            )
        length = len(request.context) + request.max_new_tokens
        if positions is not None and length > positions:
            raise ValueError(
                f"request {index} (seed {request.seed}) may grow to {length} tokens ({len(request.context)} of context "
                f"and max_new_tokens={request.max_new_tokens}), but the model has {positions} positions. "
                f"Lower max_new_tokens to {positions - len(request.context)}, shorten the prompt, or use a model with "
                "a longer context."
            )


class NonFiniteLogits(FloatingPointError, ValueError):  # noqa: N818
    """The model gives logits that no token can be drawn from."""


def non_finite(requests: Sequence[Request], index: int, position: int) -> NonFiniteLogits:
    """The error for logits that no token can be drawn from."""
    request = requests[index]
    return NonFiniteLogits(
        f"the model gave non-finite logits for request {index} (seed {request.seed}, context of "
        f"{len(request.context)} tokens) at response position {position}, so no token can be drawn. "
        "Look for NaN or infinite weights after the last update: lower learn.lr, or sample in a wider dtype."
    )
