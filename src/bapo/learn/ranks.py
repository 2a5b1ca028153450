"""What the ranks of an update must agree on, so that the update does not depend on the number of ranks.

Each rank takes a part of the responses. All ranks run as many micro-batches as the rank with the most (ranks with fewer
add empty ones), because every micro-batch is a collective operation for a sharded model. Denominators and signal tables
are summed here, gradients by the sharded model. Without a process group, this process is the only rank.

A rank that cannot take part in an update (bad input) tells the others when they agree on the number of micro-batches:
all of them raise, and none waits. An error after that, in a pass, leaves the others waiting in the middle of a
collective operation. So the rank that fails says so in the store of the group and closes its connections: the others
fail at once, too, and find in the store whom to blame. The group is of no use afterwards; start the ranks again. A rank
that is silent (stopped, or cut off) ends the others at the timeout of the group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

Ranks = dist.ProcessGroup | None
CANNOT = 2**31 - 1
"""The count of a rank that cannot take part."""
PATIENCE = 600.0
"""Seconds that a rank waits for the others in one operation, unless told otherwise."""
FAILED = "bapo/failed"
"""Where the store of the group has the error of the first rank that failed."""
STOPPED = "stopped"
"""What the store has instead, if that rank was told to stop at once. The others then stop, too."""
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out"),
    *("remote process exited", "Connection closed by remote peer"),
)
"""What the backends say where another rank has gone, or has been silent for too long."""
_stores: dict[dist.ProcessGroup, Any] = {}


class LostRank(RuntimeError):  # noqa: N818
    """Another rank has failed, has gone or is silent, so this one cannot go on."""


def join(
    rank: int,
    size: int,
    *,
    meeting: str,  # where the ranks meet: "env://", "tcp://127.0.0.1:29500" or "file:///path"
    device: torch.device,
    patience: float = PATIENCE,
) -> dist.ProcessGroup:
    """Join the other ranks of this process's group: gloo between CPUs, and NCCL between GPUs as well."""
    waits = timedelta(seconds=patience)
    store, rank, size = next(iter(rendezvous(meeting, rank, size, timeout=waits)))
    store.set_timeout(waits)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=waits)
    ranks = dist.group.WORLD
    assert ranks is not None
    _stores[ranks] = store
    return ranks


def leave(ranks: Ranks) -> None:
    """Leave the group that `join` joined. Waits for nobody."""
    if ranks is not None and _stores.pop(ranks, None) is not None:
        dist.destroy_process_group()


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Inside, an error on this rank ends the others at once, with an error that names this rank."""
    try:
        yield
    except KeyboardInterrupt:
        if ranks in _stores:
            with suppress(dist.DistError):
                _stores[ranks].compare_set(FAILED, "", STOPPED)
        raise
    except Exception as error:
        if ranks is None or ranks not in _stores:
            raise
        store, rank = _stores[ranks], ranks.rank()
        told = f"rank {rank}: {type(error).__name__}: {error}"
        try:
            first = store.compare_set(FAILED, "", told).decode()
        except dist.DistError:  # whoever kept the store has gone
            first = told
        if dist.get_backend(ranks) != "gloo":
            ranks.abort()  # the others' waiting kernels
        leave(ranks)
        if first == STOPPED:
            raise KeyboardInterrupt from error
        echo = type(error) is RuntimeError or isinstance(error, dist.DistError)  # gloo has no type of its own
        if first != told and echo:
            raise LostRank(f"rank {rank} cannot go on, because another rank failed first. {first}") from error
        if echo and any(sign in str(error) for sign in LOST):
            raise LostRank(
                f"rank {rank} lost another rank, which has ended, is cut off or is silent: {error}"
            ) from error
        raise


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


def from_all(value: Tensor, ranks: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks, which have the same shape, in the order of ranks."""
    found = [torch.empty_like(value) for _ in range(ranks.size())]
    dist.all_gather(found, value.contiguous(), group=ranks)
    return found


def columns_of_all(mine: Tensor, ranks: Ranks, widths: Sequence[int] | None = None) -> list[Tensor]:
    """The columns of all ranks, in the order of ranks. `widths`: how many each has, where that is known.

    Those of each rank travel filled up to the most, because ranks can only exchange tensors of one shape.
    """
    if ranks is None:
        return [mine]
    if widths is None:
        widths = [int(count) for count in from_all(torch.tensor(mine.shape[1], device=mine.device), ranks)]
    room = mine.new_zeros(len(mine), max(widths))
    room[:, : mine.shape[1]] = mine
    return [columns[:, :width] for columns, width in zip(from_all(room, ranks), widths, strict=True)]


def from_all_texts(text: bytes, ranks: dist.ProcessGroup) -> list[bytes]:
    """The bytes of all ranks, of any length, in the order of ranks. They travel as tensors, so nothing is unpickled."""
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]
    return [part.numpy().tobytes() for part in columns_of_all(mine, ranks)]
