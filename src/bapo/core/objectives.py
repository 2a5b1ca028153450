"""Policy objectives: one short function each, a loss per token in return.

Every objective takes `Tokens` (what the learner knows of each token) and its own options, and returns the loss per
token (to be minimised, unreduced) with `retained`: which tokens still have a gradient. Those with one pair of bounds
return a description, `Clipped`, which a kernel can evaluate and reduce in one pass. Masking and averaging happen in
`reduction.py`, choosing bounds in `bounds.py`. r_t = pi_theta / pi_behavior of token t throughout, and bounds are
bounds on the ratio, never epsilons. The log-ratio is limited to +-20 so that no ratio overflows; a token beyond it has
gradient 0 and is not retained.

The other objectives are here for comparison, and only as losses: without the KL terms, advantage tricks and resampling
of their papers (see each docstring).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds
from bapo.core.checks import MAX_LOG_RATIO, holds, working_dtype, zero_or_nan, zero_outside
from bapo.core.reduction import sequence_lengths, sequence_sums, spread
from bapo.core.settings import BRAKES, ClipSettings


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


def low_of_each(
    low: Tensor | float, uses: Tensor | None, used_low: Tensor | float | None, dtype: torch.dtype
) -> Tensor | float:
    """The lower bound of each token: `used_low` where it was trained on before, else `low`.

    As the larger of the two times 1 or 0, and then at least the smaller: on CPU several times faster than a select, and
    as exact.
    """
    if used_low is None:
        return low
    assert uses is not None, "used_low needs uses"
    used = uses.bool()
    if isinstance(low, Tensor) or isinstance(used_low, Tensor):
        low = torch.as_tensor(low, dtype=dtype, device=used.device)
        takes_larger = used.view(torch.int8) ^ (low > used_low).view(torch.int8)
        return takes_larger.to(dtype).mul_(low.clamp(min=used_low)).clamp_(min=low.clamp(max=used_low))
    ones = (~used if low > used_low else used).view(torch.int8).to(dtype)
    larger = ones if max(low, used_low) == 1 else ones.mul_(max(low, used_low))
    return larger.clamp_(min=min(low, used_low))


@torch.no_grad()
def share_of(contribution: Tensor, signal: Tensor) -> Tensor:  # 0-d float64
    """P / (P + N) of what each token contributes; 0 where nothing is left of the signal, 1 where there was none."""
    positive = contribution.clamp(min=0).sum(dtype=torch.float64)
    negative = -contribution.clamp(max=0).sum(dtype=torch.float64)
    total = positive + negative
    return torch.where(total == 0, (signal.count_nonzero() == 0).double(), positive / total)


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate of each token's own ratio, between one pair of bounds: a `TokenLoss` not yet computed.

    `loss`, `retained` and `bounds` compute it with torch operations when they are asked for.
    """

    tokens: Tokens
    low: Tensor | float
    high: Tensor | float
    solved: ClipBounds | None = None  # the whole result of the search that chose (low, high)
    cap: float | None = None  # on ratios of negative tokens
    used_low: Tensor | float | None = None  # in place of low, for tokens that were trained on before

    def __post_init__(self) -> None:
        number = isinstance(self.used_low, int | float) and not isinstance(self.used_low, bool)
        solved = self.used_low is None or isinstance(self.used_low, Tensor)
        if not solved and not (number and 0 <= cast(float, self.used_low) < math.inf):
            raise ValueError(
                f"used_low={self.used_low!r} must be a finite ratio >= 0: it is the lower bound for tokens that were "
                "trained on before. 1.0 pushes a negative token once; None turns the rule off."
            )
        if self.cap is not None and not self.cap > 1:
            raise ValueError(
                f"the dual clip is {self.cap}, but it caps ratios of negative tokens from above. Use a value > 1, "
                "e.g. 3.0."
            )

    @property
    def loss(self) -> Tensor:
        """-min(r A, clip(r, low, high) A), and -cap A for A < 0 where r >= cap."""
        loss = self._surrogate.loss
        return loss if self.cap is None else torch.where(self._capped, -self.cap * self.tokens.advantages, loss)

    @cached_property
    def retained(self) -> Tensor:
        """Neither clipped, nor capped, nor past the ratio limit."""
        retained = self._surrogate.retained & self.tokens.within
        return retained if self.cap is None else retained & ~self._capped

    @cached_property
    def bounds(self) -> ClipBounds:
        """Those solved, or those given with their share."""
        if self.solved is not None:
            return self.solved
        tokens, low, high = self.tokens, float(self.low), float(self.high)
        counted = (self._surrogate.retained & tokens.within).view(torch.int8)  # the cap is no bound of the share
        share = share_of(tokens.ratio.detach() * tokens.advantages * counted, tokens.advantages).to(tokens.dtype)
        return ClipBounds(torch.full_like(share, low), torch.full_like(share, high), share, used_low=self.used_low)

    @cached_property
    def _surrogate(self) -> TokenLoss:
        low = low_of_each(self.low, self.tokens.uses, self.used_low, self.tokens.dtype)
        return clipped_surrogate(self.tokens.ratio, self.tokens.advantages, low, self.high)

    @cached_property
    def _capped(self) -> Tensor:
        assert self.cap is not None
        return (self.tokens.advantages < 0) & (self.tokens.ratio >= self.cap)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"low={low}, high={high} do not enclose 1. They are bounds on the ratio, not epsilons: an epsilon of 0.2 "
            "is low=0.8, high=1.2."
        )


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive; the paper's value is the default.")


def grpo(tokens: Tokens, *, low: float = 0.8, high: float = 1.2, used_low: float | None = None) -> Clipped:
    """Fixed symmetric clip (GRPO, arXiv:2402.03300, without its KL term): low, high = 0.8, 1.2.

    `used_low` is the lower bound of tokens that were trained on before. It is ours; see docs/algorithm.md.
    """
    _check_bounds(low, high)
    return Clipped(tokens, low, high, used_low=used_low)


def clip_higher(tokens: Tokens, *, low: float = 0.8, high: float = 1.28, used_low: float | None = None) -> Clipped:
    """Fixed asymmetric clip (DAPO, arXiv:2503.14476): low, high = 0.8, 1.28."""
    return grpo(tokens, low=low, high=high, used_low=used_low)


def dual_clip(
    tokens: Tokens, *, low: float = 0.8, high: float = 1.2, cap: float = 3.0, used_low: float | None = None
) -> Clipped:
    """Dual-clip PPO (arXiv:1912.09729): negative tokens are also clipped above, at ratio `cap`.

    L_t = -max( min(r A, clip(r, low, high) A), cap A )   for A < 0;  the plain clip for A >= 0
    """
    _check_bounds(low, high)
    return Clipped(tokens, low, high, cap=cap, used_low=used_low)


def push_once(tokens: Tokens, *, low: float = 0.8, high: float = 1.2, used_low: float = 1.0) -> Clipped:
    """GRPO's clip, with a lower bound of 1 for tokens that were trained on before (ours; docs/algorithm.md).

    A negative token is pushed down once. After that it is pushed down only while it is more likely than when it was
    sampled.
    """
    return grpo(tokens, low=low, high=high, used_low=used_low)


def bapo(tokens: Tokens, *, bounds: ClipBounds, dual_clip: float | None = None) -> Clipped:
    """The clipped surrogate at bounds solved from this update's own tokens (BAPO, arXiv:2510.18927).

    `dual_clip` caps negative tokens as the authors' script does (at 3.0); the paper has no such cap.
    """
    return Clipped(tokens, bounds.low, bounds.high, solved=bounds, cap=dual_clip, used_low=bounds.used_low)


def brake(tokens: Tokens, *, bounds: ClipBounds) -> Clipped:
    """GRPO's clip, with a lower bound for used tokens that rises as far as used negative ones have fallen (ours).

        d = mean of -log r over used tokens with A < 0,   used_low = low + (1 - low) clip(d / delta, 0, 1)

    Between `grpo` (nothing has fallen) and `push_once` (delta or more). See `brake.py`.
    """
    return bapo(tokens, bounds=bounds)


def dcpo(tokens: Tokens, *, eps_low: float = 0.16, eps_high: float = 0.2, max_ratio: float = 10.0) -> TokenLoss:
    """Bounds that widen as the behaviour probability q falls (DCPO, arXiv:2509.02333).

        |r - 1| r q <= eps   =>   0.5 + 0.5 sqrt(max(1 - 4 eps_low / q, 0)) <= r <= 0.5 + 0.5 sqrt(1 + 4 eps_high / q)

    and r <= max_ratio. Its smooth advantage standardisation and its loss averaging are not part of this.
    """
    _check_positive(eps_low=eps_low, eps_high=eps_high, max_ratio=max_ratio)
    q = tokens.behavior_logprobs.exp()
    low = 0.5 + 0.5 * (1 - 4 * eps_low / q).clamp(min=0).sqrt()
    high = (0.5 + 0.5 * (1 + 4 * eps_high / q).sqrt()).clamp(max=max_ratio)
    loss, unclipped = clipped_surrogate(tokens.ratio, tokens.advantages, low, high)
    return TokenLoss(loss, unclipped & tokens.within)


def cispo(tokens: Tokens, *, low: float = 0.0, high: float = 5.0) -> TokenLoss:
    """Clip the importance weight, keep every gradient (CISPO, arXiv:2506.13585).

        L_t = -sg(clip(r_t, low, high)) A_t log pi(y_t)

    The paper tunes only the upper bound and prints no value; 5 is a common choice.
    """
    _check_bounds(low, high)
    weight = tokens.ratio.detach().clamp(low, high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, torch.ones_like(tokens.mask))


def gspo(tokens: Tokens, *, low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> TokenLoss:
    """One length-normalised ratio per response, clipped as a whole (GSPO, arXiv:2507.18071).

        s_i = exp( (1/|y_i|) sum_t log r_it ),   L_i = -min(s_i A_i, clip(s_i, low, high) A_i) on each of its tokens

    Use reduction="sequence_mean" for the paper's objective. Advantages must be equal within a response.
    """
    _check_bounds(low, high)
    ratio = (tokens.per_sequence(tokens.log_ratio) / tokens.lengths).exp()
    advantages = tokens.per_sequence(tokens.advantages) / tokens.lengths
    loss, unclipped = clipped_surrogate(ratio, advantages, low, high)
    return TokenLoss(loss, unclipped & tokens.within)


def sapo(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """A soft gate in place of the clip (SAPO, arXiv:2511.20347).

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t,   tau by the sign of A_t;  its slope at r = 1 is that of r A
    """
    _check_positive(tau_positive=tau_positive, tau_negative=tau_negative)
    tau = torch.where(tokens.advantages > 0, tau_positive, tau_negative).to(tokens.ratio.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (tokens.ratio - 1))
    return TokenLoss(-gate * tokens.advantages, tokens.within)


def topr(tokens: Tokens) -> TokenLoss:
    """Positives without importance weight, negatives with a truncated one (TOPR, arXiv:2503.14286).

        L_t = -alpha A_t log pi(y_t),   alpha = 1 for A > 0,  sg( min(pi(y)/mu(y), 1) ) for A <= 0

    The ratio is that of the whole response. The paper uses rewards of +-1; advantages stand in for them here.
    """
    response_log_ratio = tokens.per_sequence(tokens.log_ratio.detach())
    alpha = torch.where(tokens.advantages > 0, 1.0, response_log_ratio.clamp(max=0).exp())
    return TokenLoss(-alpha * tokens.advantages * tokens.logprobs, torch.ones_like(tokens.mask))


def asymre(tokens: Tokens, *, shift: float = -0.1) -> TokenLoss:
    """Off-policy REINFORCE with a lowered baseline, no importance weight (AsymRE, arXiv:2506.20520).

        L_t = -(R - (V + shift)) log pi(y_t) = -(A_t - shift) log pi(y_t)

    With shift < 0 successes weigh more than failures. `shift` is in units of the advantages: use advantages without
    division by the standard deviation (dr_grpo) for the paper's.
    """
    return TokenLoss(-(tokens.advantages - shift) * tokens.logprobs, torch.ones_like(tokens.mask))


def m2po(tokens: Tokens, *, threshold: float = 0.04, low: float = 0.7, high: float = 1.5) -> TokenLoss:
    """A symmetric clip of log r, as wide as a second moment allows (M2PO, arXiv:2510.01161, after its authors' code).

        mean of min((log r)^2, tau^2) = threshold   over the tokens a clip can act on: A > 0, r > 1 or A < 0, r < 1
        bounds = exp(-tau), exp(tau),   and never tighter than (low, high)

    The bounds are found over the tokens of this call. The authors round tau down to the |log r| of a token.
    """
    _check_positive(threshold=threshold)
    _check_bounds(low, high)
    reach = _second_moment_reach(tokens, threshold)
    lower, upper = (-reach).exp().clamp(max=low), reach.exp().clamp(min=high)
    loss, unclipped = clipped_surrogate(tokens.ratio, tokens.advantages, lower, upper)
    return TokenLoss(loss, unclipped & tokens.within)


def _second_moment_reach(tokens: Tokens, threshold: float) -> Tensor:  # 0-d
    """tau of `m2po`, by bisection: sums over all tokens need no order and repeat bit for bit."""
    log_ratio = tokens.log_ratio.detach().double()
    outward = (log_ratio * tokens.advantages > 0) & tokens.within
    moments = torch.where(outward, log_ratio**2, 0)
    allowed = threshold * outward.sum(dtype=torch.float64)
    within = zero_or_nan(log_ratio.sum())
    beyond = within + MAX_LOG_RATIO**2
    for _ in range(52):  # as many as a float64 has bits
        middle = (within + beyond) / 2
        fits = torch.minimum(moments, middle).sum() <= allowed
        within, beyond = torch.where(fits, middle, within), torch.where(fits, beyond, middle)
    return within.sqrt().to(tokens.dtype)


def dppo(tokens: Tokens, *, delta: float = 0.15) -> TokenLoss:
    """A mask on the difference of probabilities in place of a clip of their ratio (DPPO, arXiv:2602.04879, binary TV).

        L_t = -M_t r_t A_t,   M_t = 0 where A > 0 and pi - mu > delta, or A < 0 and pi - mu < -delta;  1 elsewhere

    pi and mu are the probabilities of the token itself now and when it was sampled, so that rare tokens move freely. A
    masked token has loss 0. The ratio is not truncated: the paper argues against it. Its KL and top-K divergences are
    not here. The authors use delta = 0.15 with advantages="dr_grpo" and reduction="fixed_length".
    """
    _check_positive(delta=delta)
    moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
    masked = torch.where(tokens.advantages > 0, moved > delta, (moved < -delta) & (tokens.advantages < 0))
    kept = torch.where(masked, zero_or_nan(tokens.ratio), tokens.ratio)
    return TokenLoss(-kept * tokens.advantages, ~masked & tokens.within)


@dataclass(frozen=True)
class Objective:
    """An objective and what a trainer has to know to call it."""

    compute: Callable[..., TokenLoss | Clipped]
    """Tokens and the objective's own options in, the loss of each token out."""
    solves_bounds: bool = False
    """Takes `bounds`, which are solved from the tokens of the update."""
    whole_update: bool = False
    """Looks at all tokens of the update in one call, so an update cannot be cut into micro-batches."""
    needs_sequences: bool = False
    """Has to know which response each token belongs to."""
    needs_uses: bool = False
    """Has to know how often each token was trained on before, with its default options."""
    settings: Callable[..., ClipSettings] | None = None
    """Makes the clip settings of its own options, where an objective solves bounds but does not take settings."""

    @cached_property
    def options(self) -> dict[str, float | None]:
        """Its own options with their defaults."""
        parameters = inspect.signature(self.settings or self.compute).parameters
        return {name: each.default for name, each in parameters.items() if name not in ("tokens", "bounds")}


OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(grpo),
    "clip_higher": Objective(clip_higher),
    "dual_clip": Objective(dual_clip),
    "push_once": Objective(push_once, needs_uses=True),
    "brake": Objective(brake, solves_bounds=True, needs_uses=True, settings=BRAKES["brake"]),
    "brake_all": Objective(brake, solves_bounds=True, settings=BRAKES["brake_all"]),
    "bapo": Objective(bapo, solves_bounds=True),
    "dcpo": Objective(dcpo),
    "cispo": Objective(cispo),
    "gspo": Objective(gspo, needs_sequences=True),
    "sapo": Objective(sapo),
    "topr": Objective(topr, needs_sequences=True),
    "asymre": Objective(asymre),
    "m2po": Objective(m2po, whole_update=True),
    "dppo": Objective(dppo),
}
