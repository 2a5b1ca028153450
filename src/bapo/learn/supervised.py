"""Supervised updates: they raise the log-prob of demonstrations.

    L = -(1 / N) sum_t log pi(y_t | x, y_<t),   N: response tokens of the whole update

Prompts are context and are not learned. All micro-batches of an update share N, so the way it is cut changes nothing
but rounding. The learner provides forward pass, log-probs, optimizer, schedule and version counter. There are no ratios
and no bounds here, because no policy sampled these tokens.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.learn.forward import deterministic
from bapo.learn.health import NotFinite
from bapo.learn.learner import Learner, Update
from bapo.learn.packing import pack_demonstrations
from bapo.learn.ranks import failing_together, summed, total
from bapo.types import Metrics, TokenBatch

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the response to learn."""


class Fit(NamedTuple):
    """How well a model predicts given responses."""

    loss: float
    """Mean negative log-prob per token, in nats."""
    accuracy: float
    """The share of tokens that the model thought most likely."""
    tokens: int


def sft_loss(
    logprobs: Tensor,  # [tokens] of the given responses; they carry gradients
    *,
    denominator: int,  # response tokens of the whole update
) -> Tensor:
    """-sum log pi / denominator: the part of the update's mean that these tokens contribute."""
    return -logprobs.sum() / denominator


def sft_step(learner: Learner, pairs: Iterable[Pair]) -> Update:
    """Take one optimizer step that raises the log-prob of these responses."""
    learner.optimizer.forget_gradients()  # left by a step that failed half-way
    batches = learner.filled_up(_packed(learner, pairs))
    tokens = total(sum(len(batch.targets) for batch in batches), learner.ranks, learner.device)
    losses, entropies = [], []
    with failing_together(learner.ranks):
        for batch in batches:
            try:
                logprobs, entropy = learner.finite_logprobs(batch)
            except NotFinite:
                return learner.skip(batches, "log-probs are not finite")
            loss = sft_loss(logprobs, denominator=tokens)
            with deterministic(learner.device):
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            entropies.append(entropy.detach().double().sum())
    return learner.descend(partial(_metrics, learner, losses, entropies, tokens), batches)


def _metrics(
    learner: Learner, losses: list[Tensor], entropies: list[Tensor], tokens: int, grad_norm: Tensor
) -> Metrics:
    """The metrics of the update, read from the device in one transfer."""
    sums = summed(torch.stack([torch.stack(losses).double().sum(), torch.stack(entropies).sum()]), learner.ranks)
    loss, entropy, norm = torch.stack([sums[0], sums[1] / tokens, grad_norm.double()]).tolist()
    return {"imitation/loss": loss, "entropy": entropy, "grad_norm": norm, "tokens": float(tokens)}


@torch.no_grad()
def measure_fit(learner: Learner, pairs: Iterable[Pair]) -> Fit:
    """Measure how well the current weights predict these responses. Changes nothing."""
    batches = learner.filled_up(_packed(learner, pairs))
    found = torch.zeros(3, dtype=torch.float64, device=learner.device)  # -log p, right ones, tokens
    with failing_together(learner.ranks):
        for batch in batches:
            predicted = learner.predicted(batch, temperature=1.0, best=True)
            found[0] -= predicted.logprobs.double().sum()
            assert predicted.best is not None
            found[1] += (predicted.best == batch.targets).sum()
            found[2] += len(batch.targets)
    loss, right, tokens = summed(found, learner.ranks).tolist()
    return Fit(loss=loss / tokens, accuracy=right / tokens, tokens=int(tokens))


def _packed(learner: Learner, pairs: Iterable[Pair]) -> list[TokenBatch]:
    return pack_demonstrations(
        pairs,
        micro_tokens=learner.settings.micro_tokens,
        device=learner.device,
        padded=not learner.packed,
        part=learner.part,
    )
