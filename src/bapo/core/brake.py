"""The brake: used negative tokens are pushed down less, the further they have fallen (ours; docs/algorithm.md).

Every pass over the same responses pushes their negative tokens down again, also those that earlier passes have pushed
far enough. A fixed clip notices a token only at its own bound. The brake looks at all of them together. Let the drift d
be how far the negative tokens of an update that were trained on before have fallen since they were sampled, on average:

    d        = mean of -log r_t   over tokens with A_t < 0 and uses > 0        (0 if there are none)
    used_low = low + (1 - low) clip(d / delta, 0, 1)                           the lower bound of all used tokens

While they have not fallen, used_low is low, as in GRPO. Once they have fallen by delta on average, it is 1, as in push
once: such a token is pushed down again only while it is more likely than when it was sampled. Tokens that were never
trained on keep low.

d is a mean, so two sums decide it, which add up over micro-batches and ranks like the signal table, and travel in it.
Tokens past the ratio limit do not count. With `brake_on="all"` every negative token counts, used or not, and low itself
rises.
"""

import torch
from torch import Tensor

DRIFT_SUMS = 2
"""Entries of a signal table for the brake: the sum of -log r over the tokens it looks at, and their number."""
CHUNK = 2**15
"""Tokens whose float64 copies fit into a CPU's cache."""


@torch.no_grad()
def drift_sums(
    logprobs: Tensor,  # any shape; finite where they mean nothing
    behavior_logprobs: Tensor,  # same shape
    looked_at: Tensor,  # same shape, bool: negative tokens that count
) -> Tensor:  # [2] float64
    """The sum of -log r, and the number of tokens it is over.

    Both log-probs are summed by themselves, in float64: the difference of two of them would be rounded first.
    """
    if looked_at.device.type != "cpu":
        totals = [torch.where(looked_at, x, 0.0).sum(dtype=torch.float64) for x in (behavior_logprobs, logprobs)]
        return torch.stack([totals[0] - totals[1], looked_at.sum(dtype=torch.float64)])
    sums = torch.zeros(DRIFT_SUMS, dtype=torch.float64)
    given = behavior_logprobs.flatten(), logprobs.flatten(), looked_at.flatten()
    for behavior, now, chosen in zip(*(torch.split(x, CHUNK) for x in given), strict=True):
        weights = chosen.double()
        sums += torch.stack([behavior.double() @ weights - now.double() @ weights, weights.sum()])
    return sums


def drift_of(sums: Tensor) -> Tensor:  # 0-d
    """d from its two sums."""
    return sums[0] / sums[1].clamp(min=1)


def braked(low: Tensor | float, drift: Tensor, delta: float) -> Tensor:  # 0-d
    """The lower bound at this drift: low where nothing has fallen, exactly 1 from delta on."""
    strength = (drift / delta).clamp(0, 1)
    return torch.where(strength == 1, 1.0, low + (1 - low) * strength)
