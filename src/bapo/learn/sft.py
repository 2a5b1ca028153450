"""Supervised updates: the log-prob of given responses goes up.

    L = -(1 / N) sum_t log pi(y_t | x, y_<t),   N: response tokens of the whole update

Prompts are context and are not learned. All micro-batches of an update share N, so how it is cut changes nothing but
rounding. Forward pass, log-probs, optimizer, schedule and version counter are the learner's own; there are no ratios
and no bounds here, for nobody sampled these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.core.logprobs import CHUNK_LOGITS, token_logprobs
from bapo.learn.learner import Learner, Update, deterministic
from bapo.types import TokenBatch


class Fit(NamedTuple):
    """How well a model predicts given responses."""

    loss: float
    """Mean negative log-prob per token, in nats."""
    accuracy: float
    """Share of tokens that were the most likely one."""
    tokens: int


def imitation_loss(
    logprobs: Tensor,  # [tokens] of given responses, carry grad
    *,
    denominator: int,  # response tokens of the whole update
) -> Tensor:
    """-sum log pi / denominator: the part of the update's mean that these tokens contribute."""
    return -logprobs.sum() / denominator


def imitate(learner: Learner, batches: Sequence[TokenBatch]) -> Update:
    """One optimizer step towards the responses of all micro-batches."""
    learner.optimizer.forget_gradients()  # of a step that failed half-way
    tokens = sum(len(batch.targets) for batch in batches)
    losses, entropies = [], []
    for batch in batches:
        logprobs, entropy = learner.logprobs(batch)
        loss = imitation_loss(logprobs, denominator=tokens)
        with deterministic(learner.device):
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        entropies.append(entropy.detach().double().sum())
    return learner.descend(batches, partial(_metrics, losses, entropies, tokens))


def _metrics(
    losses: list[Tensor], entropies: list[Tensor], tokens: int, grad_norm: Tensor
) -> dict[str, float | list[float]]:
    """Read from the device in one transfer."""
    values = [torch.stack(losses).double().sum(), torch.stack(entropies).sum() / tokens, grad_norm.double()]
    loss, entropy, norm = torch.stack(values).tolist()
    return {"imitation/loss": loss, "entropy": entropy, "grad_norm": norm, "tokens": float(tokens)}


@torch.no_grad()
def fit(learner: Learner, batches: Sequence[TokenBatch]) -> Fit:
    """How well the current weights predict these responses; changes nothing."""
    head = learner.model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    loss = torch.zeros((), dtype=torch.float64, device=learner.device)
    right = torch.zeros((), dtype=torch.int64, device=learner.device)
    for batch in batches:
        states = learner.states(batch)
        loss -= token_logprobs(states, head.weight, batch.targets, bias=bias)[0].double().sum()
        right += (most_likely(states, head.weight, bias) == batch.targets).sum()
    tokens = sum(len(batch.targets) for batch in batches)
    return Fit(loss=float(loss) / tokens, accuracy=float(right) / tokens, tokens=tokens)


def most_likely(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The most likely token after each state, [tokens]; logits are held for a chunk of them at a time."""
    chunk = max(1, CHUNK_LOGITS // weight.shape[0])
    parts = torch.split(states, chunk)
    return torch.cat([torch.nn.functional.linear(part, weight, bias).argmax(1) for part in parts])
