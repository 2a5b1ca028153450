"""Low-rank additions (model.lora) in the CUDA engine: its copy of the weights holds W + (alpha / rank) B A.

The sum is computed in float32 whenever weights are loaded, one layer at a time, and rounded once to the dtype of the
engine. The learner computes W x + (alpha / rank) B (A x) instead. Both are the same policy up to rounding; what is
recorded are the log-probs of the merged weights, which is what was sampled from.

Only plain additions are supported, as `bapo train` makes them; `refusal` says what is special about others. peft is not
imported here: its layers are recognised by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NAME = "default"
"""The name of the one set of additions."""
LAYER = "peft.tuners.lora.layer.Linear"
BASE, DOWN, UP = ".base_layer.weight", f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"


def has_addition(module: nn.Module) -> bool:
    """Whether a module is a linear layer with low-rank additions."""
    return f"{type(module).__module__}.{type(module).__qualname__}" == LAYER


def refusal(module: Any) -> str | None:
    """Why the additions of a layer cannot be merged; None if they can."""
    if type(module.base_layer) is not nn.Linear:
        return f"its low-rank additions are to layers of type {type(module.base_layer).__name__}, not plain Linear"
    names = sorted(module.lora_A)
    if names != [NAME] or list(module.active_adapters) != [NAME]:
        return f"it has the low-rank additions {', '.join(names)}, not only {NAME!r}"
    if module.disable_adapters or module.merged:
        return "its low-rank additions are disabled or merged already"
    if module.lora_variant or module.fan_in_fan_out or module.lora_bias[NAME]:
        return "its low-rank additions are of a special kind (such as DoRA, or with a bias)"
    if type(module.lora_dropout[NAME]) is not nn.Identity:
        return "its low-rank additions have dropout"
    return None


def scales_of(model: nn.Module) -> dict[str, float]:
    """alpha / rank of every layer with additions, by the layer's name."""
    layers = ((name, module) for name, module in model.named_modules() if has_addition(module))
    return {name: float(module.scaling[NAME]) for name, module in layers}


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
