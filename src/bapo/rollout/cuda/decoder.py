"""The forward pass of Llama, Qwen2 and Qwen3, written for sampling: few launches, static shapes, a cache in pages.

It holds the weights in the layout and dtype that sampling wants (query, key and value in one matrix, gate and up in
another). `load` fills this copy. It costs one pass over the weights per version and memory for one more copy of them,
and saves nine of ten launches per token. Everything else (rotation tables, norms, heads) is read from the transformers
model; `unsupported` says why a model has to be sampled by the general engine instead.

Where a layer has a low-rank addition (model.lora), the copy holds W + (alpha / rank) B A. The sum is computed in
float32 whenever weights are loaded, one layer at a time, and rounded once to the dtype of the engine. The learner
computes W x + (alpha / rank) B (A x) instead. Both are the same policy up to rounding; what is recorded are the
log-probs of the merged weights, which is what was sampled from.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from bapo.core.kernels.layers import add_norm, gate
from bapo.core.wide import wide_linear
from bapo.models.layers import ADDITION, has_addition, merging, strange_architecture, strange_projections
from bapo.rollout.cuda.kernels.attention import rotate_and_store
from bapo.rollout.cuda.pages import PAGE
from bapo.rollout.sittings import copy_weights

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""The rotary embeddings that depend on the position alone."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rotated qkv, keys, values of the layer) -> mixed values [tokens, heads * width]"""


def unsupported(model: PreTrainedModel) -> str | None:
    """The reason why this decoder cannot run a model; None if it can."""
    config = model.config
    if (reason := strange_architecture(config)) is not None:
        return reason
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotation not in ROTATIONS:
        return f"its rotary embedding is {rotation}, which depends on the sequence length"
    if _first_layer(model).self_attn.head_dim % 2:
        return "its heads have an odd width"
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(head) is not nn.Linear or type(base.embed_tokens) is not nn.Embedding:
        kinds = type(head).__name__, type(base.embed_tokens).__name__
        return f"its head and embedding are {kinds[0]} and {kinds[1]}, not plain Linear and Embedding"
    return strange_projections([module for name, module in model.named_modules() if name.endswith("_proj")])


class Decoder:
    """A copy of a model's weights, and the forward pass over them."""

    def __init__(self, model: PreTrainedModel, *, float32_head: bool = False) -> None:
        """`float32_head`: do not round the logits of 16-bit weights to 16 bits."""
        self.model, self.dtype, self.device = model, model.dtype, model.device
        self._read = wide_linear if float32_head else linear
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.width: int = _first_layer(model).self_attn.head_dim
        self.layers: int = config.num_hidden_layers
        self.eps: float = config.rms_norm_eps
        sources = self._sources()
        self._weights = {
            name: torch.empty(
                sum(len(part) for part in parts), *parts[0].shape[1:], dtype=self.dtype, device=self.device
            )
            for name, parts in sources.items()
        }
        self._places: dict[str, Tensor] = {}
        """For each weight of the plain model, by name, the part of our matrices that holds it."""
        names = {parameter: name.replace(".base_layer.", ".") for name, parameter in model.named_parameters()}
        for fused, parts in sources.items():
            rows = [len(part) for part in parts]
            for part, place in zip(parts, torch.split(self._weights[fused], rows), strict=True):
                self._places[names[part]] = place  # type: ignore[index]
        layers = ((name, module) for name, module in model.named_modules() if has_addition(module))
        self._scales = {name: float(module.scaling[ADDITION]) for name, module in layers}
        """alpha / rank of every layer with a low-rank addition, by the layer's name."""
        self._rotation: tuple[Tensor, Tensor] | None = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights, given by their names in the model, in place: captured graphs read the same addresses."""
        copy_weights(merging(weights, self._scales), self._places)

    def _sources(self) -> dict[str, list[Tensor]]:
        """The model's parameters behind each of our matrices, stacked along the first axis."""
        base: Any = self.model.base_model
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        sources: dict[str, list[Any]] = {"embedding": [base.embed_tokens.weight], "norm": [base.norm.weight]}
        if head.weight is not base.embed_tokens.weight:
            sources["head"] = [head.weight]
        sources["head.bias"] = [getattr(head, "bias", None)]
        for i, layer in enumerate(base.layers):
            attention, mlp = layer.self_attn, layer.mlp
            stacks = {
                "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
                "out": (attention.o_proj,),
                "gate_up": (mlp.gate_proj, mlp.up_proj),
                "down": (mlp.down_proj,),
            }
            for name, parts in stacks.items():
                modules = [part.base_layer if has_addition(part) else part for part in parts]
                sources[f"{i}.{name}"] = [module.weight for module in modules]
                sources[f"{i}.{name}.bias"] = [module.bias for module in modules]
            sources[f"{i}.before_attention"] = [layer.input_layernorm.weight]
            sources[f"{i}.before_mlp"] = [layer.post_attention_layernorm.weight]
            if hasattr(attention, "q_norm"):
                sources[f"{i}.query_gain"] = [attention.q_norm.weight]
                sources[f"{i}.key_gain"] = [attention.k_norm.weight]
        return {name: parts for name, parts in sources.items() if parts[0] is not None}

    @torch.no_grad()
    def prepare(self, reach: int) -> None:
        """Compute rotation tables for positions up to `reach`, as the model does."""
        if self._rotation is not None and len(self._rotation[0]) >= reach:
            return
        like = torch.zeros(1, dtype=self.dtype, device=self.device)
        base: Any = self.model.base_model
        cos, sin = base.rotary_emb(like, torch.arange(reach, device=self.device)[None])
        half = self.width // 2
        self._rotation = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def cache(self, pages: int) -> Tensor:
        """An empty cache: [layers, keys and values, pages, kv_heads, PAGE, width]."""
        shape = (self.layers, 2, pages, self.kv_heads, PAGE, self.width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(
        self,
        ids: Tensor,
        slots: Tensor,
        positions: Tensor,
        cache: Tensor,
        table: Tensor,  # [slots, pages per slot]
        attend: Attend,
        *,
        logits: bool = True,
    ) -> Tensor | None:
        """Put the tokens' keys and values into the cache; return logits [tokens, vocabulary] if they are wanted."""
        assert self._rotation is not None
        w = self._weights
        residual, delta = embedding(ids, w["embedding"]), None
        for i in range(self.layers):
            keys, values = cache[i]
            states = add_norm(residual, delta, w[f"{i}.before_attention"], self.eps)
            qkv = linear(states, w[f"{i}.qkv"], w.get(f"{i}.qkv.bias"))
            gains = (w[f"{i}.query_gain"], w[f"{i}.key_gain"]) if f"{i}.query_gain" in w else None
            rotate_and_store(
                qkv, slots, positions, self._rotation, gains, keys, values, table, heads=self.heads, eps=self.eps
            )
            if i == self.layers - 1 and not logits:
                return None
            delta = linear(attend(qkv, keys, values), w[f"{i}.out"], w.get(f"{i}.out.bias"))
            states = add_norm(residual, delta, w[f"{i}.before_mlp"], self.eps)
            opened = gate(linear(states, w[f"{i}.gate_up"], w.get(f"{i}.gate_up.bias")))
            delta = linear(opened, w[f"{i}.down"], w.get(f"{i}.down.bias"))
        states = add_norm(residual, delta, w["norm"], self.eps)
        return self._read(states, w.get("head", w["embedding"]), w.get("head.bias"))


def _first_layer(model: PreTrainedModel) -> Any:
    base: Any = model.base_model
    return base.layers[0]
