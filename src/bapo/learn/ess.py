"""The effective sample size of an update's responses, which can scale its learning rate.

    w_i = prod_t r_it,   ESS / n = (sum_i w_i)^2 / (n sum_i w_i^2)   over the n responses of the update

It is 1 where the data are fresh, and near 1 / n where one response outweighs all others. VCPO (arXiv:2602.17616) takes
it as a sign that the gradient is noise and makes the step smaller (`settings.py`). The metric `ess` is another number:
it is over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bapo.core.reduction import sequence_lengths, sequence_sums
from bapo.learn.diagnostics import Output
from bapo.learn.ranks import Ranks, highest, summed


def response_ess(outputs: Sequence[Output], ranks: Ranks) -> Tensor:  # 0-d float64
    """The share ESS / n over the responses of all micro-batches on all ranks, the same number on each.

    A common factor of the weights cancels. Divided by the largest of them, no long response overflows or vanishes.
    """
    log_weights = torch.cat([_log_weights(output) for output in outputs])
    weights = (log_weights - highest(log_weights, ranks)).exp()
    present = (log_weights > -torch.inf).double()
    sums = summed(torch.stack([weights.sum(), (weights**2).sum(), present.sum()]), ranks)
    return sums[0] ** 2 / (sums[1] * sums[2])


def _log_weights(output: Output) -> Tensor:  # [places for sequences] float64
    """log w of each response; minus infinity where there is none."""
    batch = output.batch
    every = torch.ones_like(batch.targets, dtype=torch.bool)
    log_ratio = output.logprobs.double() - batch.behavior_logprobs.double()
    present = sequence_lengths(every, batch.sequence_ids) > 0
    return torch.where(present, sequence_sums(log_ratio, every, batch.sequence_ids), -torch.inf)
