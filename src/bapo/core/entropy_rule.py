"""What the clip does to entropy, and the other numbers an off-policy run should watch.

The Entropy-Clip Rule (arXiv:2510.18927): to first order an update changes the entropy of a softmax policy by

    dH = -eta Cov_{y~pi}( log pi(y), pi(y) (A(y) X(y) + C) ),   X = 1 where the clip retains the token, C = -E_pi[A X]

(the paper drops the factor pi(y) of the logit change; we keep it, because then the statement is exact as eta -> 0).
So a token's push on entropy has the sign of its quadrant:

                          high advantage      low advantage
    high probability      lowers entropy      raises entropy
    low probability       raises entropy      lowers entropy

All functions return values; those over tokens take the tokens of a whole update (gather micro-batches and ranks first),
because a quantile or a mean threshold of a part is not that of the whole. Gradient norms belong to the learner.
"""

from functools import cache

import torch
from torch import Tensor

from bapo.core.bounds import ClipBounds
from bapo.core.checks import holds
from bapo.core.objectives import low_of_each, share_of
from bapo.core.settings import ClipSettings, Measure
from bapo.core.tokens import Tokens, clip
from bapo.types import LOG_RATIO_EDGES, USE_EDGES

QUADRANTS = ("high_prob_high_adv", "high_prob_low_adv", "low_prob_high_adv", "low_prob_low_adv")
QUANTILES = {"p01": 0.01, "p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


@torch.no_grad()
def predicted_entropy_change(tokens: Tokens, entropy: Tensor, retained: Tensor) -> Tensor:  # 0-d, dH per unit of eta
    """The rule from sampled tokens: expectations under pi become ratio-weighted means over tokens.

        dH / eta = -mean_t[ r_t (log pi_t + H_t) pi_t (A_t X_t + C) ],   C = -mean_t[ r_t A_t X_t ]

    With one sample per state, C is the mean over all states instead of each state's own. eta is a step on logits, so
    under Adam read the sign and compare sizes between steps; do not read it as nats.
    """
    signal = tokens.advantages * retained
    ratio = tokens.ratio.detach()
    centred = signal - masked_mean(ratio * signal, tokens.mask)
    surprise = tokens.logprobs.detach() + entropy
    return -masked_mean(ratio * surprise * tokens.logprobs.detach().exp() * centred, tokens.mask)


@torch.no_grad()
def quadrant_masses(tokens: Tokens, entropy: Tensor, retained: Tensor) -> dict[str, Tensor]:
    """Share of the gradient mass r |A| in each quadrant of the rule, retained and blocked; the eight sum to 1.

    High probability: log pi + H > 0. High advantage: above the mean advantage of the retained signed tokens.
    """
    signed = tokens.mask & (tokens.advantages != 0)
    mass = torch.where(signed, tokens.ratio.detach() * tokens.advantages.abs(), 0.0)
    mass = mass / mass.sum().clamp(min=torch.finfo(mass.dtype).tiny)
    high_prob = tokens.logprobs.detach() + entropy > 0
    high_adv = tokens.advantages > masked_mean(tokens.advantages, signed & retained)
    inside = (high_prob & high_adv, high_prob & ~high_adv, ~high_prob & high_adv, ~high_prob & ~high_adv)
    return {
        f"{quadrant}_{fate}": (mass * (here & chosen)).sum()
        for quadrant, here in zip(QUADRANTS, inside, strict=True)
        for fate, chosen in (("retained", retained), ("blocked", ~retained))
    }


@torch.no_grad()
def clip_statistics(tokens: Tokens, retained: Tensor) -> dict[str, Tensor]:
    """Token shares by sign, and how many of each the clip blocked."""
    positive = tokens.mask & holds(torch.gt, tokens.advantages, 0)
    negative = tokens.mask & tokens.negative
    counted = (tokens.mask, positive, negative, positive & ~retained, negative & ~retained)
    return clip_fractions(*(chosen.count_nonzero() for chosen in counted))


def clip_fractions(
    tokens: Tensor, positive: Tensor, negative: Tensor, blocked_positive: Tensor, blocked_negative: Tensor
) -> dict[str, Tensor]:
    """The same from how many tokens there are of each kind."""
    fractions = {
        "positive_tokens": (positive, tokens),
        "negative_tokens": (negative, tokens),
        "clip_fraction": (blocked_positive + blocked_negative, positive + negative),
        "clip_fraction_positive": (blocked_positive, positive),
        "clip_fraction_negative": (blocked_negative, negative),
    }
    return {name: part.double() / whole.clamp(min=1) for name, (part, whole) in fractions.items()}


@torch.no_grad()
def ratio_statistics(tokens: Tokens) -> dict[str, Tensor]:
    """How far the learner has moved from the policies that sampled: quantiles, KL and effective sample size.

    kl is the mean of r - 1 - log r, an unbiased and non-negative estimate of KL(pi_behavior || pi_theta); ess is
    (sum r)^2 / (n sum r^2), 1 on-policy.
    """
    log_ratio, mask = tokens.log_ratio.detach(), tokens.mask
    count = mask.sum()
    ascending = torch.where(mask, log_ratio, torch.inf).flatten().sort().values
    at = torch.stack([((count - 1).clamp(min=0) * quantile).round().long() for quantile in QUANTILES.values()])
    ratio = torch.where(mask, log_ratio.exp(), 0.0).double()
    return {
        **{f"ratio_{name}": value for name, value in zip(QUANTILES, ascending[at].exp().unbind(), strict=True)},
        "ratio_max": ratio.max(),
        "kl": masked_mean(log_ratio.expm1() - log_ratio, mask),
        "ess": ratio.sum() ** 2 / (count * (ratio**2).sum()).clamp(min=torch.finfo(torch.float64).tiny),
    }


@torch.no_grad()
def share_statistics(tokens: Tokens, settings: ClipSettings, bounds: ClipBounds | None) -> dict[str, Tensor]:
    """The positive share before any clip, at the fixed (0.8, 1.2), and at the bounds in use."""
    signal = torch.where(tokens.mask & tokens.within, tokens.advantages, 0.0)
    if settings.weight == "rollout_prob":
        signal = signal * tokens.behavior_logprobs.exp()
    pairs: dict[str, tuple[Tensor | float, Tensor | float]] = {
        "share_unclipped": (-1.0, torch.inf),
        "share_fixed": (0.8, 1.2),
    }
    if bounds is not None:
        low = low_of_each(bounds.low, tokens.uses, bounds.used_low, tokens.dtype)
        pairs["share"] = (low, bounds.high)
    ratio = tokens.ratio.detach()
    return {name: positive_share(ratio, signal, *pair, settings.measure) for name, pair in pairs.items()}


@torch.no_grad()
def positive_share(
    ratio: Tensor, signal: Tensor, low: Tensor | float, high: Tensor | float, measure: Measure = "gradient"
) -> Tensor:  # 0-d float64
    """P / (P + N) at one pair of bounds; `signal` is w * A with masked tokens set to 0. No signal at all: 1."""
    positive = holds(torch.gt, signal, 0)
    kept = (positive & holds(torch.lt, ratio, high)) | (~positive & holds(torch.gt, ratio, low))
    counted = ratio * kept.view(torch.int8)
    if measure == "surrogate":
        counted = counted + clip(ratio, low, high) * (~kept).view(torch.int8)
    return share_of(counted * signal, signal)


@torch.no_grad()
def staleness_histogram(
    versions: Tensor,  # [tokens] policy version that sampled each token
    mask: Tensor,  # [tokens]
    *,
    version: int,  # the learner's version now
    bins: int,  # count 0 .. bins-1 separately, everything older in the last one
) -> Tensor:  # [bins + 1] counts, int64
    """How many updates lie between sampling and use, per token."""
    staleness = (version - versions).flatten()
    if mask.device.type == "cpu" and bool(((staleness < 0) & mask.flatten()).any()):
        raise ValueError(
            f"versions holds {int(versions[mask].max())}, newer than the learner's version={version}: a token cannot "
            "come from a policy that does not exist yet. Pass the learner's version at the time of use."
        )
    ages = staleness.clamp(0, bins)
    return (ages[:, None] == torch.arange(bins + 1, device=ages.device)).mul(mask.flatten()[:, None]).sum(0)


@torch.no_grad()
def ratio_profile(tokens: Tokens, entropy: Tensor) -> dict[str, Tensor]:  # each [bins]
    """Which tokens the policy has moved away from: probability and entropy by ratio (the paper's figures 5 and 10).

        bin b holds the tokens with edge_b <= log r_t < edge_{b+1}
        ratio_histogram = their number,  ratio_prob = mean pi(y_t),  ratio_entropy = mean H_t

    Both means are under the current policy, and 0 in an empty bin. Sums are matrix products, which add in the same
    order every time.
    """
    log_ratio = tokens.log_ratio.detach().flatten()
    edges = _edges(LOG_RATIO_EDGES, log_ratio.dtype, log_ratio.device)
    bins = torch.bucketize(log_ratio, edges, right=True)
    inside = bins == torch.arange(len(edges) + 1, device=bins.device)[:, None]
    mask = tokens.mask.flatten()
    values = torch.stack([torch.ones_like(log_ratio), tokens.logprobs.detach().exp().flatten(), entropy.flatten()], 1)
    values = torch.where(mask[:, None], values, 0.0).double()
    count, prob, nats = ((inside & mask).double() @ values).unbind(1)
    return {
        "ratio_histogram": count,
        "ratio_prob": prob / count.clamp(min=1),
        "ratio_entropy": nats / count.clamp(min=1),
    }


@torch.no_grad()
def use_profile(tokens: Tokens, retained: Tensor) -> dict[str, Tensor]:  # each [bins]
    """Where tokens stand, and what the clip does to negative ones, by how often they were trained on before.

        bin b holds the tokens with edge_b <= uses < edge_{b+1}
        use_histogram = their number,  use_positive, use_negative = mean log r by sign,
        use_retained = share of the negative ones that the clip retains,
        use_below = share of the negative ones that it retains below the probability they were sampled with, r < 1

    Means are 0 in an empty bin. Sums are matrix products, as in `ratio_profile`.
    """
    assert tokens.uses is not None
    mask, log_ratio = tokens.mask.flatten(), tokens.log_ratio.detach().flatten()
    edges = _edges(USE_EDGES, torch.int64, tokens.uses.device)
    bins = torch.bucketize(tokens.uses.flatten(), edges, right=True)
    inside = (bins == torch.arange(len(edges) + 1, device=bins.device)[:, None]) & mask
    advantages, kept = tokens.advantages.flatten(), retained.flatten()
    positive, negative = mask & (advantages > 0), mask & (advantages < 0)
    below = negative & kept & (log_ratio < 0)
    columns = [mask, positive, negative, negative & kept, below, positive * log_ratio, negative * log_ratio]
    sums = inside.double() @ torch.stack([column.double() for column in columns], 1)
    count, positives, negatives, retained_negatives, pushed_below, positive_sum, negative_sum = sums.unbind(1)
    return {
        "use_histogram": count,
        "use_positive": positive_sum / positives.clamp(min=1),
        "use_negative": negative_sum / negatives.clamp(min=1),
        "use_retained": retained_negatives / negatives.clamp(min=1),
        "use_below": pushed_below / negatives.clamp(min=1),
    }


@cache
def _edges(edges: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached, because copying numbers from the host to the device makes the host wait."""
    return torch.tensor(edges, dtype=dtype, device=device)


def update_statistics(
    tokens: Tokens,
    retained: Tensor,
    *,
    settings: ClipSettings,
    bounds: ClipBounds | None,
    entropy: Tensor | None = None,
    trained: Tokens | None = None,
) -> dict[str, Tensor]:
    """All statistics that the tokens of one update allow, as 0-d tensors.

    `entropy`, that of each token's own distribution, adds the Entropy-Clip Rule. `trained` holds the same tokens with
    the advantages that were trained on, where those were weighed; the rule uses them. `ratio_profile`,
    `use_profile` and `staleness_histogram`, which return vectors, are called beside it.
    """
    metrics = clip_statistics(tokens, retained) | ratio_statistics(tokens) | share_statistics(tokens, settings, bounds)
    if entropy is not None:
        metrics |= entropy_statistics(trained or tokens, entropy, retained)
    return metrics


def entropy_statistics(tokens: Tokens, entropy: Tensor, retained: Tensor) -> dict[str, Tensor]:
    """Mean entropy, the rule's prediction and its quadrants."""
    return {
        "entropy": masked_mean(entropy, tokens.mask),
        "predicted_entropy_change": predicted_entropy_change(tokens, entropy, retained),
        **quadrant_masses(tokens, entropy, retained),
    }


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values under the mask, in float64; 0 where it selects nothing."""
    return torch.where(mask, values.double(), 0.0).sum() / mask.sum().clamp(min=1)
