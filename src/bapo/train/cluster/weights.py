"""The weights of one version on their way from the learner to the engines, and how an engine is checked afterwards.

    Parcel      every weight as plain bytes, in shared memory on each machine that needs it; never pickled tensors
    Published   where the parcel of a version is, the fingerprint of its bits, and what a right engine must say

An engine that has loaded a parcel is used only if all three agree: the fingerprint of what arrived, the names of what
it loaded, and the log-probs of what it samples. Versions can be told apart by the fingerprint, because one changed bit
changes it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """One weight as bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


Parcel = list[Packed]


@dataclass(frozen=True)
class Probe:
    """What an engine with the right weights says after a few contexts."""

    contexts: list[list[int]]
    logprobs: NDArray[np.float32]
    """[contexts, vocabulary] log-probs of the next token, at temperature 1."""
    temperature: float
    """The temperature to sample at."""


@dataclass(frozen=True)
class Published:
    """The weights of one version, for engines to load. It is handed to `Engine.load` in place of the weights."""

    version: int
    parcel: Any
    """A reference to the parcel."""
    fingerprint: str
    probe: Probe

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        raise TypeError("published weights go to a fleet of engines, which loads them where the engines are.")


def pack(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Parcel:
    """Copy every weight to the host in this precision, or in its own."""
    parcel = []
    for name, weight in weights:
        host = weight.detach().to(device="cpu", dtype=dtype).contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy()
        parcel.append(Packed(name, str(host.dtype).removeprefix("torch."), tuple(host.shape), data))
    return parcel


def unpack(parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
    """The weights of a parcel. They share its memory, which must not be written to."""
    for packed in parcel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that it could be written to
            flat = torch.from_numpy(packed.data)
        yield packed.name, flat.view(getattr(torch, packed.dtype)).view(packed.shape)


BLOCK = 4096
"""How many 64-bit words of a weight are summed before they enter the digest."""


def fingerprint(parcel: Parcel) -> str:
    """A digest of names, types, shapes and bits.

    The bits of a weight enter as sums of blocks of 64-bit words, which wrap around. This reads as fast as memory does.
    A single changed bit changes it, and so do blocks that have changed places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for packed in parcel:
        words = packed.data[: len(packed.data) // 8 * 8].view(np.int64)
        whole = words[: len(words) // BLOCK * BLOCK].reshape(-1, BLOCK).sum(1, dtype=np.int64)
        digest.update(repr((packed.name, packed.dtype, packed.shape)).encode())
        digest.update(whole.tobytes() + packed.data[whole.size * BLOCK * 8 :].tobytes())
    return digest.hexdigest()
