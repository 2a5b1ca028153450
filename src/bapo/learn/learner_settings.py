"""How updates are taken: the learner's settings, and the learning rate of each update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from bapo.core.brake import braked
from bapo.core.loss import policy_loss
from bapo.core.objectives import OBJECTIVES
from bapo.core.reduction import Reduction
from bapo.core.settings import BRAKES, OBJECTIVE_OPTIONS, ClipSettings, rule_of_used
from bapo.types import Truncated

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LearnerSettings:
    """How updates are taken. The keys of `learn` with the same names explain most of it (`config/learning.py`)."""

    objective: str = "bapo"
    clip: ClipSettings = field(default_factory=ClipSettings)
    scope: Literal["update", "microbatch"] = "update"
    """Which tokens share one pair of clip bounds."""
    sensor: Literal["update", "previous"] = "previous"
    """Whose drift the brake goes by: that of the update's own tokens, or that of the last update which had any token
    that the brake looks at. The second is known before the update begins."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the objective, such as low and high of grpo."""
    opsm: float | None = None
    opsm_on: Literal["used", "all"] = "all"
    reduction: Reduction = "token_mean"
    length: int | None = None
    """The divisor of reduction="fixed_length"."""
    advantages: str = "grpo"
    reward_weights: tuple[float, ...] = ()
    """How gdpo weighs each of several rewards. None: equally."""
    truncated: Truncated = "keep"
    temperature: float = 1.0
    """The temperature at which tokens were sampled. Log-probs use the same one, so that ratios are valid."""
    float32_head: bool = False
    """Whether the logits of 16-bit weights stay in float32. The sampler must do the same."""
    kept_caches: bool = False
    """Whether responses that go on under newer weights keep the keys and values of older ones."""
    sampler_precision: str = "model"
    """In what the sampler multiplies its layers: the learner's dtype ("model") or eight bits."""
    anchor_limit: float = math.inf
    entropy: float = 0.0
    entropy_target: float | None = None
    kl: float = 0.0
    kl_in_reward: float = 0.0
    kl_every: int | None = None
    """Updates after which the reference moves to the present weights; None: it stays."""
    kl_mix: float = 1.0
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_updates: int = 0
    schedule: Schedule = "constant"
    total_updates: int = 1
    """The update at which linear and cosine schedules reach zero."""
    ess_reference: float | None = None
    micro_tokens: int = 16384
    activation_checkpointing: bool = False
    compile: bool = False
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.objective in BRAKES and self.options.keys() <= OBJECTIVE_OPTIONS[self.objective].keys():
            object.__setattr__(self, "clip", BRAKES[self.objective](**self.options))

    @property
    def solves_bounds(self) -> bool:
        """Whether the objective solves its bounds from the tokens."""
        return OBJECTIVES[self.objective].solves_bounds

    @property
    def solves_over_update(self) -> bool:
        """Whether all micro-batches of an update, on all ranks, are needed before its bounds are known."""
        return self.solves_bounds and self.scope == "update" and self.clip.depends_on_tokens

    @property
    def cuts_are_free(self) -> bool:
        """Whether an update may be cut into micro-batches without a further pass over its tokens."""
        if OBJECTIVES[self.objective].whole_update or (self.solves_bounds and self.scope == "microbatch"):
            return False
        return not self.solves_over_update or (self.objective in BRAKES and self.sensor == "previous")

    @property
    def has_brake(self) -> bool:
        """Whether a drift of tokens decides a bound."""
        return self.solves_bounds and self.clip.brake is not None

    @property
    def refers(self) -> bool:
        """Whether anything asks for the log-probs of a reference."""
        return bool(self.kl or self.kl_in_reward)

    @property
    def needs_uses(self) -> bool:
        """Whether the loss asks how often each token was trained on."""
        if self.solves_bounds:
            return self.clip.rule_of_used is not None
        return rule_of_used(self.objective, self.options) is not None

    def at_drift(self, drift: float) -> LearnerSettings:
        """The same with the brake where a drift puts it: a fixed clip, for objectives that are a brake and no more."""
        if self.objective not in BRAKES:
            return self
        (low, _), (high, _) = self.clip.low, self.clip.high
        bound = float(braked(low, torch.tensor(drift, dtype=torch.float64), cast(float, self.clip.brake)))
        if self.clip.brake_on == "all":
            return replace(self, objective="grpo", options={"low": bound, "high": high})
        return replace(self, objective="grpo", options={"low": low, "high": high, "used_low": bound})


def learning_rate(update: int, settings: LearnerSettings) -> float:
    """Linear warm-up, then constant, or linear or cosine decay to zero at total_updates. Updates count from 0."""
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, settings.total_updates - settings.warmup_updates)
    progress = min(1.0, (update - settings.warmup_updates) / span)
    if settings.schedule == "linear":
        return settings.lr * (1 - progress)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * progress))


def ess_factor(ess: float, reference: float) -> float:
    """What the learning rate of an update is multiplied by: sqrt(min(1, ess / reference)) (VCPO, arXiv:2602.17616)."""
    return math.sqrt(min(1.0, ess / reference))


def wrong_values(settings: LearnerSettings) -> Iterator[str]:
    """What an objective says of its options, tried on two tokens."""
    if settings.objective not in OBJECTIVES:
        return
    zeros = torch.zeros(2)
    try:
        policy_loss(
            zeros,
            zeros,
            torch.tensor([1.0, -1.0]),
            torch.ones(2, dtype=torch.bool),
            objective=settings.objective,
            settings=settings.clip if settings.objective == "bapo" else None,
            sequence_ids=torch.arange(2),
            uses=torch.zeros(2, dtype=torch.int64) if settings.needs_uses else None,
            **settings.options,
        )
    except (ValueError, TypeError) as error:
        yield f"objective.options: {error}"
