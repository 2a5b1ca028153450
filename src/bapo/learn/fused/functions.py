"""Norms and attention of a layer as functions with gradients, around the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo.core.kernels.norm import norm
from bapo.learn.fused.kernels.attention import Plan, attend, attend_backward
from bapo.learn.fused.kernels.norm import norm_backward
from bapo.learn.fused.kernels.rotation import rotate, rotate_backward
from bapo.learn.fused.linear import handed_over


class Heads(NamedTuple):
    """The heads of an attention layer."""

    queries: int
    keys: int
    width: int
    scale: float
    eps: float
    """Of the norms of heads."""


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
        gains = _gains(query_gain, key_gain, heads)
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
        gains = _gains(query_gain, key_gain, heads)
        given: list[Tensor | None] = [None, None]
        options: dict[str, Any] = {"width": heads.width, "eps": heads.eps}
        of_gains = rotate_backward(found[:, :end], (cos, sin), source=qkv[:, :end], gains=gains, **options)
        if of_gains is not None:
            halves = of_gains[: heads.queries].sum(0), of_gains[heads.queries :].sum(0)
            for i, gain in enumerate((query_gain, key_gain)):
                if ctx.needs_input_grad[1 + i]:
                    given[i] = handed_over(ctx.sums[i], halves[i], gain)
        return found, *given, None, None, None


def _gains(query_gain: Tensor | None, key_gain: Tensor | None, heads: Heads) -> Tensor | None:
    """The gain of every head of queries and keys, [heads, width] float32."""
    if query_gain is None or key_gain is None:
        return None
    return torch.cat([query_gain.expand(heads.queries, -1), key_gain.expand(heads.keys, -1)]).float()
