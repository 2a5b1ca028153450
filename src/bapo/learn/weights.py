"""The weights that training changes: what a checkpoint has to keep of a model.

Where everything is trained that is everything, each tied weight once. Where most is frozen (low-rank additions) the
rest is read again from where the model came from; a fingerprint of it is kept, so that additions are never put on
another model than they were trained on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FINGERPRINT = "frozen.fingerprint"
_LARGE_PRIME = 1_000_003


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Every trained parameter and every buffer of the state once, and the fingerprint of what is frozen, if any is."""
    frozen = _frozen(model)
    seen = {tensor.data_ptr() for tensor in frozen.values()}
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.contiguous()
    return weights | ({FINGERPRINT: _fingerprint(frozen)} if frozen else {})


def restore_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Put back what `trained_weights` gave; KeyError if it belongs to another model."""
    expected = trained_weights(model)
    unknown, missing = sorted(weights.keys() - expected.keys()), sorted(expected.keys() - weights.keys())
    if unknown or missing:
        raise KeyError(f"{unknown} are unknown and {missing} are missing")
    if FINGERPRINT in expected and not torch.equal(weights[FINGERPRINT], expected[FINGERPRINT]):
        raise KeyError("the frozen weights under the trained ones changed: model.path holds another model now")
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name != FINGERPRINT}, strict=False)


def _frozen(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _fingerprint(weights: dict[str, Tensor]) -> Tensor:
    """One integer of all their bits. Sums of integers wrap around, so neither device nor order of adding matters."""
    total = 0
    for tensor in weights.values():
        bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        total = (total * _LARGE_PRIME + int(bits.sum(dtype=torch.int64))) % 2**63
    return torch.tensor([total])
