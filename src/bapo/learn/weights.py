"""The weights that training changes: the part of a model that a checkpoint must keep.

If all weights are trained, the checkpoint keeps all of them, each tied weight once. If most are frozen (low-rank
additions), the frozen ones are read again from model.path. The checkpoint keeps a fingerprint of them, so that
additions are never applied to a model other than the one they were trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bapo.learn.ranks import Ranks, summed

FINGERPRINT = "frozen.fingerprint"
_LARGE_PRIME = 1_000_003


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Every trained parameter and every buffer, once, and the fingerprint of the frozen weights if there are any."""
    frozen = frozen_weights(model)
    seen = {tensor.data_ptr() for tensor in frozen.values()}
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    return weights | ({FINGERPRINT: torch.tensor([fingerprint(frozen.values())])} if frozen else {})


def restore_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Restore what `trained_weights` returned. Raises KeyError if it belongs to another model."""
    expected = trained_weights(model)
    unknown, missing = sorted(weights.keys() - expected.keys()), sorted(expected.keys() - weights.keys())
    if unknown or missing:
        raise KeyError(f"the weights {unknown} are unknown and {missing} are missing")
    other = [name for name, tensor in weights.items() if tensor.shape != expected[name].shape]
    if other:
        raise KeyError(f"the weights {other} have other shapes")
    if FINGERPRINT in expected and not torch.equal(weights[FINGERPRINT], expected[FINGERPRINT]):
        raise KeyError("the frozen weights below the trained ones have changed: model.path holds another model now")
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name != FINGERPRINT}, strict=False)


def frozen_weights(model: Any) -> dict[str, Tensor]:
    """The weights that training does not change."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


@torch.no_grad()
def fingerprint(weights: Iterable[Tensor], ranks: Ranks = None) -> int:
    """One integer from all their bits; of shards, from those of all ranks, which must call this together.

    Integer sums wrap around, so device, order of addition and number of shards do not matter.
    """
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in weights]
    total = 0
    for count in summed(torch.stack(sums), ranks).tolist() if sums else []:
        total = (total * _LARGE_PRIME + count) % 2**63
    return total


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor, or of this rank's shard of it, as integers."""
    mine = (tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()).contiguous()
    return mine.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[mine.element_size()])
