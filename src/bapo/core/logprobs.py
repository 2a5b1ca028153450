"""Token log-probs and entropy from hidden states, without ever holding all logits.

For a vocabulary of 152k, the logits of 8k tokens take 5 GB in float32, and their gradient as much again. So the tokens
go through the head in pieces: on CUDA in tiles of kernels (`kernels/logprobs.py`), which are larger and need fewer
passes; elsewhere, and in float64, in chunks of torch code. A chunk's logits live only until they are reduced to two
numbers per token, and the backward pass computes them again:

    log p_j = z_j - logsumexp(z),   H = -sum_j p_j log p_j,   z = hidden @ weight^T / temperature
    d log p_t / dz_j = [j = t] - p_j,   dH / dz_j = -p_j (log p_j + H)

Beyond the head's own gradient, peak memory is that of one chunk; time is one more head multiplication.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bapo.core import kernels

CHUNK_LOGITS = 2**25
"""Logits held at once by the torch code: 128 MiB in float32, a few times that with temporaries."""


def token_logprobs(
    hidden: Tensor,  # [tokens, width] the state that predicts each target
    weight: Tensor,  # [vocabulary, width] of the LM head
    targets: Tensor,  # [tokens] int64
    *,
    bias: Tensor | None = None,  # [vocabulary]
    temperature: float = 1.0,
    chunk_logits: int | None = None,  # held at once; by default what suits the device
    float32_logits: bool = False,  # do not round the logits of 16-bit states to 16 bits
) -> tuple[Tensor, Tensor]:  # log-probs and entropies, [tokens], float32 (float64 stays)
    """log pi(target | state) and the entropy of that distribution, both differentiable, for each token."""
    _check(hidden, weight, targets, bias, temperature)
    if kernels.usable(hidden) and hidden.dtype != torch.float64 and len(targets):
        from bapo.core.kernels.logprobs import TILE_LOGITS, fused_logprobs

        return fused_logprobs(hidden, weight, bias, targets, temperature, chunk_logits or TILE_LOGITS, float32_logits)
    return chunked_logprobs(hidden, weight, bias, targets, temperature, chunk_logits or CHUNK_LOGITS, float32_logits)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
    float32_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` in torch operations."""
    chunk = max(1, chunk_logits // weight.shape[0])
    outputs: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, chunk, float32_logits
    )
    return outputs


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        head = _head(weight, bias, dtype, wide)
        for part in _parts(len(targets), chunk):
            logits = _logits(hidden[part], head, temperature, dtype)
            normalizer[part] = logits.logsumexp(1)
            log_probs = logits.sub_(normalizer[part, None])
            logprobs[part] = log_probs.gather(1, targets[part, None]).squeeze(1)
            # A logit of -inf (a forbidden token) has probability 0 and adds 0, not NaN.
            entropy[part] = -torch.linalg.vecdot(log_probs.exp(), log_probs.nan_to_num_(neginf=0.0))
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk, ctx.dtype, ctx.wide = temperature, chunk, dtype, wide
        ctx.set_materialize_grads(False)  # an output nobody differentiates costs nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=ctx.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=ctx.dtype) if needs_bias else None
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        head = _head(weight, bias, ctx.dtype, ctx.wide)
        for part in _parts(len(targets), ctx.chunk):
            grad = _logits(hidden[part], head, ctx.temperature, ctx.dtype)
            grad -= normalizer[part, None]  # log p
            if grad_entropy is None:
                grad = grad.exp_().mul_(-grad_logprobs[part, None])
            else:
                pull = (grad.nan_to_num(neginf=0.0) + entropy[part, None]).mul_(grad_entropy[part, None])
                grad = grad.exp_().mul_(pull.add_(grad_logprobs[part, None])).neg_()
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad /= ctx.temperature
            if grad_hidden is not None:
                grad_hidden[part] = grad.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight += grad.to(hidden.dtype).T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


Head = tuple[Tensor, Tensor | None]
"""Weight and bias."""


def _head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wide: bool) -> Head:
    """Weight and bias in the dtype to multiply in: the model's, as the model itself does, or `dtype` if `wide`."""
    if not wide:
        return weight, bias
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _logits(hidden: Tensor, head: Head, temperature: float, dtype: torch.dtype) -> Tensor:
    """Logits of one chunk, held in `dtype`."""
    weight, bias = head
    with torch.autocast(hidden.device.type, enabled=False):  # backward recomputes these: both must multiply alike
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).to(dtype)
    return logits.div_(temperature) if temperature != 1.0 else logits


def _parts(tokens: int, chunk: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk):
        yield slice(start, min(start + chunk, tokens))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; expected [tokens, width] and "
            "[vocabulary, width]. Flatten a padded batch to its real tokens first: hidden[mask]."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)} and dtype {targets.dtype}; expected int64 of shape "
            f"{tuple(hidden.shape[:1])}: the token that each hidden state predicts (shifted by one from the input)."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}, one value per token id."
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}. Cast one: hidden.to(weight.dtype).")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive: use the temperature the tokens were sampled at.")
    if targets.device.type == "cpu" and targets.numel():
        lowest, highest = targets.aminmax()
        if lowest < 0 or highest >= weight.shape[0]:
            raise ValueError(
                f"targets ranges over {int(lowest)}..{int(highest)}, outside the vocabulary of {weight.shape[0]}. "
                "Remove padding and ignore labels (-100) first: keep only the tokens under the mask."
            )
