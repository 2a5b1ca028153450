"""Which models have layers that our own kernels compute, in the sampler on CUDA and in the learner's fused layers.

Llama, Qwen2 and Qwen3, with plain linear layers or with plain low-rank additions to them, as `bapo train` makes them.
Also, how the additions are left out of a pass, whoever computes it. peft is not imported here: its layers are
recognised by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

FAMILIES = ("llama", "qwen2", "qwen3")
ADDITION = "default"
"""The name of the one set of low-rank additions."""
LAYER = "peft.tuners.lora.layer.Linear"


def strange_architecture(config: Any) -> str | None:
    """Why the layers of a model with this configuration are not of the kind we compute; None if they are."""
    if config.model_type not in FAMILIES:
        return f"its architecture is {config.model_type}, not one of {', '.join(FAMILIES)}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "some of its layers have a sliding window"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    return None


def has_addition(module: nn.Module) -> bool:
    """Whether a module is a linear layer with low-rank additions."""
    return _name(module) == LAYER


@contextmanager
def without_additions(model: Any) -> Iterator[None]:
    """Inside, the model computes what it computed before anything was added: every addition is multiplied by 0.

    A switch of peft would do the same in its own forward pass only; the fused layers read the factor.
    """
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    before = [layer.scaling[ADDITION] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADDITION] = 0.0
        yield
    finally:
        for layer, factor in zip(layers, before, strict=True):
            layer.scaling[ADDITION] = factor


def strange_projections(modules: list[nn.Module]) -> str | None:
    """Why these are not all plain linear layers, or such layers with plain low-rank additions; None if they are."""
    strangers = {_name(m) for m in modules if type(m) is not nn.Linear and not has_addition(m)}
    if strangers:
        return f"its projections are {', '.join(sorted(strangers))}, not plain Linear"
    return next(filter(None, (_strange_addition(module) for module in modules if has_addition(module))), None)


def _strange_addition(module: Any) -> str | None:
    """What is special about the low-rank additions of a layer; None if nothing is."""
    if type(module.base_layer) is not nn.Linear:
        return f"its low-rank additions are to layers of type {type(module.base_layer).__name__}, not plain Linear"
    names = sorted(module.lora_A)
    if names != [ADDITION] or list(module.active_adapters) != [ADDITION]:
        return f"it has the low-rank additions {', '.join(names)}, not only {ADDITION!r}"
    if module.disable_adapters or module.merged:
        return "its low-rank additions are disabled or merged already"
    if module.lora_variant or module.fan_in_fan_out or module.lora_bias[ADDITION]:
        return "its low-rank additions are of a special kind (such as DoRA, or with a bias)"
    if type(module.lora_dropout[ADDITION]) is not nn.Identity:
        return "its low-rank additions have dropout"
    return None


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
