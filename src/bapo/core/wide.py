"""The output head in float32: logits of 16-bit states and weights that are not rounded to 16 bits.

A product of two 16-bit numbers is exact in float32, and matrix products sum in float32 anyway. What rounds is the
result: in bfloat16, which has 8 significant bits, a logit of 20 may be wrong by 0.06. Sampler and learner round logits
that differ slightly already, so their log-probs of one token differ by more than the layers explain. Whoever computes
logits in float32 must do so on both sides.
"""

import torch
from torch import Tensor


def wide_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """states [..., width] times weight^T [width, vocabulary], plus bias, in float32.

    `out`: where to write, for two-dimensional states. Has no gradients of its own on CUDA.
    """
    rows = states.reshape(-1, states.shape[-1])
    with torch.autocast(states.device.type, enabled=False):
        if states.is_cuda and states.dtype != torch.float32 and _has_wide_product():
            options = {} if out is None else {"out": out}
            logits = torch.mm(rows, weight.T, out_dtype=torch.float32, **options)
        else:
            logits = torch.mm(rows.float(), weight.float().T, out=out)
        if bias is not None:
            logits += bias
    return logits.view(*states.shape[:-1], len(weight)) if out is None else logits


def _has_wide_product() -> bool:
    """Whether this version of torch multiplies 16-bit matrices into float32."""
    return "dtype" in torch.ops.aten.mm.overloads()  # type: ignore[no-untyped-call]
