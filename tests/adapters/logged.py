"""One logged batch for every adapter, and what `bapo.policy_loss` makes of it: the numbers they all must give."""

import torch

from bapo import policy_loss


def logged(seed=5, sequences=6, length=9):
    """log-probs (carrying grad), behaviour log-probs, advantages, mask: stale, ragged, the share below 0.5 at first."""
    generator = torch.Generator().manual_seed(seed)
    old = -2.5 - 2 * torch.rand(sequences, length, generator=generator)
    logprobs = (old + 0.5 * torch.randn(sequences, length, generator=generator)).requires_grad_()
    advantages = torch.randn(sequences, 1, generator=generator).expand(sequences, length) - 0.2
    return logprobs, old, advantages, torch.rand(sequences, length, generator=generator) < 0.8


def some_unmoved(batch):
    """The batch with every third token exactly as likely as when it was sampled: a ratio of 1, no more and no less."""
    logprobs, behavior, *rest = batch
    unmoved = torch.arange(behavior.numel()).reshape(behavior.shape) % 3 == 0
    return torch.where(unmoved, behavior, logprobs.detach()).requires_grad_(), behavior, *rest


def in_float64(batch):
    """The same numbers, to be computed with in float64."""
    return [x.detach().double() if x.is_floating_point() else x for x in batch]


def core(batch, **options):
    """`bapo.policy_loss` on a batch: its output, and the gradient of its log-probs."""
    logprobs = batch[0].detach().clone().requires_grad_()
    out = policy_loss(logprobs, *batch[1:], **options)
    out.loss.backward()
    return out, logprobs.grad
