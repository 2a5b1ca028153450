"""What the ranks of an update have to agree on, so that it does not depend on how many they are.

Each rank has groups of its own. The number of micro-batches is the largest of all ranks (those with fewer add empty
ones), because every micro-batch is a collective for a model that is sharded. Denominators, signal tables and gradients
are summed. Without a process group, this process is the only rank.
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
    """Every rank gets the sum of all ranks' gradients. A rank with empty micro-batches has gradients of zero."""
    for parameter in parameters:
        if parameter.grad is not None:
            summed(parameter.grad, ranks)
