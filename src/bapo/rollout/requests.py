"""What engines refuse, in the same words, and the limits of a model that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bapo.rollout.engine import Request, Sampling


def max_positions(model: Any) -> int | None:
    """The longest sequence a transformers model is made for; None if its config does not say."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions else None


def check_engine_sizes(slots: int, prefill_tokens: int) -> None:
    """Refuse sizes with which nothing could be sampled."""
    if slots < 1:
        raise ValueError(f"slots={slots} leaves no place to sample in. Set slots >= 1.")
    if prefill_tokens < 1:
        raise ValueError(f"prefill_tokens={prefill_tokens} lets no context in. Set prefill_tokens >= 1.")


def check_idle(under_way: object | None, verb: str) -> None:
    """Refuse a verb while requests are under way."""
    if under_way is not None:
        raise RuntimeError(f"{verb} was called while requests are under way. Park them and collect what comes first.")


def check_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    token_budget: int | None,
    *,
    positions: int | None,
    version: int,
) -> None:
    """Refuse what cannot be sampled, naming the request."""
    if version < 0:
        raise RuntimeError("the engine has no weights yet. Call load(weights, version=...) before submit.")
    if not sampling.temperature >= 0:
        raise ValueError(
            f"sampling.temperature={sampling.temperature} is not a temperature. Set 0 for greedy, or more to sample."
        )
    if token_budget is not None and token_budget < 0:
        raise ValueError(f"token_budget={token_budget} is negative. Set None for no limit, or a number of tokens >= 0.")
    if len({request.id for request in requests}) < len(requests):
        raise ValueError("two requests have the same id, so their segments could not be told apart. Number them.")
    for index, request in enumerate(requests):
        if not request.context:
            raise ValueError(
                f"request {index} (seed {request.seed}) has an empty context, so there is nothing to continue. "
                "Start it with a beginning-of-sequence token."
            )
        if request.max_new_tokens < 1:
            raise ValueError(
                f"request {index} (seed {request.seed}) has max_new_tokens={request.max_new_tokens}; it is already as "
                "long as it may be. Ask for at least 1, or leave it out."
            )
        length = len(request.context) + request.max_new_tokens
        if positions is not None and length > positions:
            raise ValueError(
                f"request {index} (seed {request.seed}) may grow to {length} tokens ({len(request.context)} of context "
                f"and max_new_tokens={request.max_new_tokens}), but the model has {positions} positions. "
                f"Lower max_new_tokens to {positions - len(request.context)}, shorten the prompt, or take a model with "
                "a longer context."
            )


def non_finite(requests: Sequence[Request], index: int, position: int) -> ValueError:
    """The error for logits that no token can be drawn from."""
    request = requests[index]
    return ValueError(
        f"the model gave non-finite logits for request {index} (seed {request.seed}, context of "
        f"{len(request.context)} tokens) at response position {position}; no token can be drawn from them. "
        "Look for NaN or infinite weights after the last update, or sample in a wider dtype."
    )
