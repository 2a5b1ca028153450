"""The weights that training changes: the part of a model that a checkpoint must keep.

If all weights are trained, the checkpoint keeps all of them, each tied weight once. If most are frozen (low-rank
additions), the frozen ones are read again from model.path. The checkpoint keeps a fingerprint of them, so that
additions are never applied to a model other than the one they were trained on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FINGERPRINT = "frozen.fingerprint"
_LARGE_PRIME = 1_000_003


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Every trained parameter and every buffer, once, and the fingerprint of the frozen weights if there are any."""
    frozen = _frozen(model)
    seen = {tensor.data_ptr() for tensor in frozen.values()}
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    return weights | ({FINGERPRINT: _fingerprint(frozen)} if frozen else {})


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


def _frozen(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _fingerprint(weights: dict[str, Tensor]) -> Tensor:
    """One integer from all their bits. Integer sums wrap around, so device and order of addition do not matter."""
    total = 0
    for tensor in weights.values():
        bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        total = (total * _LARGE_PRIME + int(bits.sum(dtype=torch.int64))) % 2**63
    return torch.tensor([total])
