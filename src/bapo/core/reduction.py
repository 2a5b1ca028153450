"""From one loss per token to one number: where losses are masked, and where they are divided.

A reduction is a weighted sum over tokens divided by a denominator, and the denominator is always explicit. It is itself
a plain sum over the tokens at hand, so an update in several micro-batches or on several ranks adds up its parts'
denominators first and passes the total to each part: then 1 x 8 equals 8 x 1, to rounding (with whole responses in
each part, where responses are averaged).

    token_mean      sum_t L_t / number of tokens                       every token weighs the same (DAPO)
    sequence_mean   sum_i (1/|y_i|) sum_t L_it / number of sequences   every response weighs the same (GRPO)
    fixed_length    sum_t L_t / (number of sequences * length)         length does not matter (Dr. GRPO, 2503.20783)
    balanced        sum_t w_t L_t / number of sequences                signs weigh as their responses are many

The weights of `balanced` come from whole groups (`balanced_weights`), so they are given, like the denominator.
"""

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean", "fixed_length", "balanced"]


def denominator_of(
    mask: Tensor,  # [tokens] or [sequences, tokens], bool
    reduction: Reduction,
    *,
    sequence_ids: Tensor | None = None,  # [tokens], for packed input
    length: int | None = None,  # the normaliser of fixed_length, e.g. the longest response allowed
) -> Tensor:  # 0-d float64; adds up over micro-batches and ranks
    """What a reduction divides by. Sequences without a token under the mask do not count."""
    if reduction == "token_mean":
        return mask.sum(dtype=torch.float64)
    sequences = (sequence_lengths(mask, sequence_ids) > 0).sum(dtype=torch.float64)
    if reduction in ("sequence_mean", "balanced"):
        return sequences
    if length is None or length <= 0:
        raise ValueError(
            f"length={length}, but reduction='fixed_length' divides by sequences * length. Give the longest response "
            "your sampler allows, e.g. length=4096."
        )
    return sequences * length


def reduce_tokens(
    values: Tensor,  # [tokens] or [sequences, tokens]; finite everywhere
    mask: Tensor,  # same shape, bool
    reduction: Reduction,
    *,
    denominator: Tensor | float,
    sequence_ids: Tensor | None = None,
    loss_weights: Tensor | None = None,
) -> Tensor:  # 0-d
    """sum of masked, weighted values / denominator."""
    weights = token_weights(mask, reduction, values.dtype, sequence_ids=sequence_ids, loss_weights=loss_weights)
    if isinstance(denominator, Tensor):
        denominator = denominator.to(values.device, values.dtype)
    return (values * weights).sum() / denominator


def token_weights(
    mask: Tensor,  # [tokens] or [sequences, tokens], bool
    reduction: Reduction,
    dtype: torch.dtype,
    *,
    sequence_ids: Tensor | None = None,
    loss_weights: Tensor | None = None,  # same shape: those of `balanced`
) -> Tensor:  # same shape
    """What each loss is multiplied by: 0 or 1, divided by |y_i| where responses weigh the same, or the weight given."""
    if reduction == "balanced":
        return torch.where(mask, given_weights(loss_weights).to(dtype), 0)
    weights = mask.to(dtype)
    if reduction == "sequence_mean":
        weights = weights / spread(sequence_lengths(mask, sequence_ids), mask, sequence_ids).clamp(min=1)
    return weights


def balanced_weights(
    advantages: Tensor,  # [responses] floating
    lengths: Tensor,  # [responses] how many tokens each has
    groups: Tensor,  # [responses] integers from 0: the prompt that each answers
) -> Tensor:  # [responses], of the advantages' dtype
    """What each token of a response weighs: n / T of the responses in its group that share its sign of A.

        L_group = sum_signs (n / responses) mean,   mean of L_t over the T tokens of the n responses with this sign

    Balanced Aggregation (arXiv:2605.04077). Tokens of one sign weigh the same, and signs weigh as in a sequence mean,
    however long their responses are. Groups weigh by their responses, those with A = 0 are a set of their own, and
    responses without a token do not count.
    """
    sets = 3 * groups.long() + 1 + (advantages > 0).long() - (advantages < 0).long()
    responses, tokens = (sets.bincount(weights=x.double()) for x in (lengths > 0, lengths))
    return (responses / tokens.clamp(min=1))[sets].to(advantages.dtype)


def given_weights(loss_weights: Tensor | None) -> Tensor:
    """The weights of `balanced`, if they are there."""
    if loss_weights is None:
        raise ValueError(
            "loss_weights=None, but reduction='balanced' weighs a token by its whole group, of which one call may hold "
            "a part. Pass to_tokens(balanced_weights(advantages, lengths, groups), mask) of all responses."
        )
    return loss_weights


def sequence_sums(
    values: Tensor,  # [tokens] or [sequences, tokens]
    mask: Tensor,
    sequence_ids: Tensor | None,
) -> Tensor:  # [sequences], or [tokens] for packed input: entry i belongs to sequence id i, unused ones are 0
    """Masked sum per sequence. Packed input has at most as many sequences as tokens, so no count is read back."""
    masked = values * mask.to(values.dtype)
    if values.dim() == 2:
        return masked.sum(1)
    return values.new_zeros(values.shape).index_add(0, _ids(sequence_ids), masked)


def sequence_lengths(mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Tokens under the mask per sequence, laid out as in `sequence_sums`."""
    return sequence_sums(torch.ones(mask.shape, device=mask.device), mask, sequence_ids)


def spread(per_sequence: Tensor, mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """Each token gets its sequence's value: the inverse of `sequence_sums`' layout."""
    if mask.dim() == 2:
        return per_sequence[:, None].expand(mask.shape)
    return per_sequence.index_select(0, _ids(sequence_ids))


def _ids(sequence_ids: Tensor | None) -> Tensor:
    if sequence_ids is None:
        raise ValueError(
            "sequence_ids=None, but packed [tokens] input does not say where one response ends. Pass sequence_ids (the "
            "response index of each token), or give [sequences, tokens] tensors."
        )
    return sequence_ids.long()
