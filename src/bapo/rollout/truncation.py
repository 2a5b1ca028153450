"""Which tokens truncated sampling leaves, and how much of the probability.

Three rules may leave tokens out, each of those that the one before it has left:

    min_p   tokens that are less than min_p times as likely as the likeliest one
    top_k   all but the k likeliest
    top_p   all but the likeliest that together hold the share top_p

A token that is exactly as likely as the last one of these is left in, too, so equal tokens are never told apart. The
likeliest token always stays. The mass m is the probability of what is left, among the whole vocabulary at the
temperature of sampling. Tokens are drawn from p / m. That is the recorded log-prob, and log m is recorded beside it.
"""

import torch
from torch import Tensor

from bapo.rollout.engine import Sampling


def left_by(
    sampling: Sampling,
    logits: Tensor,  # [rows, vocabulary] over the temperature
) -> tuple[Tensor, Tensor]:  # [rows, vocabulary] bool: the tokens left; [rows] float32: log m
    """Probabilities are in float32, relative to the likeliest token, and sums of them in float64.

    Where a logit is not finite, all that it spoils is left in, so that the draw sees it. Nothing waits for the device.
    """
    weights = (logits - logits.max(dim=-1, keepdim=True).values).float().exp()
    least = torch.full_like(weights[:, :1], sampling.min_p)  # the weight of the last token that is left
    if 0 < sampling.top_k < logits.shape[-1]:
        least = torch.maximum(least, weights.topk(sampling.top_k, dim=-1).values[:, -1:])
    if sampling.top_p < 1:
        ordered = torch.where(weights >= least, weights, 0.0).sort(dim=-1, descending=True).values
        held = ordered.cumsum(-1, dtype=torch.float64)
        short = (held < sampling.top_p * held[:, -1:]).sum(-1, keepdim=True)  # tokens before the one that reaches it
        least = torch.maximum(least, ordered.gather(-1, short))
    left = ~(weights < least)
    mass = torch.where(left, weights, 0.0).sum(-1, dtype=torch.float64) / weights.sum(-1, dtype=torch.float64)
    return left, mass.log().float()
