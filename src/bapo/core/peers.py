"""Objectives of others, for comparison with ours.

They are here only as losses: without the KL terms, advantage tricks and resampling of their papers (see docstrings).
"""

import math

import torch
from torch import Tensor

from bapo.core.checks import MAX_LOG_RATIO, check_bounds, check_positive, zero_or_nan
from bapo.core.tokens import TokenLoss, Tokens, clipped_surrogate


def dcpo(tokens: Tokens, *, eps_low: float = 0.16, eps_high: float = 0.2, max_ratio: float = 10.0) -> TokenLoss:
    """Bounds that widen as the behaviour probability q falls (DCPO, arXiv:2509.02333).

        |r - 1| r q <= eps   =>   0.5 + 0.5 sqrt(max(1 - 4 eps_low / q, 0)) <= r <= 0.5 + 0.5 sqrt(1 + 4 eps_high / q)

    and r <= max_ratio. Its smooth advantage standardisation and its loss averaging are not part of this.
    """
    check_positive(eps_low=eps_low, eps_high=eps_high, max_ratio=max_ratio)
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
    check_bounds(low, high)
    weight = tokens.ratio.detach().clamp(low, high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, torch.ones_like(tokens.mask))


def gspo(tokens: Tokens, *, low: float = 1 - 3e-4, high: float = 1 + 4e-4) -> TokenLoss:
    """One length-normalised ratio per response, clipped as a whole (GSPO, arXiv:2507.18071).

        s_i = exp( (1/|y_i|) sum_t log r_it ),   L_i = -min(s_i A_i, clip(s_i, low, high) A_i) on each of its tokens

    Use reduction="sequence_mean" for the paper's objective. Advantages must be equal within a response.
    """
    check_bounds(low, high)
    ratio = (tokens.per_sequence(tokens.log_ratio) / tokens.lengths).exp()
    advantages = tokens.per_sequence(tokens.advantages) / tokens.lengths
    loss, unclipped = clipped_surrogate(ratio, advantages, low, high)
    return TokenLoss(loss, unclipped & tokens.within)


def sapo(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """A soft gate in place of the clip (SAPO, arXiv:2511.20347).

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t,   tau by the sign of A_t;  its slope at r = 1 is that of r A
    """
    check_positive(tau_positive=tau_positive, tau_negative=tau_negative)
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
    check_positive(threshold=threshold)
    check_bounds(low, high)
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
    check_positive(delta=delta)
    moved = tokens.logprobs.detach().exp() - tokens.behavior_logprobs.exp()
    masked = torch.where(tokens.advantages > 0, moved > delta, (moved < -delta) & (tokens.advantages < 0))
    kept = torch.where(masked, zero_or_nan(tokens.ratio), tokens.ratio)
    return TokenLoss(-kept * tokens.advantages, ~masked & tokens.within)


def opsm(tokens: Tokens, *, low: float = 0.8, high: float = 1.2, delta: float = 0.1, used_only: float = 0) -> TokenLoss:
    """GRPO's clip without negative responses that have fallen (off-policy sequence masking, DeepSeek-V3.2).

        L_it = -M_i min(r_it A_it, clip(r_it, low, high) A_it),   M_i = 0 where A_i < 0 and d_i > delta;  1 elsewhere
        d_i = (1/|y_i|) sum_t log( mu(y_it) / pi(y_it) )

    arXiv:2512.02556, eq. 8 and 9, which print no value of delta: TRL's example is 0.5, slime's default 1e-4. With
    used_only = 1 the mask spares tokens that were not trained on before; that is ours. A masked token has loss 0. Use
    reduction="sequence_mean" for the paper's objective. Advantages must be equal within a response.
    """
    check_bounds(low, high)
    if used_only not in (0, 1):
        raise ValueError(f"used_only={used_only!r} must be 0 or 1: with 1, tokens that are new keep their loss.")
    masked = has_fallen(tokens, delta)
    if used_only:
        assert tokens.uses is not None, "used_only needs uses"
        masked &= tokens.uses.bool()
    loss, unclipped = clipped_surrogate(tokens.ratio, tokens.advantages, low, high)
    return TokenLoss(torch.where(masked, zero_or_nan(loss), loss), unclipped & ~masked & tokens.within)


def has_fallen(tokens: Tokens, delta: float) -> Tensor:  # bool, for each token
    """The negative responses that `opsm` masks. With advantage 0 for them, any objective but asymre has its mask."""
    check_positive(delta=delta)
    fallen = -tokens.per_sequence(tokens.log_moved.detach()) / tokens.lengths
    return tokens.negative & (fallen > delta)


def dis(tokens: Tokens, *, low: float = 0.7, high: float = 6.0) -> TokenLoss:
    """No token whose ratio has left an interval, whatever its sign (direct double-sided importance sampling).

        L_t = -sg(f(r_t)) A_t log pi(y_t),   f(r) = r for low < r < high,  0 elsewhere

    SAO, arXiv:2607.07508, eq. 1-3; its epsilons for mathematics are 0.3 and 5, those for code, 0.8 and 3, are low = 0.2
    and high = 4. The paper does not say whether the weight carries gradient; here it does not, as in other people's
    code. Its critic and its single rollouts are not part of this.
    """
    check_bounds(low, high)
    ratio = tokens.ratio.detach()
    inside = (ratio > low) & (ratio < high)
    weight = torch.where(inside, ratio, zero_or_nan(ratio))
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, inside & tokens.within)


def vespo(
    tokens: Tokens,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    """A smooth weight on the ratio of the whole response, with a peak near 1 (VESPO, arXiv:2602.10693).

        L_t = -sg(phi(w)) A_t log pi(y_t),   phi(w) = w^k exp(lambda (1 - w)),   w = pi(y) / mu(y)

    k and lambda go by the sign of A. As in its authors' code, w is at least 1e-8. Advantages must be equal within a
    response.
    """
    check_positive(
        k_positive=k_positive, lambda_positive=lambda_positive, k_negative=k_negative, lambda_negative=lambda_negative
    )
    log_ratio = tokens.per_sequence(tokens.log_ratio.detach()).clamp(math.log(1e-8), MAX_LOG_RATIO)
    k = torch.where(tokens.negative, k_negative, k_positive)
    rate = torch.where(tokens.negative, lambda_negative, lambda_positive)
    weight = (k * log_ratio + rate * (1 - log_ratio.exp())).exp()
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, weight > 0)
