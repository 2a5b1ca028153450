"""The layers of a model: low-rank additions to them (LoRA, arXiv:2106.09685), and which of them our kernels compute.

    y = W x + (alpha / rank) B A x          W frozen; A, B trained; B starts at zero, so training starts at the model

The additions are trained instead of all weights. peft puts them into the transformers model itself, layer by layer, so
the learner and the engines use the same model as before and cannot miss them. They are float32 whatever the dtype of
the model: they are few, and in 16 bits their updates would round away. Head and embedding get none: the learner
multiplies by the head itself, and the two are often one matrix.

Our kernels, in the sampler on CUDA and in the learner's fused layers, compute Llama, Qwen2 and Qwen3, with plain linear
layers or with plain additions to them, as `bapo train` makes them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "qwen2", "qwen3")
ADDITION = "default"
"""The name of the one set of low-rank additions."""
LAYER = "peft.tuners.lora.layer.Linear"
_PART = re.compile(rf"(.+)\.(base_layer|lora_A\.{ADDITION}|lora_B\.{ADDITION})\.weight")
"""The names of the weights of a layer with low-rank additions: its own, A and B."""


@dataclass(frozen=True)
class LoraSettings:
    """What is added, and to which layers."""

    rank: int
    alpha: float | None = None
    """The additions are scaled by alpha / rank. None means twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get additions. Empty means every linear layer except the output head."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


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
                f"{str(error).splitlines()[0]} Choose other model.lora.targets, or set model.lora.rank=0."
            ) from error


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    """Refuse names that no linear layer has, and the names of the embedding and the head."""
    spared = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = [(name.rsplit(".", 1)[-1], module) for name, module in model.named_modules()]
    linear = sorted({name for name, module in modules if type(module) is nn.Linear and module not in spared})
    if unknown := [target for target in targets if target not in linear]:
        raise ValueError(
            f"model.lora.targets names {unknown[0]!r}, which is not a linear layer of {type(model).__name__} that can "
            f"be added to. Name some of {', '.join(linear)}, or none for all of them."
        )


def merged_weights(model: Any) -> dict[str, Tensor]:
    """The weights of the plain model that computes the same: W + (alpha / rank) B A. The model is not changed."""
    layers = ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
    return dict(merging(model.state_dict().items(), {name: module.scaling[ADDITION] for name, module in layers}))


def merging(weights: Iterable[tuple[str, Tensor]], scale: float | Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """The same for parameters that come one after the other, by name, as from a model in shards.

    `scale`: alpha / rank, or that of each layer. Parts of a layer may come in any order; the last gives it out.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        part = _PART.fullmatch(name)
        if part is None:
            yield name.replace(".base_layer.", "."), tensor
            continue
        layer = part[1]
        parts = held.setdefault(layer, {})
        parts[part[2]] = tensor
        if len(parts) == 3:
            whole, down, up = (parts[key] for key in sorted(parts))
            del held[layer]
            fits = whole.shape == (len(up), down.shape[1]) and up.shape[1] == len(down)
            assert fits, f"the low-rank additions of the layer {layer!r} have other shapes than its weight"
            factor = scale if isinstance(scale, float) else scale[layer]
            yield f"{layer}.weight", (whole.float() + factor * (up.float() @ down.float())).to(whole.dtype)


def strange_architecture(config: Any) -> str | None:
    """Why the layers of a model with this configuration are not of the kind we compute; None if they are."""
    if config.model_type not in FAMILIES:
        return f"its architecture is {config.model_type}, not one of {', '.join(FAMILIES)}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "some of its layers have a sliding window"
    return None if config.hidden_act == "silu" else f"its activation is {config.hidden_act}, not silu"


def has_addition(module: nn.Module) -> bool:
    """Whether a module is a linear layer with low-rank additions. peft is not imported: its layers go by their name."""
    return _name(module) == LAYER


@contextmanager
def without_additions(model: Any) -> Iterator[None]:
    """Inside, the model computes what it computed before anything was added: every addition is multiplied by 0.

    A switch of peft would do the same in its own forward pass only; the fused layers read the factor.
    """
    before = {module: module.scaling[ADDITION] for module in model.modules() if hasattr(module, "lora_A")}
    try:
        for layer in before:
            layer.scaling[ADDITION] = 0.0
        yield
    finally:
        for layer, factor in before.items():
            layer.scaling[ADDITION] = factor


def strange_projections(modules: list[nn.Module]) -> str | None:
    """Why these are not all plain linear layers, or such layers with the additions of `add_lora`; None if they are."""
    strangers = {_name(m) for m in modules if type(m) is not nn.Linear and not has_addition(m)}
    if strangers:
        return f"its projections are {', '.join(sorted(strangers))}, not plain Linear"
    added: list[Any] = [module for module in modules if has_addition(module)]
    if all(list(each.lora_A) == [ADDITION] and not each.disable_adapters and not each.merged for each in added):
        return None
    return f"it has other low-rank additions than {ADDITION!r}, or they are disabled or merged"


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
