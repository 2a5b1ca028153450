"""A decoder layer of Llama, Qwen2 or Qwen3 that takes the place of transformers' own forward pass.

It reads the weights of the transformers layer at every call, so training, sharding and low-rank additions happen there
as before. Values are rounded where transformers rounds them; only the sums inside attention and matrix products have
another order. Low-rank additions are computed in the precision of the states, from float32 matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from bapo.learn.fused.functions import Heads, add_norm, rotated_attention
from bapo.learn.fused.kernels.attention import LONG_FROM, Plan, attend, attend_backward, plan_of
from bapo.learn.fused.linear import gated_project, part_of, project
from bapo.models.layers import strange_architecture, strange_projections
from bapo.types import TokenBatch

WIDTHS = (16, 32, 64, 128)
"""Widths of heads that the kernels were made for."""


def unsupported(model: Any) -> str | None:
    """The reason why the layers of a model cannot be replaced; None if they can."""
    config = model.config
    if (reason := strange_architecture(config)) is not None:
        return reason
    if (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    projections = []
    for layer in model.base_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if attention.head_dim not in WIDTHS:
            return f"its heads are {attention.head_dim} wide, not one of {', '.join(map(str, WIDTHS))}"
        projections += [getattr(attention, f"{name}_proj") for name in "qkvo"]
        projections += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return strange_projections(projections)


@torch.no_grad()
def try_attention(model: Any) -> None:
    """Run attention on a short and on a long sequence, both ways. Raises what Triton raises if this GPU cannot."""
    heads = _heads(model.base_model.layers[0].self_attn)
    split, end = heads.queries * heads.width, (heads.queries + heads.keys) * heads.width
    options: dict[str, Any] = {"width": heads.width, "scale": heads.scale}
    for places in (12, LONG_FROM):
        plan = plan_of(torch.tensor([0, places], dtype=torch.int32, device=model.device), places, places)
        row = torch.zeros(places, 2 * end - split, dtype=model.dtype, device=model.device)
        parts, found = ((x[:, :split], x[:, split:end], x[:, end:]) for x in (row, torch.empty_like(row)))
        out, normalizers = attend(*parts, plan, **options)
        attend_backward(torch.zeros_like(out), *parts, out, normalizers, plan, found, **options)


def fused_forwards(model: Any, batch: TokenBatch) -> list[Callable[..., Tensor]]:
    """The forward pass of each layer for this batch, to be exchanged with transformers' own."""
    layers = model.base_model.layers
    plan = plan_of(batch.offsets, len(batch.input_ids), batch.longest)
    return [partial(_forward, layer, plan) for layer in layers]


def _forward(
    layer: Any,
    plan: Plan,
    hidden_states: Tensor,  # [1, places, width]
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [1, places, head width]
    **__: Any,
) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    rotation = position_embeddings[0][0], position_embeddings[1][0]
    x, states = add_norm(hidden_states[0], None, before.weight, before.variance_epsilon)
    qkv = project(states, [part_of(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj)])
    mixed = rotated_attention(qkv, _gains(attention), rotation, plan, _heads(attention))
    delta = project(mixed, [part_of(attention.o_proj)])
    x, states = add_norm(x, delta, after.weight, after.variance_epsilon)
    gated = project(states, [part_of(mlp.gate_proj), part_of(mlp.up_proj)])
    return (x + gated_project(gated, part_of(mlp.down_proj)))[None]


def _heads(attention: Any) -> Heads:
    width = attention.head_dim
    queries, keys = (_outputs(module) // width for module in (attention.q_proj, attention.k_proj))
    eps = attention.q_norm.variance_epsilon if hasattr(attention, "q_norm") else 0.0
    return Heads(queries, keys, width, attention.scaling, eps)


def _outputs(module: Any) -> int:
    linear: Linear = module if isinstance(module, Linear) else module.base_layer
    return linear.out_features


def _gains(attention: Any) -> tuple[Tensor, Tensor] | None:
    return (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
