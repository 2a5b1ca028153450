"""What the ranks of an update must agree on, so that the update does not depend on the number of ranks.

Each rank has groups of its own. All ranks run as many micro-batches as the rank with the most (ranks with fewer add
empty ones), because every micro-batch is a collective operation for a sharded model. Denominators, signal tables and
gradients are summed. Without a process group, this process is the only rank.

A rank that cannot take part in an update (bad input) tells the others when they agree on the number of micro-batches:
all of them raise, and none waits. An error after that, in a forward pass, ends the others at the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

Ranks = dist.ProcessGroup | None
CANNOT = 2**31 - 1
"""The count of a rank that cannot take part."""


def largest(count: int, ranks: Ranks, device: torch.device) -> int:
    """The largest count of all ranks; a RuntimeError if one of them cannot take part."""
    if ranks is None:
        return count
    value = torch.tensor(count, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=ranks)
    if int(value) == CANNOT != count:
        raise RuntimeError("another rank cannot take part in this update. Its own error says why.")
    return int(value)


def total(count: int, ranks: Ranks, device: torch.device) -> int:
    """The sum of all ranks' counts."""
    return count if ranks is None else int(summed(torch.tensor(count, device=device), ranks))


def summed(value: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks, in place."""
    if ranks is not None:
        dist.all_reduce(value, group=ranks)
    return value


def highest(values: Tensor, ranks: Ranks) -> Tensor:  # 0-d
    """The largest value of all ranks. A rank may have none."""
    found = torch.cat([values, values.new_full((1,), -torch.inf)]).max()
    if ranks is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=ranks)
    return found


def sum_gradients(parameters: Iterable[Tensor], ranks: Ranks) -> None:
    """Give every rank the sum of all ranks' gradients. Where a rank has none, it adds zeros."""
    if ranks is None:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        summed(parameter.grad, ranks)
