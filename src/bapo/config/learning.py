"""The section `learn` of a run of `bapo train`: how the weights are updated, beside what every optimizer needs."""

import re
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from bapo.config.base import OptimizerConfig, SkipLimit
from bapo.core.settings import AdvantageName
from bapo.types import Truncated

ADVANTAGE_NAMES: tuple[str, ...] = get_args(AdvantageName)


class LearnConfig(OptimizerConfig):
    """How the weights are updated."""

    batch_groups: int = Field(16, ge=1)
    """Fresh groups per update. Replayed groups are added to them."""
    advantages: str = Field("grpo", description=f"How rewards become advantages. One of: {', '.join(ADVANTAGE_NAMES)}.")
    reduction: Literal["token_mean", "sequence_mean", "fixed_length", "balanced"] = "sequence_mean"
    """How token losses become one number. token_mean: a mean over tokens, as in the paper; long responses weigh more.
    sequence_mean: every response weighs the same; docs/results.md explains the choice. fixed_length: the sum of each
    response divided by `rollout.max_tokens`. balanced: within each group, a mean over the tokens of all responses with
    A > 0 and one over those with A < 0, which weigh as their responses are many (arXiv:2605.04077)."""
    truncated: Truncated = "keep"
    """What happens to responses that `rollout.max_tokens` cut off. keep: they are trained on like others. mask: their
    rewards count when the group is compared, but their tokens have no loss. drop: they leave their group before it is
    compared. Either way, no mean of the loss counts them, and a group in which no signal is left is replaced."""
    warmup_updates: int = Field(10, ge=0)
    """Updates during which the learning rate rises linearly to its peak."""
    ess_reference: float | None = Field(None, gt=0, le=1)
    """Multiply the learning rate of an update by sqrt(min(1, ESS / ess_reference)). VCPO (arXiv:2602.17616) sets 1, or
    0.55 where sampler and learner disagree. ESS = (sum w)^2 / (n sum w^2) over n responses, with w the product of a
    response's ratios, is the effective sample size of the update's responses, as a share of them. None leaves the
    learning rate alone."""
    opsm: float | None = Field(None, gt=0)
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556) beside any objective: a negative response whose
    tokens have fallen by more than this on average, in nats, gets advantage 0. Bounds are chosen
    without it, and the brake does not see it. None turns it off."""
    opsm_on: Literal["used", "all"] = "all"
    """Which tokens learn.opsm masks: all of such a response, or those that were trained on before."""
    entropy: float = Field(0.0, ge=0)
    """Weight of a bonus for entropy, which is taken from the policy loss: the mean entropy of the learner's
    distributions at the tokens of the update, averaged as `learn.reduction` says. 0 turns it off."""
    entropy_target: float | None = Field(None, gt=0)
    """Give the bonus only while the entropy per token is at this many nats or below, as in Skywork-OR1
    (arXiv:2505.22312). The weight begins at 0. It goes up by `learn.entropy` after each update with such an entropy,
    and else down. TRL's defaults are a target of 0.2 and a step of 0.005. None: the weight stays the same."""
    kl: float = Field(0.0, ge=0)
    """Weight of a penalty for leaving the reference, which is added to the policy loss: the k3 estimate of
    KL(policy || reference) at each token, as in GRPO, whose authors used 0.04; verl's default is 0.001. 0 turns it off.
    Without model.lora, it needs memory for one more copy of the weights. It is for one process: not for torchrun with
    several ranks, nor for a cluster."""
    kl_in_reward: float = Field(0.0, ge=0)
    """Weight of a penalty for leaving the reference, which is taken from the reward of each response before rewards are
    compared, as verl's use_kl_in_reward does: the log-prob with which the response was sampled, minus that under the
    reference, summed over its tokens. Groups whose rewards are equal without it are left out all the same. Otherwise
    like `learn.kl`; both may be set."""
    kl_reference: str = "initial"
    """The reference of both penalties. initial: the weights with which the run began. every N, such as "every 64":
    after each N updates, the present weights become the reference. Responses that were trained on before keep the
    log-probs that they have. Checkpoints hold a reference that moves."""
    kl_mix: float = Field(1.0, gt=0, le=1)
    """every N: the share of the present weights in the new reference; the rest is the old one. With model.lora, it is
    1."""
    skip_limit: SkipLimit = 3
    anchor_limit: float | None = Field(None, gt=0)
    """Tokens that the present weights sampled have two log-probs, the sampler's and the learner's. If their mean
    difference in an update is above this, in nats, the run stops: the ratios would mean nothing. Smaller differences
    that rounding does not explain are reported once. None: 0.2, or 1 if rollout.precision is eight bits."""

    @property
    def kl_every(self) -> int | None:
        """Updates after which the reference moves; None: it stays."""
        return None if self.kl_reference == "initial" else int(self.kl_reference.removeprefix("every "))

    @property
    def refers(self) -> str:
        """The key that needs a reference, with its value; empty if none does."""
        keys = [f"learn.{key}={value:g}" for key in ("kl", "kl_in_reward") if (value := getattr(self, key))]
        return keys[0] if keys else ""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not re.fullmatch(r"initial|every [1-9]\d{0,8}", self.kl_reference):
            raise ValueError(
                f"learn.kl_reference={self.kl_reference!r} names no reference. Set it to 'initial', or to 'every N' "
                "with a number of updates, such as 'every 64'."
            )
        if self.entropy_target is not None and not self.entropy:
            raise ValueError(
                f"learn.entropy_target={self.entropy_target:g} has no bonus to reach it with. Set learn.entropy, the "
                "step of its weight, e.g. to 0.005, or leave entropy_target out."
            )
        if self.kl_every is None and self.kl_mix != 1:
            raise ValueError(
                f"learn.kl_mix={self.kl_mix:g} is for a reference that moves, but learn.kl_reference='initial' stays. "
                "Set learn.kl_reference, such as 'every 64', or leave kl_mix out."
            )
        if self.kl_every is not None and not self.refers:
            raise ValueError(
                f"learn.kl_reference={self.kl_reference!r} does nothing without a penalty. Set learn.kl, e.g. to "
                "0.001, or leave kl_reference out."
            )
        return self
