"""What an update adds to its policy loss: a penalty for leaving a reference, and a bonus for entropy.

    loss = policy loss + learn.kl mean of k3_t - c mean of H_t

Both means are taken as that of the policy loss is (learn.reduction), as in verl. TRL's bonus is a mean over tokens,
whatever the mean of its policy loss.

The penalty is an estimate at each token (GRPO, arXiv:2402.03300, eq. 4):

    k3_t = exp(d_t) - d_t - 1,   d_t = log pi_ref(t) - log pi(t)

It is never negative, it is 0 where both models agree, and its mean over tokens that the policy itself samples is
KL(policy || reference). Here older versions of the policy sampled most tokens. That is not corrected, as it is not in
verl: on stale data the mean of k3 is a penalty and not an exact KL. TRL 1.16 multiplies k3 by the ratio by default.

H_t is the entropy of the learner's whole distribution at token t, at the temperature of sampling, and its gradient is
exact, in chunks of torch code as in kernels (`core/logprobs.py`): nothing is estimated from the token that was sampled.
Only the states are those that older versions of the policy came to.

The weight c is learn.entropy. With learn.entropy_target it is found as in Skywork-OR1 (arXiv:2505.22312), and in TRL's
use_adaptive_entropy. It begins at 0, and after each update it goes up by learn.entropy if the mean entropy of the
tokens was at the target or below, and else down, within 0 and 1. An update has the bonus if the one before was at the
target or below.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from bapo.core.reduction import reduce_tokens
from bapo.learn.learner_settings import LearnerSettings
from bapo.types import Metrics, TokenBatch

K3_LIMIT = 20.0
"""The log-difference up to which the estimator is exact."""
K3_SLOPE = math.expm1(K3_LIMIT)
"""The derivative of the estimator there."""
MOST_WEIGHT = 1.0
"""The largest weight that a target for the entropy leads to."""


class EntropyBonus:
    """The weight of the entropy bonus, from update to update."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.step, self.target = settings.entropy, settings.entropy_target
        before = math.inf if self.target is None else 2 * self.target
        self.held = torch.tensor([0.0, before], dtype=torch.float64)
        """With a target: the weight that was found last, and the entropy of the last update."""

    @property
    def weight(self) -> float:
        """The weight in the next update."""
        if self.target is None:
            return self.step
        weight, entropy = self.held.tolist()
        return weight if entropy <= self.target else 0.0

    @property
    def noted(self) -> dict[str, Tensor]:
        """What a checkpoint must keep of it."""
        return {} if self.target is None else {"entropy": self.held}

    def follow(self, metrics: Metrics) -> None:
        """Say in the metrics of an update which weight it had, and find the next one."""
        if self.target is None or "entropy" not in metrics:  # the update was skipped
            return
        metrics["entropy_weight"] = self.weight
        entropy = cast(float, metrics["entropy"])
        weight = float(self.held[0]) + (self.step if entropy <= self.target else -self.step)
        self.held[0], self.held[1] = min(MOST_WEIGHT, max(0.0, weight)), entropy


def added_terms(
    batch: TokenBatch,
    logprobs: Tensor,  # [tokens] carries grad
    entropy: Tensor,  # [tokens] carries grad
    settings: LearnerSettings,
    *,
    entropy_weight: float,
    denominator: Tensor,
) -> Iterator[Tensor]:  # each 0-d
    """What is added to the policy loss of one micro-batch; nothing if nothing was asked for."""
    mask = torch.ones_like(batch.targets, dtype=torch.bool)
    given: dict[str, Any] = {"sequence_ids": batch.sequence_ids, "loss_weights": batch.loss_weights}

    def mean(values: Tensor) -> Tensor:
        return reduce_tokens(values, mask, settings.reduction, denominator=denominator, **given)

    if settings.kl:
        yield settings.kl * mean(k3(logprobs, cast(Tensor, batch.reference_logprobs)))
    if entropy_weight:
        yield -entropy_weight * mean(entropy)


def k3(
    logprobs: Tensor,  # under the policy now; carries grad
    reference_logprobs: Tensor,  # same shape; under the reference, a constant
) -> Tensor:  # same shape; float32, or float64 for such log-probs
    """The estimate at each token. Its derivative by the policy's log-prob is 1 - exp(d), and 1 - exp(20) at most.

    exp(d) overflows where the policy has all but given up a token that the reference likes. Up to d = 20 the estimator
    is exact; beyond, it goes on along its tangent. So value and gradient stay finite, and the gradient still leads back
    to the reference. TRL has no such guard; verl clamps d to 20 and k3 to 10, and tokens beyond have no gradient.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = reference_logprobs.detach().to(dtype) - logprobs.to(dtype)
    exact = difference.clamp(max=K3_LIMIT)
    tangent = K3_SLOPE * torch.relu(difference - K3_LIMIT)
    return torch.expm1(exact) - exact + tangent  # expm1: few digits are lost where both models agree
