"""Low-rank additions, trained instead of all weights: LoRA (arXiv:2106.09685), through peft.

    y = W x + (alpha / rank) B A x          W frozen; A, B trained; B starts at zero, so training starts at the model

The additions are put into the transformers model itself, layer by layer, so the learner and the engines use the same
model as before and cannot miss them. They are float32 whatever the dtype of the model: they are few, and in 16 bits
their updates would round away.

Head and embedding get no additions: the learner multiplies by the head itself, and the two are often one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "default"
"""The name of the model's one set of additions in peft's files."""


@dataclass(frozen=True)
class LoraSettings:
    """What is added, and to which layers."""

    rank: int
    alpha: float | None = None
    """The additions are scaled by alpha / rank. None means twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get additions. Empty means every linear layer except the output head."""


def add_lora(model: Any, settings: LoraSettings, *, seed: int) -> Any:
    """Freeze the model and add to its layers, in place. Returns peft's view of the model, which export needs."""
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            f"model.lora.rank={settings.rank} needs the package peft, which is not installed. Install it with "
            "`pip install 'bapo[lora]'`, or set model.lora.rank=0 to train all weights."
        ) from error
    _check_targets(model, settings.targets)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=list(settings.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise ValueError(
                f"model.lora.rank={settings.rank} cannot be added to {type(model).__name__}: "
                f"{str(error).splitlines()[0]} Choose other model.lora.targets, or set model.lora.rank=0 to train all "
                "weights."
            ) from error


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    """Refuse names that no linear layer has, and the names of the embedding and the head."""
    spared = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = [(name.rsplit(".", 1)[-1], module) for name, module in model.named_modules()]
    linear = sorted({name for name, module in modules if type(module) is torch.nn.Linear and module not in spared})
    for target in targets:
        if target not in linear:
            raise ValueError(
                f"model.lora.targets names {target!r}, which is not a linear layer of {type(model).__name__} that can "
                f"be added to. Name some of {', '.join(linear)}, or none for all of them."
            )


def merged_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the plain model that computes the same: W + (alpha / rank) B A. The model is not changed."""
    layers = dict(_layers(model))
    weights = {}
    for name, tensor in model.state_dict().items():
        layer, _, rest = name.rpartition(".base_layer.")
        if layer in layers and rest == "weight":
            delta = layers[layer].get_delta_weight(NAME)
            weights[f"{layer}.weight"] = (tensor.float() + delta.float()).to(tensor.dtype)
        elif layer in layers:
            weights[f"{layer}.{rest}"] = tensor
        elif not any(name.startswith(f"{added}.lora_") for added in layers):
            weights[name] = tensor
    return weights


def merging(weights: Iterable[tuple[str, Tensor]], settings: LoraSettings) -> Iterator[tuple[str, Tensor]]:
    """The same for parameters that come one after the other, by name, as from a model in shards.

    A layer's own weights come before its additions, as in `named_parameters`; at most one layer is held.
    """
    scale = (2 * settings.rank if settings.alpha is None else settings.alpha) / settings.rank
    held: dict[str, Tensor] = {}
    for name, tensor in weights:
        layer, _, rest = name.rpartition(".base_layer.")
        if rest == "weight" and layer:
            held[layer] = tensor
        elif layer:
            yield f"{layer}.{rest}", tensor
        elif name.endswith(f".lora_A.{NAME}.weight"):
            held[name.removesuffix(f".lora_A.{NAME}.weight") + ".A"] = tensor
        elif name.endswith(f".lora_B.{NAME}.weight"):
            layer = name.removesuffix(f".lora_B.{NAME}.weight")
            whole, down = held.pop(layer), held.pop(f"{layer}.A")
            yield f"{layer}.weight", (whole.float() + scale * (tensor.float() @ down.float())).to(whole.dtype)
        else:
            yield name, tensor
    assert not held, f"layers without additions: {sorted(held)}"


def save_adapter(adapters: Any, directory: Path, *, base: str) -> None:
    """Write only the additions, in peft's format: `PeftModel.from_pretrained(base, directory)` loads them."""
    adapters.peft_config[NAME].base_model_name_or_path = base
    adapters.save_pretrained(directory, save_embedding_layers=False)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers that have additions."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
