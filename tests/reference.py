"""What the core must agree with: the search of BAPO step by step, in Python floats, and the exact entropy rule."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo import ClipSettings


@dataclass(frozen=True)
class Found:
    low: float
    high: float
    share: float
    margins: list[float]  # how far each visited share was from the target
    visited: int


def contributions(tokens, low, high, measure, used_low=None):
    """P and N of method Eq. 8 (surrogate) or Eq. 5 (gradient), one token at a time. A used one has its own bound."""
    positive, negative = [], []
    fresh_low = low
    for ratio, advantage, weight, uses in tokens:
        low = used_low if uses > 0 and used_low is not None else fresh_low
        if advantage > 0:
            counted = min(ratio, high) if measure == "surrogate" else (ratio if ratio < high else 0.0)
            positive.append(weight * counted * advantage)
        elif advantage < 0:
            counted = max(ratio, low) if measure == "surrogate" else (ratio if ratio > low else 0.0)
            negative.append(weight * counted * -advantage)
    return math.fsum(positive), math.fsum(negative)


def share_of(tokens, low, high, measure, used_low=None):
    if all(advantage == 0 for _, advantage, *_ in tokens):
        return 1.0
    positive, negative = contributions(tokens, low, high, measure, used_low)
    return positive / (positive + negative) if positive + negative else 0.0


def search(ratio, advantages, mask, settings: ClipSettings, behavior_logprobs=None, uses=None) -> Found:
    """The loop: raise one bound to its end, then the other, until the share reaches the target."""
    weights = behavior_logprobs.double().exp() if settings.weight == "rollout_prob" else ratio.double() * 0 + 1
    uses = torch.zeros_like(mask) if uses is None else uses
    columns = (x.double()[mask].tolist() for x in (ratio, advantages, weights, uses))
    tokens = list(zip(*columns, strict=True))
    (low, last_low), (high, last_high) = settings.low, settings.high
    lows = highs = 0
    margins, rounding = [], 1e-9

    def can_raise_low():
        return settings.low[0] + (lows + 1) * settings.low_step <= last_low + rounding * settings.low_step

    def can_raise_high():
        return settings.high[0] + (highs + 1) * settings.high_step <= last_high + rounding * settings.high_step

    while True:
        share = share_of(tokens, low, high, settings.measure, settings.used_low)
        margins.append(abs(share - settings.target_share))
        if share >= settings.target_share:
            break
        high_turn = can_raise_high() and (settings.order == "high_first" or not can_raise_low())
        if high_turn:
            highs += 1
            high = settings.high[0] + highs * settings.high_step
        elif can_raise_low():
            lows += 1
            low = settings.low[0] + lows * settings.low_step
        else:
            break
    return Found(low, high, share, margins, lows + highs + 1)


@torch.no_grad()
def exact_entropy_change(
    probs: Tensor,  # [..., vocabulary] the current policy
    advantages: Tensor,  # [..., vocabulary] of every action
    retained: Tensor,  # [..., vocabulary] bool: X, which actions the clip lets through
) -> Tensor:  # [...] dH per unit of eta
    """The rule with the whole distribution at hand: the derivative of entropy along one gradient step on the logits."""
    signal = advantages * retained
    centred = probs * (signal - (probs * signal).sum(-1, keepdim=True))
    logprobs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    surprise = logprobs - (probs * logprobs).sum(-1, keepdim=True)
    return -(probs * surprise * centred).sum(-1)
