"""A decoder layer of Llama, Qwen2 or Qwen3 that takes the place of transformers' own forward pass.

It reads the weights of the transformers layer at every call, so training, sharding and low-rank additions happen there
as before. Values are rounded where transformers rounds them; only the sums inside attention and matrix products have
another order. Low-rank additions are computed in the precision of the states, from float32 matrices. Norms and
attention have gradients of their own, around the kernels; they stand below the layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Linear

from bapo.core.kernels.layers import norm, norm_backward
from bapo.learn.fused.kernels.attention import LONG_FROM, Plan, attend, attend_backward, plan_of
from bapo.learn.fused.kernels.rotation import rotate, rotate_backward
from bapo.learn.fused.linear import gated_project, handed_over, part_of, project
from bapo.models.layers import strange_architecture, strange_projections
from bapo.types import TokenBatch

WIDTHS = (16, 32, 64, 128)
"""Widths of heads that the kernels were made for."""


class Heads(NamedTuple):
    """The heads of an attention layer."""

    queries: int
    keys: int
    width: int
    scale: float
    eps: float
    """Of the norms of heads."""


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
    gains = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    mixed = rotated_attention(qkv, gains, rotation, plan, _heads(attention))
    delta = project(mixed, [part_of(attention.o_proj)])
    x, states = add_norm(x, delta, after.weight, after.variance_epsilon)
    gated = project(states, [part_of(mlp.gate_proj), part_of(mlp.up_proj)])
    return (x + gated_project(gated, part_of(mlp.down_proj)))[None]


def _heads(attention: Any) -> Heads:
    width = attention.head_dim
    linears = (m if isinstance(m, Linear) else m.base_layer for m in (attention.q_proj, attention.k_proj))
    queries, keys = (linear.out_features // width for linear in linears)
    eps = attention.q_norm.variance_epsilon if hasattr(attention, "q_norm") else 0.0
    return Heads(queries, keys, width, attention.scaling, eps)


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its RMS norm. The gradients of both come together in one pass."""
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x, delta, gain, eps)  # type: ignore[no-untyped-call]
    return both


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        added, normed, scales = norm(x, gain, eps, delta)
        ctx.save_for_backward(added, gain, scales)
        ctx.sum, ctx.alone = getattr(gain, "main_grad", None), delta is None
        return added, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        passed_on, gradient = (each.contiguous() for each in gradients)
        added, gain, scales = ctx.saved_tensors
        of_x, of_gain = norm_backward(gradient, added, gain, scales, passed_on)
        given = handed_over(ctx.sum, of_gain, gain) if ctx.needs_input_grad[2] else None
        return of_x, None if ctx.alone else of_x, given, None


def rotated_attention(
    qkv: Tensor,  # [places, (query heads + 2 key heads) * width]; overwritten if there are no gains
    gains: tuple[Tensor, Tensor] | None,  # of the norms of query and key heads, [width] each
    rotation: tuple[Tensor, Tensor],  # cos and sin, [places, width]
    plan: Plan,
    heads: Heads,
) -> Tensor:  # [places, query heads * width]
    """Norm queries and keys if the model does, rotate them, and attend."""
    result: Tensor = _RotatedAttention.apply(qkv, *(gains or (None, None)), rotation, plan, heads)  # type: ignore[no-untyped-call]
    return result


class _RotatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_gain: Tensor | None,
        key_gain: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        plan: Plan,
        heads: Heads,
    ) -> Tensor:
        split, end = heads.queries * heads.width, (heads.queries + heads.keys) * heads.width
        gains = _gain_of_each(query_gain, key_gain, heads)
        rotated = qkv[:, :end] if gains is None else qkv.new_empty(len(qkv), end)
        rotate(qkv[:, :end], rotated, rotation, width=heads.width, gains=gains, eps=heads.eps)
        queries, keys, values = rotated[:, :split], rotated[:, split:], qkv[:, end:]
        out, normalizers = attend(queries, keys, values, plan, width=heads.width, scale=heads.scale)
        ctx.save_for_backward(qkv, rotated, out, normalizers, *rotation, query_gain, key_gain)
        ctx.plan, ctx.heads = plan, heads
        ctx.sums = [getattr(gain, "main_grad", None) for gain in (query_gain, key_gain)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv, rotated, out, normalizers, cos, sin, query_gain, key_gain = ctx.saved_tensors
        heads: Heads = ctx.heads
        split, end = heads.queries * heads.width, (heads.queries + heads.keys) * heads.width
        found = torch.empty_like(qkv)
        attend_backward(
            gradients[0].contiguous(),
            *(rotated[:, :split], rotated[:, split:], qkv[:, end:], out, normalizers, ctx.plan),
            (found[:, :split], found[:, split:end], found[:, end:]),
            width=heads.width,
            scale=heads.scale,
        )
        gains = _gain_of_each(query_gain, key_gain, heads)
        given: list[Tensor | None] = [None, None]
        options: dict[str, Any] = {"width": heads.width, "eps": heads.eps}
        of_gains = rotate_backward(found[:, :end], (cos, sin), source=qkv[:, :end], gains=gains, **options)
        if of_gains is not None:
            halves = of_gains[: heads.queries].sum(0), of_gains[heads.queries :].sum(0)
            for i, gain in enumerate((query_gain, key_gain)):
                if ctx.needs_input_grad[1 + i]:
                    given[i] = handed_over(ctx.sums[i], halves[i], gain)
        return found, *given, None, None, None


def _gain_of_each(query_gain: Tensor | None, key_gain: Tensor | None, heads: Heads) -> Tensor | None:
    """The gain of every head of queries and keys, [heads, width] float32."""
    if query_gain is None or key_gain is None:
        return None
    return torch.cat([query_gain.expand(heads.queries, -1), key_gain.expand(heads.keys, -1)]).float()
