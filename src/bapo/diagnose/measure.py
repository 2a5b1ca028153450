"""Numbers: what the tokens of an update say about its clip, and what other objectives would have done with them.

    measure(update) -> Numbers of one update;   total([numbers, ...]) -> the same over all of them

Everything is kept as the sums it is made of (tokens blocked, gradient mass by sign, one count per stop), so that the
numbers of many updates are those of all their tokens, never a mean of means. What sums cannot give (quantiles, lengths,
errors) is computed from a `Pooled`, which keeps a few numbers of every token and response. Impossible tokens (not
finite, log-probs above 0) are left out here and named in problems.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial, reduce
from itertools import chain
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bapo.core.bounds import StopReason
from bapo.core.checks import LOGPROB_SLACK
from bapo.core.entropy_rule import quadrant_masses, ratio_statistics
from bapo.core.loss import policy_loss
from bapo.core.objectives import OBJECTIVES
from bapo.core.settings import PRESETS, ClipSettings, rule_of_used
from bapo.core.tokens import Tokens, retained_by
from bapo.diagnose.dump_files import Array
from bapo.diagnose.dumps import LoggedUpdate
from bapo.diagnose.uses import RULES, Pushes, joined, pushes_by_use

SETTINGS: dict[str, ClipSettings] = {
    "bapo": ClipSettings(),
    **{f"bapo {name}": ClipSettings.preset(name) for name in PRESETS},  # type: ignore[arg-type]
}
"""BAPO's settings that are tried: the default of this library (gradient measure) and each published preset."""
LOW, HIGH = 0.8, 1.2
FIXED = {"unclipped": (-1.0, math.inf), "(0.8, 1.2)": (LOW, HIGH), "(0.8, 1.28)": (0.8, 1.28)}
"""Fixed clips at which the positive share is given."""


@dataclass(frozen=True)
class Signal:
    """Positive and negative mass of some tokens; adds up."""

    positive: float = 0.0
    negative: float = 0.0

    def __add__(self, other: Signal) -> Signal:
        return Signal(self.positive + other.positive, self.negative + other.negative)

    @property
    def whole(self) -> float:
        """P + N."""
        return self.positive + self.negative

    @property
    def share(self) -> float:
        """P / (P + N); NaN where nothing is left."""
        return self.positive / self.whole if self.whole > 0 else math.nan


@dataclass(frozen=True)
class Fate:
    """What one objective does to the tokens: how many it blocks, and the gradient it leaves, by sign. Adds up."""

    tokens: Signal = Signal()  # signed tokens
    blocked: Signal = Signal()  # those without a gradient
    gradient: Signal = Signal()  # sum of |dL / d log pi| over the tokens of each sign

    def __add__(self, other: Fate) -> Fate:
        return Fate(self.tokens + other.tokens, self.blocked + other.blocked, self.gradient + other.gradient)

    @property
    def clipped(self) -> tuple[float, float, float]:
        """Share of the tokens blocked: of all signed ones, of positive ones, of negative ones."""
        pairs = ((getattr(self.blocked, key), getattr(self.tokens, key)) for key in ("whole", "positive", "negative"))
        return tuple(blocked / tokens if tokens else 0.0 for blocked, tokens in pairs)  # type: ignore[return-value]

    @property
    def figures(self) -> dict[str, float]:
        """All of it under names."""
        clipped = zip(("clip_fraction", "clip_fraction_positive", "clip_fraction_negative"), self.clipped, strict=True)
        blocked = {"blocked_positive": self.blocked.positive, "blocked_negative": self.blocked.negative}
        return {**dict(clipped), **blocked, "share": self.gradient.share}


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
class Brake:
    """What the objective brake finds in the used negative tokens of one update."""

    drift: float
    """How far they have fallen since they were sampled: their mean of -log r."""
    used_low: float
    """The lower bound that this gives to used tokens."""


@dataclass(frozen=True)
class Pooled:
    """What quantiles and errors need to know about every token or response."""

    log_ratio: Array
    signed: Array
    parts: Array  # [sequences, 2] unclipped P and N of each response; empty if responses are not known
    lengths: Array  # [sequences]
    advantages: Array  # [sequences] mean advantage
    rewards: Array  # [sequences], or empty
    drift: Array  # [tokens] the sampler's log-prob minus the recomputed one, or empty


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
    quadrants: dict[str, dict[str, float]] | None
    """objective -> quadrant -> share of the gradient mass; None without entropies."""
    entropy: float | None
    staleness: Counter[int] | None
    """updates between sampling and use -> tokens."""
    pushes: dict[int, Pushes]
    """how often tokens were trained on before, or UNKNOWN -> how many negative ones are pushed down further, and how
    many brake and push once keep."""
    brakes: list[Brake]
    """One entry per update with used negative tokens."""
    pooled: Pooled = field(repr=False)

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Quantiles, kl, ess and mean of the ratio, and `wide`: share of signed tokens outside (0.8, 1.2)."""
        log_ratio, ratio = torch.from_numpy(self.pooled.log_ratio), np.exp(self.pooled.log_ratio)
        zeros = torch.zeros_like(log_ratio)
        tokens = Tokens(log_ratio, zeros, zeros, torch.ones_like(log_ratio, dtype=torch.bool))
        wide = ((ratio < LOW) | (ratio > HIGH))[self.pooled.signed]
        found = {key: float(value) for key, value in ratio_statistics(tokens).items()}
        return found | {"ratio_mean": float(ratio.mean()), "wide": float(wide.mean()) if len(wide) else 0.0}

    @cached_property
    def lengths(self) -> dict[str, float]:
        """Mean response length: all, positive, negative advantage; correct and wrong where rewards are known."""
        lengths, advantages, rewards = self.pooled.lengths, self.pooled.advantages, self.pooled.rewards
        chosen = {"all": np.ones(len(lengths), dtype=bool), "positive": advantages > 0, "negative": advantages < 0}
        if len(rewards) == len(lengths):
            chosen |= {"correct": rewards > 0.5, "wrong": rewards <= 0.5}
        return {name: float(lengths[here].mean()) for name, here in chosen.items() if here.any()}

    @cached_property
    def mismatch(self) -> dict[str, float] | None:
        """How far the sampler's own log-probs are from the recomputed ones."""
        return mismatch(self.pooled.drift)

    def searched(self, settings: str) -> list[Bounds]:
        """The bounds of updates with a signal. Without one there is no search: bounds at their start, a share of 1."""
        return [bounds for bounds in self.bounds[settings] if bounds.stop != "NO_SIGNAL"]

    def stops(self, settings: str) -> Counter[str]:
        """How many updates ended their search in which way."""
        return Counter(bounds.stop for bounds in self.bounds[settings])


def usable(update: LoggedUpdate) -> Array:
    """[tokens] which tokens can be computed with: everything finite, no log-prob above 0."""
    good = np.isfinite(update.advantages)
    for logprobs in (update.logprobs, update.behavior_logprobs):
        good &= np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK)
    for extra in (update.entropy, update.log_kept):
        good = good if extra is None else good & np.isfinite(extra)
    return good


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
        log_kept=None if update.log_kept is None else _tensor(update.log_kept[good]),
    )
    entropy = None if update.entropy is None else _tensor(update.entropy[good]).to(tokens.logprobs.dtype)
    rewards = None if update.rewards is None or present is None else update.rewards[present]
    drift = np.empty(0)
    if update.anchor is not None:
        drift = update.sampler_logprobs[good].astype(np.float64) - update.anchor[good]
    pooled = _pool(tokens, rewards, drift[np.isfinite(drift)])
    signal = tokens.advantages * tokens.within  # a token past the limit of log-ratios does not count
    unclipped = FIXED["unclipped"]
    return Numbers(
        name=update.name,
        updates=1,
        tokens=len(advantages),
        sequences=None if present is None else len(present),
        shares={
            measure: {label: _signal(tokens.ratio, signal, *pair, measure) for label, pair in FIXED.items()}
            for measure in ("gradient", "surrogate")
        },
        share_error=_share_error(pooled.parts),
        sequence_mean=None if ids is None else _signal(tokens.ratio, signal * (1 / tokens.lengths), *unclipped),
        **_outcomes(tokens, entropy, None if update.uses is None else update.uses[good]),
        entropy=None if entropy is None else float(entropy.double().mean()),
        staleness=None if update.staleness is None else Counter(np.sort(update.staleness[good]).tolist()),
        pooled=pooled,
    )


def total(parts: Sequence[Numbers]) -> Numbers:
    """The numbers of all updates: sums are added up, and quantiles are taken over all tokens."""
    if len(parts) == 1:
        return parts[0]
    errors = [p.share_error for p in parts if p.share_error is not None]
    with_entropy = [p for p in parts if p.entropy is not None]
    sums = ("updates", "tokens", "sequences", "shares", "sequence_mean", "fates", "bounds", "staleness", "brakes")
    return Numbers(
        name="all updates",
        **{name: _added([getattr(p, name) for p in parts]) for name in sums},
        share_error=sum(errors) / len(errors) if errors else None,
        quadrants=_mean_quadrants(with_entropy) if with_entropy else None,
        entropy=_weighted([(p.entropy or 0.0, p.tokens) for p in with_entropy]) if with_entropy else None,
        pushes=joined([p.pushes for p in parts]),
        pooled=Pooled(*(np.concatenate([getattr(p.pooled, one.name) for p in parts]) for one in fields(Pooled))),
    )


def _outcomes(tokens: Tokens, entropy: Tensor | None, uses: Array | None) -> dict[str, Any]:
    """What every objective, and BAPO under each of SETTINGS, does to the tokens: the fields of `Numbers` about that."""
    fates: dict[str, Fate] = {}
    bounds: dict[str, list[Bounds]] = {}
    quadrants: dict[str, dict[str, float]] = {}
    brakes: list[Brake] = []
    retained, gradients = dict[str, Array](), dict[str, Array]()
    for name, objective, settings in _tried(tokens):
        logprobs = tokens.logprobs.detach().requires_grad_()
        used = tokens.uses if rule_of_used(objective, {}) else None
        inputs, ids = (logprobs, tokens.behavior_logprobs, tokens.advantages, tokens.mask), tokens.sequence_ids
        loss_of = partial(policy_loss, sequence_ids=ids, uses=used, log_kept=tokens.log_kept, denominator=1.0)
        out = loss_of(*inputs, objective=objective, settings=settings)
        out.loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        count = torch.ones_like(tokens.advantages)
        fates[name] = Fate(
            tokens=_by_sign(count, tokens.advantages),
            blocked=_by_sign(count * ~out.retained, tokens.advantages),
            gradient=_by_sign(logprobs.grad.abs(), tokens.advantages),
        )
        if name in ("grpo", *RULES):
            retained[name], gradients[name] = out.retained.numpy(), logprobs.grad.abs().numpy()
        if settings is not None and out.bounds is not None:
            keys = ("low", "high", "share", "share_at_start", "share_at_end", "stop")
            low, high, share, start, end, stop = (float(getattr(out.bounds, key)) for key in keys)
            bounds[name] = [Bounds(low, high, share, start, end, StopReason(int(stop)).name)]
        if name == "brake" and used is not None and (tokens.negative & tokens.within & used.bool()).any():
            brakes = [Brake(*(float(getattr(out.bounds, key)) for key in ("drift", "used_low")))]
        if entropy is not None and (settings is not None or name in ("grpo", "clip_higher")):
            masses = quadrant_masses(tokens, entropy, out.retained)
            quadrants[name] = {key: float(value) for key, value in masses.items()}
    signed = tokens.log_ratio.numpy(), tokens.advantages.numpy()
    return {
        "fates": fates,
        "bounds": bounds,
        "quadrants": quadrants or None,
        "brakes": brakes,
        "pushes": pushes_by_use(uses, *signed, retained, gradients),
    }


def _tried(tokens: Tokens) -> Iterator[tuple[str, str, ClipSettings | None]]:
    """Label, objective and settings of everything that is tried: what these tokens have all inputs for.

    An objective that takes settings is tried under each of SETTINGS.
    """
    for name, objective in OBJECTIVES.items():
        inputs = (objective.needs_sequences, tokens.sequence_ids), (rule_of_used(name, {}), tokens.uses)
        if any(needed and given is None for needed, given in inputs):
            continue
        if objective.solves_bounds and objective.settings is None:
            yield from ((label, name, settings) for label, settings in SETTINGS.items())
        else:
            yield name, name, None


def _by_sign(values: Tensor, advantages: Tensor) -> Signal:
    values = values.double()
    return Signal(float(values[advantages > 0].sum()), float(values[advantages < 0].sum()))


def _signal(ratio: Tensor, signal: Tensor, low: float, high: float, measure: str = "gradient") -> Signal:
    """P and N at one pair of bounds, as `positive_share` divides them."""
    kept = retained_by(ratio, signal, low, high)
    clipped = ratio.clamp(low, high) if measure == "surrogate" else torch.zeros_like(ratio)
    return _by_sign(torch.where(kept, ratio, clipped).double() * signal.abs(), signal)


def _mean_quadrants(parts: Sequence[Numbers]) -> dict[str, dict[str, float]]:
    """Weighed by the gradient mass of each update, which makes it the share of all of it."""
    mass = [p.shares["gradient"]["unclipped"].whole for p in parts]
    found: dict[str, dict[str, float]] = {}
    for name, masses in (parts[0].quadrants or {}).items():
        listed = [(p.quadrants or {})[name] for p in parts]
        found[name] = {key: _weighted([(q[key], m) for q, m in zip(listed, mass, strict=True)]) for key in masses}
    return found


def _weighted(values: Sequence[tuple[float, float]]) -> float:
    whole = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / whole if whole else math.nan


def _added(values: Sequence[Any]) -> Any:
    """Their sum; None if one of them is not known. Dicts are added key by key, for the keys that all of them have."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], list):  # a sum would copy the first ones again for each of the others
        return [*chain(*values)]
    if isinstance(values[0], Counter):
        found: Counter[Any] = Counter()
        for one in values:
            found.update(one)
        return found
    if not isinstance(values[0], dict):
        return reduce(add, values)
    return {key: _added([one[key] for one in values]) for key in values[0] if all(key in one for one in values)}


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _pool(tokens: Tokens, rewards: Array | None, drift: Array) -> Pooled:
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


def _share_error(parts: Array) -> float | None:
    """Standard error of the share P / (P + N), a ratio of two sums over n responses taken as independent.

    sqrt( n / (n - 1) sum_i (P_i - share (P_i + N_i))^2 ) / (P + N)
    """
    whole = float(parts.sum())
    count = len(parts)
    if count < 2 or whole == 0:
        return None
    residual = parts[:, 0] - parts[:, 0].sum() / whole * parts.sum(1)
    return math.sqrt(count / (count - 1) * float((residual**2).sum())) / whole


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
