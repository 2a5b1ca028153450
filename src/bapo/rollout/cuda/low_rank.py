"""Low-rank additions (model.lora) in the CUDA engine: its copy of the weights holds W + (alpha / rank) B A.

The sum is computed in float32 whenever weights are loaded, one layer at a time, and rounded once to the dtype of the
engine. The learner computes W x + (alpha / rank) B (A x) instead. Both are the same policy up to rounding; what is
recorded are the log-probs of the merged weights, which is what was sampled from.

Only plain additions are supported, as `bapo train` makes them (`models/layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from bapo.models.layers import ADDITION, has_addition

BASE, DOWN, UP = ".base_layer.weight", f".lora_A.{ADDITION}.weight", f".lora_B.{ADDITION}.weight"


def scales_of(model: nn.Module) -> dict[str, float]:
    """alpha / rank of every layer with additions, by the layer's name."""
    layers = ((name, module) for name, module in model.named_modules() if has_addition(module))
    return {name: float(module.scaling[ADDITION]) for name, module in layers}


def merged(weights: Iterable[tuple[str, Tensor]], scales: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """The weights by name, where layers with additions have them merged into their base layer's weight.

    The three parts of a layer may come in any order; when the last of them comes, the layer's weight is given out.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        part = next((part for part in (BASE, DOWN, UP) if name.endswith(part)), "")
        layer = name.removesuffix(part)
        if not part or layer not in scales:
            yield name, tensor
            continue
        parts = held.setdefault(layer, {})
        parts[part] = tensor
        if len(parts) == 3:
            del held[layer]
            yield layer + BASE, _sum(layer, parts[BASE], parts[DOWN], parts[UP], scale=scales[layer])


@torch.no_grad()
def _sum(layer: str, base: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    if base.shape != (len(up), down.shape[1]) or up.shape[1] != len(down):
        raise ValueError(
            f"the layer {layer!r} has a weight of shape {tuple(base.shape)}, but its low-rank additions have shapes "
            f"{tuple(up.shape)} and {tuple(down.shape)}. Build a new engine."
        )
    return base.float() + scale * (up.float() @ down.float())
