"""Ragged requests, and what a full forward pass says of sampled tokens: shared by the engines' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bapo.rollout.engine import Request, Sampled, Sampling, Segment, generate
from bapo.types import Status
from tests.rounding import carried
from tests.tiny.models import VOCABULARY


def sitting(
    engine: Any, requests: Sequence[Request], sampling: Sampling, *, version: int = 0, **how: Any
) -> list[Segment]:
    """The weights of the engine's own model under this version, and one sitting with them."""
    engine.load(engine.model.named_parameters(), version=version)
    return generate(engine, requests, sampling, **how)


def ragged_requests(count: int = 14) -> list[Request]:
    """Contexts of 1 to 11 tokens, limits of 1 to 50."""
    rng = np.random.default_rng(7)
    return [
        Request(
            context=rng.integers(4, VOCABULARY, 1 + index % 11).tolist(),
            position=0,
            seed=100 + index,
            max_new_tokens=int(rng.integers(1, 51)),
        )
        for index in range(count)
    ]


def resumed(request: Request, segment: Segment) -> Request:
    return replace(
        request,
        context=request.context + segment.tokens,
        position=request.position + len(segment.tokens),
        max_new_tokens=request.max_new_tokens - len(segment.tokens),
    )


def assert_told_right(told: list[Sampled], segments: Sequence[Segment]) -> None:
    """A watch heard of nothing first and of all at the end, and no count ever fell."""
    complete = sum(segment.status is not Status.PARKED for segment in segments)
    assert told[0] == Sampled(0, len(segments), 0)
    assert told[-1] == Sampled(complete, len(segments), sum(len(segment.tokens) for segment in segments))
    for before, after in pairwise(told):
        assert all(low <= high for low, high in zip(astuple(before), astuple(after), strict=True))


def teacher_forced(model: PreTrainedModel, context: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """Log-distributions that predict `tokens`, from one full forward pass without a cache."""
    ids = torch.tensor([context + tokens], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    return torch.log_softmax(logits[len(context) - 1 : -1] / temperature, dim=-1)


@torch.no_grad()
def exact_logprobs(model, request, tokens, temperature):
    """Log-probs of these tokens from the states of the model's own pass, with a head in float64."""
    ids = torch.tensor([[*request.context, *tokens]], device=model.device)
    states = model.base_model(input_ids=ids).last_hidden_state[0, len(request.context) - 1 : -1].double()
    logprobs = (states @ model.get_output_embeddings().weight.double().T / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(tokens)), tokens].tolist()


def forcing_limit(model: PreTrainedModel, requests: Any, segments: Any, temperature: float) -> float:
    """How far rounding may take log-probs and entropies from a full forward pass, seen on the longest response."""
    if temperature == 0 or not any(segment.tokens for segment in segments):
        return 0.0
    request, segment = max(zip(requests, segments, strict=True), key=lambda pair: len(pair[1].tokens))

    def told() -> list[torch.Tensor]:
        logprobs = teacher_forced(model, request.context, segment.tokens, temperature)
        chosen = logprobs.gather(1, torch.tensor(segment.tokens)[:, None])[:, 0]
        return [chosen, -(logprobs.exp() * logprobs).sum(-1)]

    return max(carried(told))


def assert_matches_teacher_forcing(
    model: PreTrainedModel,
    requests: list[Request],
    segments: list[Segment],
    temperature: float,
    *,
    tolerance: float | None = None,
) -> None:
    if tolerance is None:
        tolerance = forcing_limit(model, requests, segments, temperature)
    for request, segment in zip(requests, segments, strict=True):
        logprobs = teacher_forced(model, request.context, segment.tokens, temperature)
        chosen = logprobs.gather(1, torch.tensor(segment.tokens)[:, None])[:, 0]
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(torch.tensor(segment.logprobs), chosen, atol=tolerance, rtol=0)
        torch.testing.assert_close(torch.tensor(segment.entropies), entropies, atol=tolerance, rtol=0)


def tokens_of(segments: list[Segment]) -> list[list[int]]:
    return [segment.tokens for segment in segments]
