"""Linear layers that read the same states, as one matrix product, and the gradients of their weights in float32.

    y = x W' + b,   W: the weights of q, k and v, or of gate and up, one above the other
    with low-rank additions, for each of them:   y += scale (x A') B'

If the weights lie one after the other in memory (`optimizer.py`), stacking them costs nothing.

A weight that has a `main_grad` gets its gradient added to that, in float32, by the matrix product itself. The backward
pass then gives torch no gradient for it. Other weights get one as usual, in their own precision.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Linear

from bapo.core.kernels.layers import gate, gate_backward
from bapo.models.layers import ADDITION


class Part(NamedTuple):
    """One linear layer."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None = None
    down: Tensor | None = None  # A, [rank, inputs] float32, of the low-rank addition
    up: Tensor | None = None  # B, [outputs, rank] float32
    scale: float = 1.0


def part_of(module: Any) -> Part:
    """A linear layer as it is now, with its addition if it has one."""
    if isinstance(module, Linear):
        return Part(module.weight, module.bias)
    base = module.base_layer
    down, up = module.lora_A[ADDITION].weight, module.lora_B[ADDITION].weight
    return Part(base.weight, base.bias, down, up, float(module.scaling[ADDITION]))


def project(states: Tensor, parts: Sequence[Part]) -> Tensor:  # [rows, inputs] -> [rows, outputs of all parts]
    """The outputs of these layers, side by side."""
    scales = tuple(part.scale for part in parts)
    result: Tensor = _Project.apply(states, scales, *(tensor for part in parts for tensor in part[:4]))  # type: ignore[no-untyped-call]
    return result


def gated_project(gated: Tensor, part: Part) -> Tensor:  # [rows, 2 inputs] -> [rows, outputs]
    """The same for a layer behind the gate, silu(first half) * second half. The backward pass opens the gate again."""
    result: Tensor = _GatedProject.apply(gated, (part.scale,), *part[:4])  # type: ignore[no-untyped-call]
    return result


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, scales: tuple[float, ...], *tensors: Tensor | None) -> Tensor:
        return _forward(ctx, states, states, _parts(tensors, scales))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        states, *tensors = ctx.saved_tensors
        parts = _parts(tensors, ctx.scales)
        of_states = _of_states(gradient, parts) if ctx.needs_input_grad[0] else None
        return of_states, None, *_of_weights(ctx, gradient, states, parts)


class _GatedProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gated: Tensor, scales: tuple[float, ...], *tensors: Tensor | None) -> Tensor:
        return _forward(ctx, gate(gated), gated, _parts(tensors, scales))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        gated, *tensors = ctx.saved_tensors
        parts = _parts(tensors, ctx.scales)
        of_gated, states = gate_backward(_of_states(gradient, parts), gated)
        return of_gated, None, *_of_weights(ctx, gradient, states, parts)


def _parts(tensors: Sequence[Any], scales: Sequence[float]) -> list[Part]:
    fours = (tensors[i : i + 4] for i in range(0, len(tensors), 4))
    return [Part(weight, bias, down, up, scale) for (weight, bias, down, up), scale in zip(fours, scales, strict=True)]


def _forward(ctx: Any, states: Tensor, kept: Tensor, parts: Sequence[Part]) -> Tensor:
    biases = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "some of the layers have a bias, others have none"
    out = torch.nn.functional.linear(states, stacked([p.weight for p in parts]), stacked(biases) if biases else None)
    for part, columns in zip(parts, _columns(parts), strict=True):
        if part.down is not None and part.up is not None:
            down, up = part.down.to(states.dtype), part.up.to(states.dtype)
            out[:, columns].addmm_(states @ down.T, up.T, alpha=part.scale)
    ctx.scales = tuple(part.scale for part in parts)
    ctx.sums = [getattr(tensor, "main_grad", None) for part in parts for tensor in part[:4]]
    ctx.save_for_backward(kept, *(tensor for part in parts for tensor in part[:4]))
    return out


def _of_states(gradient: Tensor, parts: Sequence[Part]) -> Tensor:
    """dx = dy W + scale (dy B) A"""
    out = gradient @ stacked([part.weight for part in parts])
    for part, columns in zip(parts, _columns(parts), strict=True):
        if part.down is not None and part.up is not None:
            down, up = part.down.to(gradient.dtype), part.up.to(gradient.dtype)
            out.addmm_(gradient[:, columns] @ up, down, alpha=part.scale)
    return out


def _of_weights(ctx: Any, gradient: Tensor, states: Tensor, parts: Sequence[Part]) -> list[Tensor | None]:
    """dW = dy' x,  db = sum dy,  dB = scale dy' (x A'),  dA = scale (dy B)' x;  None where a `main_grad` took it."""
    needed = ctx.needs_input_grad[2:]
    found: list[Tensor | None] = [None] * len(needed)
    weights = range(0, len(needed), 4)
    if all(needed[i] and ctx.sums[i] is not None for i in weights) and adjacent([ctx.sums[i] for i in weights]):
        add_product(stacked([ctx.sums[i] for i in weights]), gradient.T, states)
        needed = [need and i % 4 != 0 for i, need in enumerate(needed)]
    for index, (part, columns) in enumerate(zip(parts, _columns(parts), strict=True)):
        at, own = 4 * index, gradient[:, columns]
        if needed[at]:
            found[at] = _given(ctx.sums[at], own.T, states, part.weight)
        if needed[at + 1] and part.bias is not None:
            found[at + 1] = handed_over(ctx.sums[at + 1], own.sum(0, dtype=torch.float32), part.bias)
        if part.down is not None and part.up is not None:
            down, up = part.down.to(states.dtype), part.up.to(states.dtype)
            if needed[at + 2]:
                found[at + 2] = _given(ctx.sums[at + 2], part.scale * (own @ up).T, states, part.down)
            if needed[at + 3]:
                found[at + 3] = _given(ctx.sums[at + 3], own.T, part.scale * (states @ down.T), part.up)
    return found


def _given(total: Tensor | None, left: Tensor, right: Tensor, like: Tensor) -> Tensor | None:
    """A product for torch, in the precision of the weight; or None, if it was added to the weight's own sum."""
    if total is not None:
        add_product(total, left, right)
        return None
    if like.dtype == torch.float32 and left.dtype != torch.float32:
        return add_product(torch.zeros_like(like), left, right)
    return (left @ right).to(like.dtype)


def handed_over(total: Tensor | None, gradient: Tensor, like: Tensor) -> Tensor | None:
    """A gradient for torch, in the precision of the weight; or None, if it was added to the weight's own sum."""
    if total is None:
        return gradient.to(like.dtype)
    total += gradient
    return None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total += left @ right, with a float32 total."""
    if left.dtype == torch.float32 or not left.is_cuda:
        return total.addmm_(left.float(), right.float())
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, one above the other: where they lie, if they do lie so, else a copy."""
    if len(tensors) == 1:
        return tensors[0]
    if not adjacent(tensors):
        return torch.cat(list(tensors))
    first = tensors[0].detach()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins where the one before it ends."""
    storage = tensors[0].untyped_storage().data_ptr()
    place = tensors[0].storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return False
        if tensor.storage_offset() != place:
            return False
        place += tensor.numel()
    return True


def _columns(parts: Sequence[Part]) -> list[slice]:
    ends = accumulate((len(part.weight) for part in parts), initial=0)
    return [slice(begin, end) for begin, end in pairwise(ends)]
