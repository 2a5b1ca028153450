"""The weights of one version on their way from the learner to the engines, and how an engine is checked afterwards.

    Parcel      every weight as plain bytes, in shared memory on each machine that needs it; never pickled tensors
    Published   where the parcel of a version is, the fingerprint of its bits, and what a right engine must say

An engine that has loaded a parcel is used only if all three agree: the fingerprint of what arrived, the names of what
it loaded, and the log-probs of what it samples. Versions can be told apart by the fingerprint, because one changed bit
changes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.models.bits import Packed, packed

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
    return [packed(name, weight.detach().to(device="cpu", dtype=dtype)) for name, weight in weights]
