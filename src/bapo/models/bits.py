"""A weight as plain bytes: how weights travel between processes, and how two sets of weights are told apart.

Nothing is pickled. What a learner's ranks compare is another number (`learn/state.py`), because it must be the same
however the weights are spread over them.
"""

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 4096
"""How many 64-bit words of a weight are summed before they enter the digest."""


@dataclass(frozen=True)
class Packed:
    """One weight as bytes."""

    name: str
    dtype: str
    """For example float32, a name in torch."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


def packed(name: str, weight: Tensor) -> Packed:
    """A weight as bytes in the host's memory, where it is not copied if it lies there already."""
    host = weight.detach().cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy()
    return Packed(name, str(host.dtype).removeprefix("torch."), tuple(host.shape), data)


def unpacked(weight: Packed) -> tuple[str, Tensor]:
    """The name of a weight, and the weight. It shares the memory of the bytes, which must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it could be written to
        flat = torch.from_numpy(weight.data)
    return weight.name, flat.view(getattr(torch, weight.dtype)).view(weight.shape)


def fingerprint(weights: Iterable[Packed]) -> str:
    """A digest of names, types, shapes and bits, in their order: 32 hexadecimal digits.

    The bits of a weight enter as sums of blocks of 64-bit words, which wrap around. This reads as fast as memory does.
    A single changed bit changes it, and so do blocks that have changed places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for weight in weights:
        words = weight.data[: len(weight.data) // 8 * 8].view(np.int64)
        whole = words[: len(words) // BLOCK * BLOCK].reshape(-1, BLOCK).sum(1, dtype=np.int64)
        digest.update(repr((weight.name, weight.dtype, weight.shape)).encode())
        digest.update(whole.tobytes() + weight.data[whole.size * BLOCK * 8 :].tobytes())
    return digest.hexdigest()
