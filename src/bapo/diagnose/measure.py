"""Numbers: what the tokens of an update say about its clip, and what other objectives would have done with them.

    measure(update) -> Numbers of one update;   total([numbers, ...]) -> the same over all of them

Everything is kept as the sums it is made of (tokens blocked, gradient mass by sign, one count per stop), so that the
numbers of many updates are those of all their tokens, never a mean of means. Only bounds and quantiles are given per
update and pooled from all tokens (pooled.py). Impossible tokens (not finite, log-probs above 0) are left out here and
named in checks.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from bapo.core.bounds import StopReason
from bapo.core.checks import LOGPROB_SLACK
from bapo.core.entropy_rule import quadrant_masses
from bapo.core.loss import policy_loss
from bapo.core.objectives import OBJECTIVES, Tokens, retained_by
from bapo.core.settings import PRESETS, ClipSettings
from bapo.diagnose.dump_files import Array
from bapo.diagnose.dumps import LoggedUpdate
from bapo.diagnose.pooled import Pooled, join, lengths, mismatch, pool, ratios, share_error
from bapo.diagnose.push_once import Pushes, joined, pushes_by_use

SETTINGS: dict[str, ClipSettings] = {
    "bapo": ClipSettings(),
    **{f"bapo {name}": ClipSettings.preset(name) for name in PRESETS},  # type: ignore[arg-type]
}
"""BAPO's settings that are tried: the default of this library (gradient measure) and each published preset."""
FIXED = {"unclipped": (-1.0, math.inf), "(0.8, 1.2)": (0.8, 1.2), "(0.8, 1.28)": (0.8, 1.28)}
"""Fixed clips at which the positive share is given."""


@dataclass(frozen=True)
class Signal:
    """Positive and negative mass of some tokens; adds up."""

    positive: float = 0.0
    negative: float = 0.0

    def __add__(self, other: Signal) -> Signal:
        return Signal(self.positive + other.positive, self.negative + other.negative)

    @property
    def share(self) -> float:
        """P / (P + N); NaN where nothing is left."""
        whole = self.positive + self.negative
        return self.positive / whole if whole > 0 else math.nan


@dataclass(frozen=True)
class Fate:
    """What one objective does to the tokens: how many it blocks, and the gradient it leaves, by sign. Adds up."""

    tokens: Signal = Signal()
    """Signed tokens."""
    blocked: Signal = Signal()
    """Those without a gradient."""
    gradient: Signal = Signal()
    """Sum of |dL / d log pi| over the tokens of each sign."""

    def __add__(self, other: Fate) -> Fate:
        return Fate(self.tokens + other.tokens, self.blocked + other.blocked, self.gradient + other.gradient)

    @property
    def clipped(self) -> tuple[float, float, float]:
        """Share of the tokens blocked: of all signed ones, of positive ones, of negative ones."""
        pairs = [
            (self.blocked.positive + self.blocked.negative, self.tokens.positive + self.tokens.negative),
            (self.blocked.positive, self.tokens.positive),
            (self.blocked.negative, self.tokens.negative),
        ]
        return tuple(part / whole if whole else 0.0 for part, whole in pairs)  # type: ignore[return-value]


@dataclass(frozen=True)
class Bounds:
    """Where one of SETTINGS would have put the bounds of one update."""

    low: float
    high: float
    share: float
    share_at_start: float
    share_at_end: float
    stop: str

    @property
    def reached(self) -> bool:
        """Whether the share of its measure is at the target."""
        return self.stop in ("START", "RAISING_HIGH", "RAISING_LOW")


@dataclass(frozen=True)
class Numbers:
    """Every number of one update, or of all."""

    name: str
    updates: int
    tokens: int
    """Usable tokens under the mask."""
    sequences: int | None
    shares: dict[str, dict[str, Signal]]
    """measure -> fixed clip -> signal."""
    share_error: float | None
    """Standard error of the unclipped share of one update, responses taken as independent; the mean over updates."""
    sequence_mean: Signal | None
    """The unclipped signal where every response weighs the same (a sequence-mean loss)."""
    fates: dict[str, Fate]
    bounds: dict[str, list[Bounds]]
    """settings -> one entry per update."""
    ratios: dict[str, float]
    """Quantiles, kl, ess, mean, and `wide`: share of signed tokens outside (0.8, 1.2)."""
    quadrants: dict[str, dict[str, float]] | None
    """objective -> quadrant -> share of the gradient mass; None without entropies."""
    entropy: float | None
    lengths: dict[str, float]
    """Mean response length: all, positive, negative advantage; correct and wrong where rewards are known."""
    staleness: dict[int, int] | None
    """updates between sampling and use -> tokens."""
    mismatch: dict[str, float] | None
    """Sampler's own against recomputed log-probs: mean_abs, max_abs, kl, beyond_0.1."""
    pushes: dict[int, Pushes]
    """how often tokens were trained on before, or UNKNOWN -> how many negative ones are pushed down further."""
    pooled: Pooled = field(repr=False)

    def searched(self, settings: str) -> list[Bounds]:
        """The bounds of updates with a signal. Without one there is no search: bounds at their start, a share of 1."""
        return [bounds for bounds in self.bounds[settings] if bounds.stop != "NO_SIGNAL"]

    def stops(self, settings: str) -> dict[str, int]:
        """How many updates ended their search in which way."""
        return dict(Counter(bounds.stop for bounds in self.bounds[settings]))


def usable(update: LoggedUpdate) -> Array:
    """[tokens] which tokens can be computed with: everything finite, no log-prob above 0."""
    good = np.isfinite(update.advantages)
    for logprobs in (update.logprobs, update.behavior_logprobs):
        good &= np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)
    return good if update.entropy is None else good & np.isfinite(update.entropy)


def measure(update: LoggedUpdate) -> Numbers | None:
    """Every number of one update; None where no token is usable."""
    good = usable(update)
    if not good.any():
        return None
    ids = present = None
    if update.sequence_ids is not None:
        present, ids = np.unique(update.sequence_ids[good], return_inverse=True)
    advantages = _tensor(update.advantages[good])
    tokens = Tokens(
        _tensor(update.logprobs[good]),
        _tensor(update.behavior_logprobs[good]),
        advantages,
        torch.ones(int(good.sum()), dtype=torch.bool),
        None if ids is None else torch.from_numpy(ids),
        None if update.uses is None else _tensor(update.uses[good].clip(min=0)),
    )
    entropy = None if update.entropy is None else _tensor(update.entropy[good]).to(tokens.logprobs.dtype)
    fates, bounds, quadrants = _outcomes(tokens, entropy)
    rewards = None if update.rewards is None or present is None else update.rewards[present]
    drift = np.empty(0)
    if update.anchor is not None:
        drift = (update.behavior_logprobs[good].astype(np.float64) - update.anchor[good])[
            np.isfinite(update.anchor[good])
        ]
    pooled = pool(tokens, rewards, drift)
    staleness = None
    if update.staleness is not None:
        ages, counts = np.unique(update.staleness[good].astype(np.int64), return_counts=True)
        staleness = dict(zip(ages.tolist(), counts.tolist(), strict=True))
    signal = tokens.advantages * tokens.within  # a token past the limit of log-ratios does not count
    weight = 1 / tokens.lengths if ids is not None else None
    return Numbers(
        name=update.name,
        updates=1,
        tokens=len(advantages),
        sequences=None if present is None else len(present),
        shares={
            measure: {
                label: _signal(tokens.ratio, signal, *pair, surrogate=measure == "surrogate")
                for label, pair in FIXED.items()
            }
            for measure in ("gradient", "surrogate")
        },
        share_error=share_error(pooled.parts),
        sequence_mean=None if weight is None else _signal(tokens.ratio, signal * weight, *FIXED["unclipped"]),
        fates=fates,
        bounds=bounds,
        ratios=ratios(pooled),
        quadrants=quadrants,
        entropy=None if entropy is None else float(entropy.double().mean()),
        lengths=lengths(pooled),
        staleness=staleness,
        mismatch=mismatch(drift),
        pushes=pushes_by_use(
            update.logprobs[good],
            update.behavior_logprobs[good],
            update.advantages[good],
            None if update.uses is None else update.uses[good],
        ),
        pooled=pooled,
    )


def total(parts: Sequence[Numbers]) -> Numbers:
    """The numbers of all updates: sums are added up, and quantiles are taken over all tokens."""
    first = parts[0]
    if len(parts) == 1:
        return first
    pooled = join([p.pooled for p in parts])
    tokens = sum(p.tokens for p in parts)
    errors = [p.share_error for p in parts if p.share_error is not None]
    with_entropy = [p for p in parts if p.quadrants is not None and p.entropy is not None]
    names = [name for name in first.fates if all(name in p.fates for p in parts)]
    staleness: Counter[int] | None = None
    if all(p.staleness is not None for p in parts):
        staleness = reduce(lambda a, b: a + b, (Counter(p.staleness) for p in parts))
    return Numbers(
        name="all updates",
        updates=len(parts),
        tokens=tokens,
        sequences=None if any(p.sequences is None for p in parts) else sum(p.sequences or 0 for p in parts),
        shares={
            measure: {label: _sum([p.shares[measure][label] for p in parts]) for label in FIXED}
            for measure in first.shares
        },
        share_error=sum(errors) / len(errors) if errors else None,
        sequence_mean=_sum([p.sequence_mean for p in parts if p.sequence_mean is not None])
        if all(p.sequence_mean is not None for p in parts)
        else None,
        fates={name: reduce(lambda a, b: a + b, (p.fates[name] for p in parts)) for name in names},
        bounds={name: [bounds for p in parts for bounds in p.bounds[name]] for name in SETTINGS},
        ratios=ratios(pooled),
        quadrants=_mean_quadrants(with_entropy) if with_entropy else None,
        entropy=_weighted([(p.entropy or 0.0, p.tokens) for p in with_entropy]) if with_entropy else None,
        lengths=lengths(pooled),
        staleness=None if staleness is None else dict(sorted(staleness.items())),
        mismatch=mismatch(pooled.drift),
        pushes=joined([p.pushes for p in parts]),
        pooled=pooled,
    )


def _outcomes(
    tokens: Tokens, entropy: Tensor | None
) -> tuple[dict[str, Fate], dict[str, list[Bounds]], dict[str, dict[str, float]] | None]:
    """What every objective, and BAPO under each of SETTINGS, does to the tokens."""
    fates: dict[str, Fate] = {}
    bounds: dict[str, list[Bounds]] = {}
    quadrants: dict[str, dict[str, float]] = {}
    for name, objective, settings in _tried(tokens):
        logprobs = tokens.logprobs.detach().requires_grad_()
        out = policy_loss(
            logprobs,
            tokens.behavior_logprobs,
            tokens.advantages,
            tokens.mask,
            objective=objective,
            settings=settings,
            denominator=1.0,
            sequence_ids=tokens.sequence_ids,
            uses=tokens.uses if OBJECTIVES[objective].needs_uses else None,
        )
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        count = torch.ones_like(tokens.advantages)
        fates[name] = Fate(
            tokens=_by_sign(count, tokens.advantages),
            blocked=_by_sign(count * ~out.retained, tokens.advantages),
            gradient=_by_sign(logprobs.grad.abs(), tokens.advantages),
        )
        found = out.bounds
        if settings is not None and found is not None:
            assert found.stop is not None
            assert found.share_at_start is not None
            assert found.share_at_end is not None
            start, end = float(found.share_at_start), float(found.share_at_end)
            stop = StopReason(int(found.stop)).name
            bounds[name] = [Bounds(float(found.low), float(found.high), float(found.share), start, end, stop)]
        if entropy is not None and (settings is not None or name in ("grpo", "clip_higher")):
            quadrants[name] = {
                key: float(value) for key, value in quadrant_masses(tokens, entropy, out.retained).items()
            }
    return fates, bounds, quadrants or None


def _tried(tokens: Tokens) -> Iterator[tuple[str, str, ClipSettings | None]]:
    """Label, objective and settings of everything that is tried: what these tokens have all inputs for.

    An objective that solves bounds is tried under each of SETTINGS.
    """
    for name, objective in OBJECTIVES.items():
        inputs = (objective.needs_sequences, tokens.sequence_ids), (objective.needs_uses, tokens.uses)
        if any(needed and given is None for needed, given in inputs):
            continue
        if objective.solves_bounds:
            yield from ((label, name, settings) for label, settings in SETTINGS.items())
        else:
            yield name, name, None


def _by_sign(values: Tensor, advantages: Tensor) -> Signal:
    values = values.double()
    return Signal(float(values[advantages > 0].sum()), float(values[advantages < 0].sum()))


def _signal(ratio: Tensor, signal: Tensor, low: float, high: float, *, surrogate: bool = False) -> Signal:
    """P and N at one pair of bounds, as `positive_share` divides them."""
    kept = retained_by(ratio, signal, low, high)
    clipped = ratio.clamp(low, high) if surrogate else torch.zeros_like(ratio)
    return _by_sign(torch.where(kept, ratio, clipped).double() * signal.abs(), signal)


def _mean_quadrants(parts: Sequence[Numbers]) -> dict[str, dict[str, float]]:
    """Weighed by the gradient mass of each update, which makes it the share of all of it."""
    mass = [p.shares["gradient"]["unclipped"].positive + p.shares["gradient"]["unclipped"].negative for p in parts]
    first = parts[0].quadrants or {}
    return {
        name: {
            key: _weighted([((p.quadrants or {})[name][key], m) for p, m in zip(parts, mass, strict=True)])
            for key in masses
        }
        for name, masses in first.items()
    }


def _weighted(values: Sequence[tuple[float, float]]) -> float:
    whole = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / whole if whole else math.nan


def _sum(signals: Sequence[Signal]) -> Signal:
    return reduce(lambda a, b: a + b, signals, Signal())


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
