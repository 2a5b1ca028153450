"""Weights on their way from one process to others of the same machine, in shared memory, with their fingerprints.

The sender packs tensors into buckets. A bucket is an anonymous file in memory (memfd), which the receivers open through
the sender's entry in /proc and map. It has no name in any directory, so nothing remains of it when the sender dies, and
its size is not limited by that of /dev/shm.

The fingerprint of a weight is a hash of its name, dtype, shape and bits. Both sides compute it from their own copy.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 512 * 2**20
"""A bucket is sent when it holds this many bytes. One weight may be larger; then it has a bucket to itself."""
_ALIGNMENT = 64
_HASHED_AT_A_TIME = 8


@dataclass(frozen=True)
class Bucket:
    """Weights that lie in one piece of shared memory."""

    names: list[str]
    dtypes: list[str]
    """For example float32, a name in torch."""
    shapes: list[list[int]]
    offsets: list[int]
    """In bytes."""
    size: int
    path: str
    """Where another process of the same user opens the memory while the sender keeps it."""

    def as_dict(self) -> dict[str, Any]:
        """The bucket as plain values. `Bucket(**values)` is its inverse."""
        return dict(vars(self))


def fingerprint(name: str, tensor: Tensor) -> str:
    """A hash of the name, dtype, shape and bits of a weight: 32 hexadecimal digits."""
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    digest.update(_bits(tensor).numpy().data)
    return digest.hexdigest()


def fingerprints(weights: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    """The fingerprint of every weight, by name. Hashes several at a time: this is most of the work of a transfer."""
    with ThreadPoolExecutor(_HASHED_AT_A_TIME) as threads:
        return dict(zip((name for name, _ in weights), threads.map(lambda w: fingerprint(*w), weights), strict=True))


def batches(weights: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Split the weights, in their order, into lists of at least `limit` bytes; the last one may be smaller."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextmanager
def shared(batch: list[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Put these weights into shared memory, which is given back at the end of the block.

    Receivers that have mapped it by then keep what they have mapped.
    """
    offsets, size = [], 0
    for _, tensor in batch:
        offsets.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    size = max(size, 1)
    file = os.memfd_create("bapo-weights")
    try:
        os.ftruncate(file, size)
        memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        for offset, (_, tensor) in zip(offsets, batch, strict=True):
            memory[offset : offset + tensor.nbytes] = _bits(tensor)
        yield Bucket(
            names=[name for name, _ in batch],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in batch],
            shapes=[list(tensor.shape) for _, tensor in batch],
            offsets=offsets,
            size=size,
            path=f"/proc/{os.getpid()}/fd/{file}",
        )
    finally:
        os.close(file)


def mapped(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The weights of a bucket in another process. The memory lives as long as one of the tensors."""
    file = os.open(bucket.path, os.O_RDWR)
    try:
        memory = torch.frombuffer(mmap.mmap(file, bucket.size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(file)
    columns = zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True)
    for name, dtype, shape, offset in columns:
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        yield name, memory[offset : offset + size].view(kind).view(shape)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
