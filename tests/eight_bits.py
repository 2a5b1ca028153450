"""What sampling in eight bits rounds, written out in float64: shared by the tests on CPUs and GPUs."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

LARGEST = 448.0


def scale_of(row: Tensor) -> float:
    """The least power of two that brings a row within the largest number of e4m3."""
    scale = 2.0**-126
    while float(row.abs().max()) > LARGEST * scale:
        scale *= 2
    return scale


def step_at(value: float) -> float:
    """The distance of neighbouring numbers of e4m3 around a value."""
    return 2.0 ** max(math.floor(math.log2(abs(value) or 1e-300)) - 3, -9)


def nearest(value: float) -> float:
    """The nearest number of e4m3, the even one of two."""
    return round(value / step_at(value)) * step_at(value)


def in_eight_bits(rows: Tensor) -> Tensor:
    """Rows as they are after rounding, in float64, one number at a time."""
    given = rows.detach().double().cpu()
    scales = [scale_of(row) for row in given]
    values = [[nearest(x / s) * s for x in row.tolist()] for row, s in zip(given, scales, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def at_once(rows: Tensor) -> Tensor:
    """`in_eight_bits` for whole tensors, in their own dtype."""
    given = rows.detach().double().flatten(0, -2)
    scales = torch.exp2(torch.ceil(torch.log2(given.abs().amax(1, keepdim=True) / LARGEST))).clamp(min=2.0**-126)
    steps = torch.exp2((torch.log2((given / scales).abs()).floor() - 3).clamp(min=-9))
    return (torch.round(given / scales / steps) * steps * scales).view(rows.shape).to(rows.dtype)


def sampled_in_eight_bits(model: nn.Module, *, states: bool = True) -> nn.Module:
    """A plain copy of a model with the matrices of its layers rounded, and (`states`) what they multiply."""
    rounded = copy.deepcopy(model)
    for name, module in rounded.named_modules():
        if name.endswith("_proj"):
            module.weight.data = at_once(module.weight)
            if states:
                module.register_forward_pre_hook(lambda module, given: (at_once(given[0]),))
    return rounded
