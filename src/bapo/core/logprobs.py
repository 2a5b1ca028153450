"""Token log-probs and entropy from hidden states, without ever holding all logits.

For a vocabulary of 152k, the logits of 8k tokens take 5 GB in float32, and their gradient as much again. So the tokens
go through the head in pieces: in chunks of torch code (`chunked.py`, the reference, for CPU, float64 and machines
without Triton), or in tiles of kernels (`kernels/logprobs.py`), which are larger and need fewer passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapo.core import dispatch
from bapo.core.chunked import CHUNK_LOGITS

__all__ = ["CHUNK_LOGITS", "token_logprobs"]


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
    return dispatch.logprobs_and_entropy(hidden, weight, bias, targets, temperature, chunk_logits, float32_logits)


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
