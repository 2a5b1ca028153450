"""What the ranks of an update must agree on, so that the update does not depend on the number of ranks.

Each rank has groups of its own. All ranks run as many micro-batches as the rank with the most (ranks with fewer add
empty ones), because every micro-batch is a collective operation for a sharded model. Denominators, signal tables and
gradients are summed. Without a process group, this process is the only rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = dist.ProcessGroup | None


def largest(count: int, ranks: Ranks, device: torch.device) -> int:
    """The largest count of all ranks."""
    if ranks is None:
        return count
    value = torch.tensor(count, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=ranks)
    return int(value)


def summed(value: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, in place."""
    if ranks is not None:
        dist.all_reduce(value, group=ranks)
    return value


def sum_gradients(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """Give every rank the sum of all ranks' gradients. A rank with only empty micro-batches has gradients of zero."""
    for parameter in parameters:
        if parameter.grad is not None:
            summed(parameter.grad, ranks)
