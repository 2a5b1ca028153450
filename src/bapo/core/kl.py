"""How far the policy is from a reference model, estimated from the log-probs of sampled tokens.

    k3_t = exp(d_t) - d_t - 1,   d_t = log pi_ref(t) - log pi(t)          (GRPO, arXiv:2402.03300, eq. 4)

It is never negative, it is 0 where both models agree, and its mean over tokens that the policy itself samples is
KL(policy || reference). Here older versions of the policy sampled most tokens. That is not corrected, as it is not in
verl: on stale data the mean of k3 is a penalty and not an exact KL. TRL 1.16 multiplies k3 by the ratio by default.

exp(d) overflows where the policy has all but given up a token that the reference likes. Up to d = 20 the estimator is
exact; beyond, it goes on along its tangent. So value and gradient stay finite, and the gradient still leads back to the
reference. TRL has no such guard; verl clamps d to 20 and k3 to 10, and tokens beyond that have no gradient.

One value per token: masking and averaging are the caller's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LIMIT = 20.0
"""The log-difference up to which the estimator is exact."""
SLOPE = math.expm1(LIMIT)
"""The derivative of the estimator there."""


def k3(
    logprobs: Tensor,  # under the policy now; carries grad
    reference_logprobs: Tensor,  # same shape; under the reference, a constant
) -> Tensor:  # same shape; float32, or float64 for such log-probs
    """The estimate at each token. Its derivative by the policy's log-prob is 1 - exp(d), and 1 - exp(20) at most."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = reference_logprobs.detach().to(dtype) - logprobs.to(dtype)
    exact = difference.clamp(max=LIMIT)
    tangent = SLOPE * torch.relu(difference - LIMIT)
    return torch.expm1(exact) - exact + tangent  # expm1: few digits are lost where both models agree
