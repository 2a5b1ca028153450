"""The forward pass of Llama, Qwen2 and Qwen3, written for sampling: few launches, static shapes, a cache in pages.

It holds the weights in the layout and dtype that sampling wants (query, key and value in one matrix, gate and up in
another). `load` fills this copy. It costs one pass over the weights per version and memory for one more copy of them,
and saves nine of ten launches per token. Everything else (rotation tables, norms, heads) is read from the transformers
model; `unsupported` says why a model has to be sampled by the general engine instead.

Where a layer has a low-rank addition (model.lora), the copy holds W + (alpha / rank) B A. The sum is computed in
float32 whenever weights are loaded, one layer at a time, and rounded once to the dtype of the engine. The learner
computes W x + (alpha / rank) B (A x) instead. Both are the same policy up to rounding; what is recorded are the
log-probs of the merged weights, which is what was sampled from.

With precision "fp8", the copy holds the matrices of the layers in eight bits, rounded whenever weights are loaded, and
what they multiply is rounded row by row; with "fp8-weights", that keeps its bits (`kernels/eight_bits.py`). Everything
else stays as it is: embedding, norms, attention, keys, values and head.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from bapo.core.kernels import layers
from bapo.core.wide import wide_linear
from bapo.models.layers import ADDITION, has_addition, merging, strange_architecture, strange_projections
from bapo.rollout.cuda.kernels import eight_bits
from bapo.rollout.cuda.kernels.attention import rotate_and_store
from bapo.rollout.cuda.pages import PAGE
from bapo.rollout.engine import Precision
from bapo.rollout.sittings import copy_weights

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""The rotary embeddings that depend on the position alone."""

MATRICES = ("qkv", "out", "gate_up", "down")
"""The matrices of a layer."""
PARTS: dict[Precision, int] = {"model": 0, "fp8": 1, "fp8-weights": 2}
"""How many rows in eight bits make one row of states."""
SCALES = ".scales"
"""What follows the name of a weight in eight bits in the name of its scales."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rotated qkv, keys, values of the layer) -> mixed values [tokens, heads * width]"""


def unsupported(model: PreTrainedModel, precision: Precision = "model") -> str | None:
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
    projections: list[Any] = [module for name, module in model.named_modules() if name.endswith("_proj")]
    if PARTS[precision] and (reason := eight_bits.unsupported(projections, model.dtype, model.device)) is not None:
        return reason
    return strange_projections(projections)


class Decoder:
    """A copy of a model's weights, and the forward pass over them."""

    def __init__(self, model: PreTrainedModel, *, float32_head: bool = False, precision: Precision = "model") -> None:
        """`float32_head`: do not round the logits of 16-bit weights to 16 bits. `precision`: of the layers."""
        self.model, self.dtype, self.device = model, model.dtype, model.device
        self._parts = PARTS[precision]
        self._read = wide_linear if float32_head else linear
        config = model.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.width: int = _first_layer(model).self_attn.head_dim
        self.layers: int = config.num_hidden_layers
        self.eps: float = config.rms_norm_eps
        sources = self._sources()
        self._weights: dict[str, Tensor] = {}
        self._places: dict[str, Tensor] = {}
        """For each weight of the plain model, by name, the part of our matrices that holds it."""
        names = {parameter: name.replace(".base_layer.", ".") for name, parameter in model.named_parameters()}
        for fused, parts in sources.items():
            self._make_room(fused, {names[part]: part for part in parts})  # type: ignore[index]
        layers = ((name, module) for name, module in model.named_modules() if has_addition(module))
        self._scales = {name: float(module.scaling[ADDITION]) for name, module in layers}
        """alpha / rank of every layer with a low-rank addition, by the layer's name."""
        self._rotation: tuple[Tensor, Tensor] | None = None

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights, given by their names in the model, in place: captured graphs read the same addresses."""
        copy_weights(self._rounded(merging(weights, self._scales)), self._places)

    def _make_room(self, fused: str, parts: dict[str, Tensor]) -> None:
        """Allocate one of our weights, which holds these of the plain model, one after the other."""
        rows, width = [len(part) for part in parts.values()], next(iter(parts.values())).shape[1:]
        kinds = {"": (self.dtype, width)}
        if self._parts and fused.rpartition(".")[2] in MATRICES:
            kinds = {"": (eight_bits.EIGHT, width), SCALES: (torch.float32, torch.Size())}
        for kind, (dtype, width) in kinds.items():
            weight = self._weights[fused + kind] = torch.empty(sum(rows), *width, dtype=dtype, device=self.device)
            self._places |= zip((name + kind for name in parts), torch.split(weight, rows), strict=True)

    def _rounded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; those that are kept in eight bits, with their scales."""
        for name, tensor in weights:
            if name + SCALES in self._places:
                tensor, scales = eight_bits.round_rows(tensor.to(self.device, self.dtype))
                yield name + SCALES, scales
            yield name, tensor

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
        functions: tuple[Any, ...] = (layers.add_norm, layers.gate, _as_it_is)
        if self._parts:
            in_eight_bits = (eight_bits.add_norm, eight_bits.gate, eight_bits.rounded)
            functions = tuple(partial(function, parts=self._parts) for function in in_eight_bits)
        add_norm, gate, ready = functions
        residual, delta = embedding(ids, w["embedding"]), None
        for i in range(self.layers):
            keys, values = cache[i]
            states = add_norm(residual, delta, w[f"{i}.before_attention"], self.eps)
            qkv = self._product(states, f"{i}.qkv")
            gains = (w[f"{i}.query_gain"], w[f"{i}.key_gain"]) if f"{i}.query_gain" in w else None
            rotate_and_store(
                qkv, slots, positions, self._rotation, gains, keys, values, table, heads=self.heads, eps=self.eps
            )
            if i == self.layers - 1 and not logits:
                return None
            delta = self._product(ready(attend(qkv, keys, values)), f"{i}.out")
            states = add_norm(residual, delta, w[f"{i}.before_mlp"], self.eps)
            delta = self._product(gate(self._product(states, f"{i}.gate_up")), f"{i}.down")
        states = layers.add_norm(residual, delta, w["norm"], self.eps)
        return self._read(states, w.get("head", w["embedding"]), w.get("head.bias"))

    def _product(self, states: Any, name: str) -> Tensor:
        """States, rounded to eight bits if the matrix is, times one of the matrices."""
        weight, bias = self._weights[name], self._weights.get(f"{name}.bias")
        if not self._parts:
            return linear(states, weight, bias)
        rounded = weight, self._weights[name + SCALES]
        return eight_bits.product(states, rounded, bias, self.dtype, parts=self._parts)


def _as_it_is(states: Tensor) -> Tensor:
    return states


def _first_layer(model: PreTrainedModel) -> Any:
    base: Any = model.base_model
    return base.layers[0]
