"""What the learner knows of each token, and the clipped surrogate of their ratios.

r_t = pi_theta / pi_behavior of token t throughout, and bounds are bounds on the ratio, never epsilons. The log-ratio is
limited to +-20 so that no ratio overflows; a token beyond it has gradient 0 and is not retained.

Truncated sampling. Where the sampler left out a part of the vocabulary (top-p, top-k, min-p), pi_behavior is what
tokens were really drawn from: the sampler's probability, divided by the mass m that was kept. pi_theta stays that of
the whole vocabulary, because that is what the learner trains. So the ratio is right for every token that can be drawn,

    E_behavior[r f] = sum of pi_theta f over the tokens that were kept,

and the others are never drawn, so they give no gradient, however likely the learner finds them by now. Before any
update, r = m and not 1: with m below the lower bound, a new negative token is clipped at once. How far the policy has
moved is another question, which r / m answers (`log_moved`). The brake and `opsm` go by it, or they would take
truncation for a move. TRL and verl have the same ratio with vLLM's processed log-probs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bapo.core.checks import MAX_LOG_RATIO, holds, working_dtype, zero_or_nan, zero_outside
from bapo.core.reduction import sequence_lengths, sequence_sums, spread


@dataclass(frozen=True)
class Tokens:
    """The tokens of one loss call: [tokens] packed or [sequences, tokens] padded.

    The given tensors may have any floating dtype and hold anything where the mask is off. The properties return them in
    working precision, with zeros there. They are computed on first use, and kernels, which take what was given, never
    use them.
    """

    given_logprobs: Tensor  # under the learner now; carries grad
    given_behavior_logprobs: Tensor  # under the policy that sampled each token
    given_advantages: Tensor
    mask: Tensor  # bool
    sequence_ids: Tensor | None = None  # which response each packed token belongs to
    uses: Tensor | None = None  # integers: how often each token was trained on before
    loss_weights: Tensor | None = None  # of a balanced loss (reduction.py)
    log_kept: Tensor | None = None  # log m, of truncated sampling; None: nothing was left out

    def __post_init__(self) -> None:
        swapped = self.given_behavior_logprobs.requires_grad and not self.given_logprobs.requires_grad
        if swapped and torch.is_grad_enabled():
            raise ValueError(
                "behavior_logprobs requires grad and logprobs does not: the two are swapped. The first argument is the "
                "policy being trained; the second, the one that sampled, is a constant."
            )

    @property
    def dtype(self) -> torch.dtype:
        """Working precision."""
        return working_dtype(self.given_logprobs)

    @cached_property
    def logprobs(self) -> Tensor:
        """log pi_theta, carrying grad."""
        return zero_outside(self.mask, self.given_logprobs.to(self.dtype))

    @cached_property
    def behavior_logprobs(self) -> Tensor:
        """log pi_behavior, a constant of the past: no gradient flows into it."""
        return zero_outside(self.mask, self.given_behavior_logprobs.detach().to(self.dtype))

    @cached_property
    def advantages(self) -> Tensor:
        """A_t, a constant too."""
        return zero_outside(self.mask, self.given_advantages.detach().to(self.dtype))

    @cached_property
    def log_ratio(self) -> Tensor:
        """log r_t, limited to +-MAX_LOG_RATIO."""
        difference = self.logprobs - self.behavior_logprobs
        # An infinity stays visible, which the clamp alone would turn into a plausible ratio.
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + zero_or_nan(difference.detach())

    @cached_property
    def ratio(self) -> Tensor:
        """r_t = pi_theta / pi_behavior."""
        return self.log_ratio.exp()

    @cached_property
    def within(self) -> Tensor:
        """Tokens whose log-ratio is inside the limit. Beyond it a ratio is a defect of the data, not a signal.

        A NaN is within, so that it reaches bounds and loss instead of being passed over.
        """
        return ~holds(torch.ge, self.log_ratio.detach().abs(), MAX_LOG_RATIO)

    @cached_property
    def negative(self) -> Tensor:
        """Tokens with A < 0."""
        return holds(torch.lt, self.advantages, 0)

    def per_sequence(self, values: Tensor) -> Tensor:
        """Masked sum over each token's sequence, given back to each of its tokens."""
        return spread(sequence_sums(values, self.mask, self.sequence_ids), self.mask, self.sequence_ids)

    @cached_property
    def log_moved(self) -> Tensor:
        """log r_t - log m_t: how much likelier the token is now than it was among the whole vocabulary."""
        kept = self.log_kept
        return self.log_ratio if kept is None else self.log_ratio - zero_outside(self.mask, kept.to(self.dtype))

    @property
    def lengths(self) -> Tensor:
        """Length of each token's sequence, at least 1."""
        lengths = sequence_lengths(self.mask, self.sequence_ids)
        return spread(lengths, self.mask, self.sequence_ids).clamp(min=1)


class TokenLoss(NamedTuple):
    """Loss and fate of each token."""

    loss: Tensor  # to be minimised
    retained: Tensor  # bool: its gradient survives


def retained_by(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """X_t of the Entropy-Clip Rule: A > 0 and r < high, or A < 0 and r > low (and always where A = 0)."""
    positive, zero = holds(torch.gt, advantages, 0), holds(torch.eq, advantages, 0)
    return (positive & holds(torch.lt, ratio, high)) | (~positive & holds(torch.gt, ratio, low)) | zero


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float) -> TokenLoss:
    """PPO's pessimistic surrogate with independent ratio bounds (arXiv:1707.06347, eq. 7).

        L_t = -min(r_t A_t, clip(r_t, low, high) A_t)

    At a bound itself the token counts as clipped: its gradient is 0. A bound that is NaN makes it NaN, like the loss.
    It is computed as a line in r_t: its slope is -A_t or 0, its constant 0 or -clip(r_t) A_t. On CPU products with 0
    and 1 are several times faster than a select, and as exact.
    """
    retained = retained_by(ratio, advantages, low, high)
    slope = -advantages * retained.view(torch.int8)
    constant = clip(ratio.detach(), low, high) * (-advantages - slope)
    return TokenLoss(ratio * (slope + zero_or_nan(constant)) + constant, retained)


def clip(ratio: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """The ratio between two bounds, each a number or a tensor; `high` where they are the wrong way round."""
    return ratio.clamp(min=low).clamp(max=high)
