"""Statistics that need all tokens or responses at once: quantiles, effective sample size, lengths, errors.

Each update keeps a `Pooled`, so that the statistics of many updates are computed over all of their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from bapo.core.entropy_rule import ratio_statistics
from bapo.core.objectives import Tokens
from bapo.diagnose.dump_files import Array

WIDE = (0.8, 1.2)
"""A ratio outside these bounds counts as wide. It is the symmetric clip that most trainers start from."""


@dataclass(frozen=True)
class Pooled:
    """What quantiles and errors need to know about every token or response."""

    log_ratio: Array
    signed: Array
    parts: Array
    """[sequences, 2] unclipped P and N of each response; empty if responses are not known."""
    lengths: Array
    """[sequences]"""
    advantages: Array
    """[sequences] mean advantage."""
    rewards: Array
    """[sequences], or empty."""
    drift: Array
    """[tokens] the sampler's log-prob minus the recomputed one, or empty."""


def join(parts: Sequence[Pooled]) -> Pooled:
    """The tokens and responses of several updates, one after the other."""
    return Pooled(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Pooled)))


def pool(tokens: Tokens, rewards: Array | None, drift: Array) -> Pooled:
    """The `Pooled` of one update."""
    log_ratio = tokens.log_ratio.double().numpy()
    advantages = tokens.advantages.double().numpy()
    parts, lengths, means = np.empty((0, 2)), np.empty(0), np.empty(0)
    if tokens.sequence_ids is not None:
        ids = tokens.sequence_ids.numpy()
        mass = np.exp(log_ratio) * advantages * tokens.within.numpy()
        lengths = np.bincount(ids).astype(np.float64)
        means = np.bincount(ids, advantages) / lengths
        parts = np.stack([np.bincount(ids, mass.clip(min=0)), np.bincount(ids, -mass.clip(max=0))], 1)
    return Pooled(log_ratio, advantages != 0, parts, lengths, means, np.empty(0) if rewards is None else rewards, drift)


def ratios(pooled: Pooled) -> dict[str, float]:
    """Quantiles, KL, effective sample size and mean of the ratio, and the share of ratios that are wide."""
    log_ratio = torch.from_numpy(pooled.log_ratio)
    tokens = Tokens(
        log_ratio,
        torch.zeros_like(log_ratio),
        torch.zeros_like(log_ratio),
        torch.ones_like(log_ratio, dtype=torch.bool),
    )
    ratio = np.exp(pooled.log_ratio)
    wide = ((ratio < WIDE[0]) | (ratio > WIDE[1]))[pooled.signed]
    return {key: float(value) for key, value in ratio_statistics(tokens).items()} | {
        "ratio_mean": float(ratio.mean()),
        "wide": float(wide.mean()) if len(wide) else 0.0,
    }


def share_error(parts: Array) -> float | None:
    """Standard error of the share P / (P + N), a ratio of two sums over n responses taken as independent.

    sqrt( n / (n - 1) sum_i (P_i - share (P_i + N_i))^2 ) / (P + N)
    """
    whole = float(parts.sum())
    count = len(parts)
    if count < 2 or whole == 0:
        return None
    residual = parts[:, 0] - parts[:, 0].sum() / whole * parts.sum(1)
    return math.sqrt(count / (count - 1) * float((residual**2).sum())) / whole


def lengths(pooled: Pooled) -> dict[str, float]:
    """Mean response length by sign of the advantage, and by correctness where rewards are known."""
    chosen = {
        "all": np.ones(len(pooled.lengths), dtype=bool),
        "positive": pooled.advantages > 0,
        "negative": pooled.advantages < 0,
    }
    if len(pooled.rewards) == len(pooled.lengths):
        chosen |= {"correct": pooled.rewards > 0.5, "wrong": pooled.rewards <= 0.5}
    return {name: float(pooled.lengths[here].mean()) for name, here in chosen.items() if here.any()}


def mismatch(drift: Array) -> dict[str, float] | None:
    """How far the engine's log-probs and the trainer's recomputed ones are apart on the same tokens."""
    if not len(drift):
        return None
    limited = -drift.clip(-20, 20)  # log(recomputed / sampler's), over samples of the sampler
    return {
        "mean_abs": float(np.abs(drift).mean()),
        "max_abs": float(np.abs(drift).max()),
        "kl": float((np.expm1(limited) - limited).mean()),
        "beyond_0.1": float((np.abs(drift) > 0.1).mean()),
    }
