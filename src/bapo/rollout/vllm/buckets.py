"""Weights on their way from one process to others of the same machine, in shared memory, and whether they arrive.

The sender packs tensors into buckets. A bucket is an anonymous file in memory (memfd), which the receivers open through
the sender's entry in /proc and map. It has no name in any directory, so nothing remains of it when the sender dies, and
its size is not limited by that of /dev/shm.

Both sides compute the fingerprint of every weight from their own copy.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo.models.bits import Packed, fingerprint, packed, unpacked

BUCKET_BYTES = 512 * 2**20
"""A bucket is sent when it holds this many bytes. One weight may be larger; then it has a bucket to itself."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class Bucket:
    """Weights that lie in one piece of shared memory. It travels as plain values: `Bucket(**vars(bucket))`."""

    weights: list[list[Any]]
    """The name of each, its dtype, its shape, and where it begins, in bytes."""
    size: int
    path: str
    """Where another process of the same user opens the memory while the sender keeps it."""


def fingerprints(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The fingerprint of every weight, by name."""
    return {name: fingerprint([packed(name, tensor)]) for name, tensor in weights}


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
    weights = [packed(name, tensor) for name, tensor in batch]
    *offsets, size = accumulate((-(-len(weight.data) // _ALIGNMENT) * _ALIGNMENT for weight in weights), initial=0)
    size = max(size, 1)
    file = os.memfd_create("bapo-weights")
    try:
        os.ftruncate(file, size)
        memory = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
        for offset, weight in zip(offsets, weights, strict=True):
            memory[offset : offset + len(weight.data)] = weight.data
        table = [[w.name, w.dtype, list(w.shape), offset] for w, offset in zip(weights, offsets, strict=True)]
        yield Bucket(table, size, path=f"/proc/{os.getpid()}/fd/{file}")
    finally:
        os.close(file)


def mapped(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The weights of a bucket in another process. The memory lives as long as one of the tensors."""
    file = os.open(bucket.path, os.O_RDWR)
    try:
        memory = np.frombuffer(mmap.mmap(file, bucket.size, access=mmap.ACCESS_COPY), dtype=np.uint8)
    finally:
        os.close(file)
    for name, dtype, shape, begin in bucket.weights:
        end = begin + math.prod(shape) * getattr(torch, dtype).itemsize
        yield unpacked(Packed(name, dtype, tuple(shape), memory[begin:end]))


def fitting(
    weights: Iterable[tuple[str, Tensor]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """The weights in ordinary memory, each checked against the names and shapes that the model has."""
    for name, tensor in weights:
        if name not in expected:
            raise ValueError(
                f"the engine's model has no weight {name!r}, so vLLM cannot load it. The learner trains another model, "
                "or it has adapters: merge them into the weights before they are sent."
            )
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(
                f"the weight {name!r} has shape {tuple(tensor.shape)}, but the engine's model has {expected[name]}. "
                "Start the engine from the learner's model."
            )
        yield name, tensor.detach().cpu()


def check_arrived(reports: Sequence[dict[str, Any]], sent: dict[str, str], expected: set[str]) -> None:
    """Compare what the workers report with what was sent, and what was sent with what the model has."""
    wrong: dict[str, set[str]] = {"not sent": expected - sent.keys()}
    for report in reports:
        arrived = report["fingerprints"]
        found = {
            "sent, but not arrived in a worker": sent.keys() - arrived.keys(),
            "arrived in a worker with other bits": {n for n in sent if arrived.get(n, sent[n]) != sent[n]},
            "in vLLM's model, but not loaded": set(report["not_loaded"]),
        }
        wrong = {what: wrong.get(what, set()) | found.get(what, set()) for what in (*wrong, *found)}
    counted = {what: "" if len(names) == 1 else f"{len(names)}, such as " for what, names in wrong.items() if names}
    problems = [f"{what}: {count}{min(wrong[what])}" for what, count in counted.items()]
    if problems:
        raise ValueError(
            f"vLLM does not have all weights as the learner has them ({'; '.join(problems)}), so it would sample from "
            "a policy that never existed. The engine samples nothing until all weights have been loaded again."
        )
