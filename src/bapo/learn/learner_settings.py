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
from bapo.core.settings import BRAKES, ClipSettings, rule_of_used
from bapo.types import Truncated

Schedule = Literal["constant", "linear", "cosine"]
MOST_LR, MOST_CLIP_NORM = 1e3, 1e15
"""With more, finite gradients could make weights or moments infinite (`health.py`)."""


@dataclass(frozen=True)
class LearnerSettings:
    """How updates are taken."""

    objective: str = "bapo"
    clip: ClipSettings = field(default_factory=ClipSettings)
    scope: Literal["update", "microbatch"] = "update"
    """Which tokens share one pair of clip bounds."""
    sensor: Literal["update", "previous"] = "previous"
    """Whose drift the brake goes by: that of the update's own tokens, or that of the last update which had any token
    that the brake looks at. The second is known before the update begins."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the objective, such as low and high of grpo."""
    reduction: Reduction = "token_mean"
    length: int | None = None
    """The divisor of reduction="fixed_length"."""
    advantages: str = "grpo"
    """The estimator of advantages: a name in ADVANTAGES."""
    truncated: Truncated = "keep"
    """What happens to responses that the length limit cut off (`packing.py`)."""
    reward_weights: tuple[float, ...] = ()
    """How gdpo weighs each of several rewards. None: equally."""
    micro_tokens: int = 16384
    """Places per forward pass; a larger update is cut into several."""
    temperature: float = 1.0
    """The temperature at which tokens were sampled. Log-probs use the same one, so that ratios are valid."""
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_updates: int = 0
    schedule: Schedule = "constant"
    total_updates: int = 1
    """The update at which linear and cosine schedules reach zero."""
    ess_reference: float | None = None
    """ESS_0 of VCPO: below this effective sample size per response, the learning rate falls. None: it does not."""
    activation_checkpointing: bool = False
    """Whether layers keep only their inputs and are computed again in the backward pass."""
    staleness_bins: int = 16
    """How many ages have their own bin in the staleness histogram. Older tokens share the last bin."""
    compile: bool = False
    """Whether torch compiles the layers."""
    float32_head: bool = False
    """Whether the logits of 16-bit weights stay in float32. The sampler must do the same."""
    offload_optimizer: bool = False
    """Whether masters and moments are kept in the host's memory. For 16-bit weights on one GPU."""
    anchor_limit: float = math.inf
    """The largest mean gap between both log-probs of fresh tokens, in nats, with which an update is taken."""
    opsm: float | None = None
    """Delta of off-policy sequence masking beside any objective (`bapo.core.peers.opsm`); None: off."""
    opsm_on: Literal["used", "all"] = "all"
    """Which tokens it masks: those that were trained on before, or all."""
    kl: float = 0.0
    """The weight of the penalty for leaving the reference (`reference.py`), which is added to the policy loss."""
    entropy: float = 0.0
    """The weight of the entropy bonus (`terms.py`), or the step of this weight where there is a target."""
    entropy_target: float | None = None
    """The mean entropy per token, in nats, at which the bonus ends. None: the bonus has the same weight always."""
    kl_in_reward: float = 0.0
    """What a reward loses, before advantages are computed, for each nat that its response was likelier when it was
    sampled than under the reference."""
    kl_every: int | None = None
    """Updates after which the reference moves to the present weights; None: it stays."""
    kl_mix: float = 1.0
    """How far it moves: all the way with 1."""
    kept_caches: bool = False
    """Whether responses that go on under newer weights keep the keys and values of older ones."""
    sampler_precision: str = "model"
    """In what the sampler multiplies its layers: the learner's dtype ("model") or eight bits."""

    def __post_init__(self) -> None:
        for name, most in {"lr": MOST_LR, "clip_norm": MOST_CLIP_NORM, "temperature": math.inf}.items():
            value = getattr(self, name)
            if not (0 < value <= most and math.isfinite(value)):
                bound = "" if math.isinf(most) else f" and at most {most:g}"
                raise ValueError(f"{name}={value} must be a finite number above 0{bound}.")
        if not 0 <= self.lr * self.weight_decay <= 1:
            raise ValueError(
                f"learn.weight_decay={self.weight_decay} with learn.lr={self.lr} changes a weight by their product in "
                "every update, which must be a number from 0 to 1. Lower learn.weight_decay."
            )
        for name, option in self.options.items():
            if isinstance(option, float) and not math.isfinite(option):
                raise ValueError(
                    f"objective.options.{name}={option} is not a finite number. Give one, or leave it out."
                )
        if self.objective in BRAKES and self.options.keys() <= OBJECTIVES[self.objective].options.keys():
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
