"""Log-probs and entropy from hidden states, tile by tile: the logits are written once and read once per pass.

Logits [tokens, vocabulary] are made in tiles, each by the matrix multiplication the model itself does, in the model's
dtype, in one buffer that all tiles share. The forward kernel reduces each block b of a row to its own normalizer L_b =
logsumexp(z) and entropy H_b, of z = logits / temperature, and the chain rule of entropy puts a row together again:

    L = logsumexp_b(L_b),   w_b = exp(L_b - L),   log p_t = z_t - L,   H = sum_b w_b H_b - sum_b w_b log w_b

The backward kernel turns a tile's logits into their gradient in place. With `float32_logits` a tile is not rounded to
the model's dtype (`wide.py`). Its gradient still is, in a second buffer, because it is multiplied with 16-bit matrices.

Tiles cover all tokens and a span of the vocabulary, unless that span were too narrow. Its weight gradient is then one
product, summed in float32 inside the multiplication and written once; what has to be summed over tiles is the gradient
of the hidden states, [tokens, width]. Cut the other way it would be the weight's, [vocabulary, width].

Float64 and empty inputs stay with the torch code.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo.core.wide import wide_linear

TILE_LOGITS = 2**28
"""Logits held at once: 512 MiB in bfloat16. With `float32_logits` half as many, with room for as many gradients."""
ALIGNMENT = 16
"""Rows of a tile start at multiples of this, whatever the vocabulary, so that memory is read in whole vectors."""
FORWARD_BLOCK, BACKWARD_BLOCK = 4096, 2048
"""Logits of a row that one program handles at a time."""


def fused_logprobs(
    hidden: Tensor,  # [tokens, width] float32, bfloat16 or float16; at least one token
    weight: Tensor,  # [vocabulary, width]
    bias: Tensor | None,  # [vocabulary]
    targets: Tensor,  # [tokens] int64
    temperature: float = 1.0,
    tile_logits: int = TILE_LOGITS,
    float32_logits: bool = False,
) -> tuple[Tensor, Tensor]:  # log-probs and entropies, [tokens], float32
    """log pi(target | state) and the entropy of that distribution, both differentiable, for each token."""
    wide = float32_logits and hidden.dtype != torch.float32
    most = max(1, tile_logits // 2) if wide else tile_logits
    outputs: tuple[Tensor, Tensor] = _FusedLogprobs.apply(hidden, weight, bias, targets, temperature, most, wide)
    return outputs


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile_logits: int,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden, targets = hidden.contiguous(), targets.contiguous()
        parts, spans = tiling(len(targets), len(weight), tile_logits)
        normalizer, entropy = torch.empty(2, len(targets), device=hidden.device)
        chosen = torch.full_like(normalizer, torch.nan)  # stays so for a target outside the vocabulary
        buffer = _buffer(hidden, parts, spans, torch.float32 if wide else hidden.dtype)
        for part in parts:
            blocks = []
            for span in spans:
                tile = _logits(buffer, hidden[part], weight[span], None if bias is None else bias[span])
                blocks.append(reduce_tile(tile, targets[part], chosen[part], start=span.start, temperature=temperature))
            block_normalizers, block_entropies = torch.cat(blocks, dim=1)
            normalizer[part] = block_normalizers.logsumexp(0)
            shares = (block_normalizers - normalizer[part]).exp()
            entropy[part] = (shares * block_entropies + torch.special.entr(shares)).sum(0)
        logprobs = chosen - normalizer
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.tile_logits, ctx.wide = temperature, tile_logits, wide
        ctx.set_materialize_grads(False)  # an output nobody differentiates costs nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_logprobs = torch.zeros_like(normalizer) if grads[0] is None else grads[0].contiguous()
        grad_entropy = None if grads[1] is None else grads[1].contiguous()
        parts, spans = tiling(len(targets), len(weight), ctx.tile_logits)
        grad_hidden = _Sum(hidden, len(spans)) if needs_hidden else None
        grad_weight = _Sum(weight, len(parts)) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        buffer = _buffer(hidden, parts, spans, torch.float32 if ctx.wide else hidden.dtype)
        gradients = _buffer(hidden, parts, spans, hidden.dtype) if ctx.wide else buffer
        for part in parts:
            for span in spans:
                logits = _logits(buffer, hidden[part], weight[span], None if bias is None else bias[span])
                tile = _tile(gradients, *logits.shape)
                differentiate_tile(
                    logits,
                    tile,
                    targets[part],
                    normalizer[part],
                    entropy[part],
                    grad_logprobs[part],
                    None if grad_entropy is None else grad_entropy[part],
                    start=span.start,
                    temperature=ctx.temperature,
                )
                if grad_hidden is not None:
                    grad_hidden.add_product(part, tile, weight[span])
                if grad_weight is not None:
                    grad_weight.add_product(span, tile.T, hidden[part])
                if grad_bias is not None:
                    grad_bias[span] += tile.sum(0, dtype=torch.float32)
        return (
            None if grad_hidden is None else grad_hidden.total.to(hidden.dtype),
            None if grad_weight is None else grad_weight.total.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None, None, None, None),
        )


def tiling(tokens: int, vocabulary: int, tile_logits: int) -> tuple[list[slice], list[slice]]:
    """Parts of the tokens and spans of the vocabulary; each part with each span is one tile.

    One part, unless its tiles would be more than four times as high as wide.
    """
    rows = min(tokens, 2 * isqrt(tile_logits))
    return _cut(tokens, rows, 1), _cut(vocabulary, max(1, tile_logits // rows), 128)


def _cut(total: int, most: int, multiple: int) -> list[slice]:
    """Pieces of about equal size, at most `most` each but for rounding up to a multiple."""
    pieces = -(-total // most)
    size = -(-total // (pieces * multiple)) * multiple
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT


def _buffer(hidden: Tensor, parts: list[slice], spans: list[slice], dtype: torch.dtype) -> Tensor:
    """Room for the largest tile: the first."""
    size = (parts[0].stop - parts[0].start) * _aligned(spans[0].stop - spans[0].start)
    return torch.empty(size, dtype=dtype, device=hidden.device)


def _tile(buffer: Tensor, rows: int, columns: int) -> Tensor:
    stride = _aligned(columns)
    padded = buffer[: rows * stride].view(rows, stride)
    padded[:, columns:] = 0.0  # fresh memory may hold signalling NaNs, which an FPU reports when it converts them
    return padded[:, :columns]


def _logits(buffer: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One tile of logits in the buffer's dtype. Both passes call this with the same tiles, so see the same logits."""
    tile = _tile(buffer, len(hidden), len(weight))
    if tile.dtype != hidden.dtype:
        return wide_linear(hidden, weight, bias, out=tile)
    with torch.autocast(hidden.device.type, enabled=False):
        if bias is None:
            return torch.mm(hidden, weight.T, out=tile)
        return torch.addmm(bias, hidden, weight.T, out=tile)


class _Sum:
    """A gradient that is the sum of `terms` matrix products, in float32 unless there is only one."""

    def __init__(self, like: Tensor, terms: int):
        self.only_one = terms == 1
        self.total = torch.empty_like(like) if self.only_one else torch.zeros_like(like, dtype=torch.float32)

    def add_product(self, rows: slice, left: Tensor, right: Tensor) -> None:
        total = self.total[rows]
        with torch.autocast(left.device.type, enabled=False):
            if self.only_one:
                torch.mm(left, right, out=total)
            elif left.dtype == torch.float32:
                total.addmm_(left, right)
            elif left.is_cuda and "dtype" in torch.ops.aten.mm.overloads():
                total += torch.mm(left, right, out_dtype=torch.float32)
            else:
                total += torch.mm(left, right)  # rounded once more: this torch multiplies into the inputs' dtype only


def reduce_tile(
    tile: Tensor,  # [rows, columns] logits; rows start at multiples of ALIGNMENT
    targets: Tensor,  # [rows] int64
    chosen: Tensor,  # [rows] float32: z of the target, written by the tile that holds it
    *,
    start: int,  # token id of the tile's first column
    temperature: float,
) -> Tensor:  # [2, blocks, rows] float32
    """Normalizer and entropy of each block of each row; -inf and 0 where all its tokens are forbidden."""
    rows, columns = tile.shape
    blocks = triton.cdiv(columns, FORWARD_BLOCK)
    reduced = torch.empty(2, blocks, rows, device=tile.device)
    _reduce[(rows, blocks)](
        *(tile, targets, chosen, *reduced),
        *(start, columns, tile.stride(0), 1.0 / temperature),
        BLOCK=FORWARD_BLOCK,
        num_warps=8,
    )
    return reduced


def differentiate_tile(
    tile: Tensor,  # [rows, columns] logits
    gradients: Tensor,  # [rows, columns] with the same stride: d loss / d logits, may be the tile itself
    targets: Tensor,  # [rows] int64
    normalizer: Tensor,  # [rows] float32: logsumexp(z) over the whole vocabulary
    entropy: Tensor,  # [rows] float32
    grad_logprobs: Tensor,  # [rows] float32
    grad_entropy: Tensor | None,  # [rows] float32
    *,
    start: int,  # token id of the tile's first column
    temperature: float,
) -> None:
    """Turn logits into their gradient, [j = t] g - p_j (g + g_H (log p_j + H)), over temperature."""
    grid = (len(tile), triton.cdiv(tile.stride(0), BACKWARD_BLOCK))
    _differentiate[grid](
        *(tile, gradients, targets, normalizer, entropy),
        *(grad_logprobs, grad_logprobs if grad_entropy is None else grad_entropy),
        *(start, tile.shape[1], tile.stride(0), 1.0 / temperature),
        WITH_ENTROPY=grad_entropy is not None,
        BLOCK=BACKWARD_BLOCK,
        num_warps=4,
    )


# In both kernels `stride` is a multiple of ALIGNMENT, and Triton knows: loads masked by it are whole vectors. What lies
# between `columns` and `stride` is padding, read and ignored. One compilation serves all shapes: of the other arguments
# Triton may assume nothing.


@triton.jit(
    do_not_specialize=["start", "columns"],
    do_not_specialize_on_alignment=["targets", "chosen", "normalizers", "entropies"],
)
def _reduce(
    tile, targets, chosen, normalizers, entropies, start, columns, stride, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    logits = tile + row * stride
    offset = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + offset, mask=offset < stride, other=0.0).to(tl.float32)
    z = tl.where(offset < columns, z, -float("inf")) * inverse_temperature
    forbidden = z == -float("inf")
    top = tl.max(z, axis=0)
    below = tl.where(forbidden, 0.0, z - tl.where(top == -float("inf"), 0.0, top))
    mass = tl.where(forbidden, 0.0, tl.exp(below))
    total = tl.sum(mass, axis=0)
    total = tl.where(total == 0.0, 1.0, total)  # all forbidden: the normalizer is -inf by `top`, the entropy 0
    log_total = tl.log(total)
    # Rows vary fastest, as in the grid.
    place = block.to(tl.int64) * tl.num_programs(0) + row
    tl.store(normalizers + place, top + log_total)
    tl.store(entropies + place, log_total - tl.sum(mass * below, axis=0) / total)
    column = tl.load(targets + row) - start
    here = (column >= block * BLOCK) & (column < (block + 1) * BLOCK) & (column < columns)
    target_logit = tl.load(logits + column, mask=here, other=0.0).to(tl.float32)
    tl.store(chosen + row, target_logit * inverse_temperature, mask=here)


@triton.jit(
    do_not_specialize=["start", "columns"],
    do_not_specialize_on_alignment=["targets", "normalizer", "entropy", "grad_logprobs", "grad_entropy"],
)
def _differentiate(
    tile,
    gradients,
    targets,
    normalizer,
    entropy,
    grad_logprobs,
    grad_entropy,
    start,
    columns,
    stride,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = tile + row * stride
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + offset, mask=offset < stride, other=0.0).to(tl.float32)
    z = tl.where(offset < columns, z, -float("inf")) * inverse_temperature
    log_p = tl.where(z == -float("inf"), 0.0, z - tl.load(normalizer + row))
    p = tl.where(z == -float("inf"), 0.0, tl.exp(log_p))
    pull = tl.load(grad_logprobs + row)
    column = (tl.load(targets + row) - start).to(tl.int32)
    gradient = tl.where(offset == column, pull, 0.0) - p * pull
    if WITH_ENTROPY:
        gradient -= p * (tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row)))
    gradient *= inverse_temperature
    tl.store(gradients + row * stride + offset, gradient.to(gradients.dtype.element_ty), mask=offset < stride)
