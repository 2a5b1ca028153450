"""Negative tokens that are pushed below the probability they were sampled with, by use, and what push once would keep.

A negative token with r < 1 is already less likely than when it was sampled. If the clip lets it pass, the update pushes
it down further. A fixed clip stops that at its lower bound only, whether the token is used for the first or for the
eighth time. Push once gives tokens that were trained on before a lower bound of 1: of the negative ones, only those
that have become more likely keep their gradient. Everything here is computed in float64 at the fixed clip (0.8, 1.2)
that most trainers start from, because a dump does not say which clip was in use. If only noise moves the learner, about
half of the ratios lie below 1, so that half by itself shows no push.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from bapo.core.objectives import MAX_LOG_RATIO
from bapo.diagnose.dump_files import Array
from bapo.diagnose.uses import UNKNOWN

LOW, HIGH = 0.8, 1.2
USED_LOW = 1.0
"""Push once: the lower bound of tokens that were trained on before."""


@dataclass(frozen=True)
class Pushes:
    """What (LOW, HIGH) and push once do to some tokens. Adds up."""

    negative: int = 0
    """Negative tokens, A < 0."""
    below: int = 0
    """Those that are less likely than when they were sampled, r < 1."""
    pushed: int = 0
    """Those among them that (LOW, HIGH) lets pass: the update pushes them further down."""
    kept: int = 0
    """Negative tokens that push once lets pass."""
    log_ratio: float = 0.0
    """Sum of log r over the negative tokens."""
    gradient: float = 0.0
    """Sum of r|A| over the negative tokens that (LOW, HIGH) lets pass."""
    pushed_gradient: float = 0.0
    """The same over those that are pushed further down."""
    kept_gradient: float = 0.0
    """The same over those that push once lets pass."""
    positive_gradient: float = 0.0
    """Sum of rA over the positive tokens that (LOW, HIGH) lets pass, as does push once."""

    def __add__(self, other: Pushes) -> Pushes:
        return Pushes(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Pushes)))

    @property
    def below_share(self) -> float:
        """Of the negative tokens: those less likely than when they were sampled."""
        return _ratio(self.below, self.negative)

    @property
    def mean_log_ratio(self) -> float:
        """How far negative tokens have moved since they were sampled, in nats; below 0 if they are less likely."""
        return _ratio(self.log_ratio, self.negative)

    @property
    def pushed_share(self) -> float:
        """Of the negative tokens: those less likely than when they were sampled, and pushed further down."""
        return _ratio(self.pushed, self.negative)

    @property
    def pushed_mass(self) -> float:
        """The same as a share of the negative gradient that (LOW, HIGH) lets pass."""
        return _ratio(self.pushed_gradient, self.gradient)

    @property
    def kept_share(self) -> float:
        """Of the negative tokens: those that push once lets pass."""
        return _ratio(self.kept, self.negative)

    @property
    def kept_mass(self) -> float:
        """The share of that gradient that push once lets pass."""
        return _ratio(self.kept_gradient, self.gradient)

    @property
    def share(self) -> float:
        """The positive share of the gradient at (LOW, HIGH)."""
        return _ratio(self.positive_gradient, self.positive_gradient + self.gradient)

    @property
    def share_then(self) -> float:
        """The positive share with push once."""
        return _ratio(self.positive_gradient, self.positive_gradient + self.kept_gradient)


def pushes_by_use(
    logprobs: Array,  # [tokens]
    behavior_logprobs: Array,  # [tokens]
    advantages: Array,  # [tokens]
    uses: Array | None,  # [tokens] how often each was trained on before, or UNKNOWN
) -> dict[int, Pushes]:
    """The pushes of tokens that were trained on 0, 1, 2, … times before. Without uses, of all tokens as UNKNOWN.

        r = exp(logprob - behavior_logprob)
        (LOW, HIGH): a negative token passes if r > LOW, a positive one if r < HIGH
        push once:   the same, but a negative token with uses > 0 passes if r > USED_LOW

    A token beyond the limit of log-ratios never passes. Push once leaves tokens of unknown use alone.
    """
    log_ratio = (logprobs.astype(np.float64) - behavior_logprobs).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = advantages.astype(np.float64)
    uses = np.full(len(log_ratio), UNKNOWN) if uses is None else uses
    within, ratio = np.abs(log_ratio) < MAX_LOG_RATIO, np.exp(log_ratio)
    mass = ratio * np.abs(advantages)
    negative, below = advantages < 0, ratio < 1
    passes = negative & within & (ratio > LOW)
    kept = negative & within & (ratio > np.where(uses > 0, USED_LOW, LOW))
    positive = (advantages > 0) & within & (ratio < HIGH)
    found = {}
    for use in np.unique(uses).tolist():
        here = uses == use
        found[use] = Pushes(
            negative=int((negative & here).sum()),
            below=int((negative & below & here).sum()),
            pushed=int((passes & below & here).sum()),
            kept=int((kept & here).sum()),
            log_ratio=float(log_ratio[negative & here].sum()),
            gradient=float(mass[passes & here].sum()),
            pushed_gradient=float(mass[passes & below & here].sum()),
            kept_gradient=float(mass[kept & here].sum()),
            positive_gradient=float(mass[positive & here].sum()),
        )
    return found


def joined(parts: Sequence[Mapping[int, Pushes]]) -> dict[int, Pushes]:
    """The pushes of several updates, added up by use."""
    uses = sorted({use for part in parts for use in part})
    return {use: sum((part[use] for part in parts if use in part), Pushes()) for use in uses}


def of_uses(pushes: Mapping[int, Pushes], chosen: Callable[[int], bool] = lambda use: True) -> Pushes:
    """The pushes of all tokens whose use is chosen, added up; of all tokens if nothing is said."""
    return sum((part for use, part in pushes.items() if chosen(use)), Pushes())


def first(pushes: Mapping[int, Pushes]) -> Pushes:
    """Tokens that were never trained on before."""
    return of_uses(pushes, lambda use: use == 0)


def later(pushes: Mapping[int, Pushes]) -> Pushes:
    """Tokens that were trained on before."""
    return of_uses(pushes, lambda use: use > 0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
