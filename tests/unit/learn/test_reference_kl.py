"""The estimator of KL(policy || reference): numbers by hand, a literal loop, finite differences, and the true KL."""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo.learn.terms import K3_LIMIT, k3


def literal(now, reference):
    """GRPO's equation 4, one token at a time."""
    return [math.exp(r - n) - (r - n) - 1 for n, r in zip(now.tolist(), reference.tolist(), strict=True)]


def pairs(count=50, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return (-6 * torch.rand(count, generator=generator, dtype=dtype) for _ in range(2))


def test_by_hand():
    now = torch.tensor([0.5, 0.25, 0.25]).log().requires_grad_()
    reference = torch.tensor([0.25, 0.5, 0.25]).log()
    values = k3(now, reference)
    assert_close(values, torch.tensor([0.5 + math.log(2) - 1, 2 - math.log(2) - 1, 0.0]))
    values.sum().backward()
    assert_close(now.grad, torch.tensor([0.5, -1.0, 0.0]))  # 1 - reference / now


def test_it_is_the_literal_loop_with_the_gradient_of_finite_differences():
    now, reference = pairs()
    now.requires_grad_()
    values = k3(now, reference)
    assert values.dtype == torch.float64
    assert_close(values.tolist(), literal(now, reference), rtol=1e-12, atol=1e-14)
    values.sum().backward()
    step = 1e-6
    above, below = (literal(now.detach() + sign * step, reference) for sign in (1, -1))
    numeric = [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]
    assert_close(now.grad.tolist(), numeric, rtol=1e-6, atol=1e-6)


def test_its_mean_over_the_policys_own_tokens_is_the_kl_from_policy_to_reference():
    policy, reference = (x.softmax(0) for x in pairs(12))
    mean = (policy * k3(policy.log(), reference.log())).sum()
    assert_close(mean, (policy * (policy / reference).log()).sum())
    assert abs(mean - (reference * (reference / policy).log()).sum()) > 0.05  # not the other direction


def test_the_reference_gets_no_gradient():
    now, reference = (x.requires_grad_() for x in pairs(4))
    k3(now, reference).sum().backward()
    assert reference.grad is None
    assert now.grad.abs().min() > 0


@pytest.mark.parametrize("far", [K3_LIMIT + 1e-3, 30.0, 100.0, 1000.0])
def test_beyond_the_limit_it_goes_on_along_its_tangent_and_still_leads_back(far):
    now = torch.tensor([-far, -K3_LIMIT, 0.0], requires_grad=True)
    values = k3(now, torch.tensor([0.0, 0.0, -far]))
    edge = math.exp(K3_LIMIT) - K3_LIMIT - 1
    assert_close(values[1].item(), edge, rtol=1e-6, atol=0)
    assert_close(values[0].item(), edge + (far - K3_LIMIT) * math.expm1(K3_LIMIT), rtol=1e-5, atol=0)
    assert_close(values[2].item(), math.exp(-far) + far - 1)  # nothing overflows on this side
    values.sum().backward()
    assert_close(now.grad[:2], torch.full((2,), -math.expm1(K3_LIMIT)))
    assert_close(now.grad[2].item(), 1 - math.exp(-far))


def test_small_differences_are_not_lost_to_rounding():
    now = torch.tensor([-1.0, -2.0, -0.5])
    difference = torch.tensor([1e-3, -1e-3, 2e-3])
    values = k3(now, now + difference)
    assert values.dtype == torch.float32
    exact = literal(now.double(), (now + difference).double())
    assert_close(values.tolist(), exact, rtol=1e-3, atol=0)  # exp(d) - d - 1 in float32 would be off by a tenth


def test_log_probs_in_16_bits_are_compared_in_32():
    now, reference = (x.bfloat16() for x in pairs(8))
    assert torch.equal(k3(now, reference), k3(now.float(), reference.float()))
