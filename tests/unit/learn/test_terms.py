"""What is added to the policy loss, against numbers by hand, literal loops in float64 and finite differences."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from bapo.core import logprobs as core
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.terms import K3_LIMIT, EntropyBonus, k3
from tests.rounding import carried, rounding
from tests.sharded import gradients
from tests.unit.learn.test_learner import model, sampled_groups
from tests.unit.learn.test_reference import shifted, without_signal


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


CASES = ((0.0, None), (0.5, 9.0), (0.5, 1e-3))
"""A bonus and its target: none, one that entropy never exceeds, and one that it never falls to."""
BONUS = LearnerSettings(objective="grpo", temperature=0.8, entropy=0.5, clip_norm=1e9, length=12)


def literal_bonus(start, groups, reduction):
    """-0.5 times the mean entropy, of which each is -sum p log p over the whole vocabulary, one token at a time."""
    total, tokens, responses = 0.0, 0, 0
    for response in (t for group in groups for t in group.trajectories):
        logits = start(torch.tensor([response.prompt + response.tokens])).logits[0] / 0.8
        found = []
        for place in range(len(response.prompt) - 1, len(logits) - 1):
            weights = logits[place].exp()
            shares = weights / weights.sum()
            found.append(-(shares * shares.log()).sum())
        total = total + sum(found) / (len(found) if reduction == "sequence_mean" else 1)
        tokens, responses = tokens + len(found), responses + 1
    return -0.5 * total / {"token_mean": tokens, "sequence_mean": responses, "fixed_length": 12 * responses}[reduction]


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("reduction", "micro_tokens", "chunk"),
    [("token_mean", 10_000, 10_000), ("sequence_mean", 60, 7), ("fixed_length", 60, 1)],
)
def test_bonus_and_gradient_are_those_of_a_literal_loop(reduction, micro_tokens, chunk, monkeypatch):
    """In micro-batches and in chunks of tokens; nothing else is in the loss, because no advantage differs from 0."""
    monkeypatch.setattr(core, "CHUNK_LOGITS", 20 * chunk)  # a vocabulary of 20
    start = model()
    groups, moved = without_signal(sampled_groups(start)), shifted(start)
    settings = replace(BONUS, reduction=reduction, micro_tokens=micro_tokens)
    exact = copy.deepcopy(moved).double()
    bonus = literal_bonus(exact, groups, reduction)
    bonus.backward()
    expected = {name: 0.1 * parameter.grad for name, parameter in exact.named_parameters()}  # AdamW's first moment

    def told(learner):
        return {"loss": learner.step(groups).metrics["loss"], "gradients": gradients(learner)}

    def learner_there():
        return Learner(copy.deepcopy(moved), settings)

    found, limits = told(learner_there()), carried(told, given=learner_there, draws=2)
    limit = limits["loss"] + rounding(4, abs(bonus.item()))
    assert found["loss"] == pytest.approx(bonus.item(), rel=0, abs=limit)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found["gradients"][name].double(), gradient, rtol=0, atol=limits["gradients"][name])
        assert limits["gradients"][name] < 1e-2 * largest
    along = {name: torch.sign(gradient) for name, gradient in expected.items()}  # and by finite differences
    slope = sum(float((along[name] * found["gradients"][name]).sum()) for name in expected)
    sides = []
    for side in (1e-5, -1e-5):
        beside = copy.deepcopy(moved).double()
        with torch.no_grad():
            for name, parameter in beside.named_parameters():
                parameter += side * along[name]
            sides.append(literal_bonus(beside, groups, reduction).item())
    assert 0.1 * (sides[0] - sides[1]) / 2e-5 == pytest.approx(slope, rel=1e-3)


def test_updates_with_a_bonus_alone_raise_entropy():
    start = model()
    learner = Learner(shifted(start, size=0.3), replace(BONUS, lr=1e-2))
    found = [learner.step(without_signal(sampled_groups(start))).metrics["entropy"] for _ in range(6)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.05


def test_the_weight_of_a_bonus_with_a_target_by_hand():
    bonus = EntropyBonus(LearnerSettings(entropy=0.25, entropy_target=1.0))
    found = []
    for entropy in (2.0, 0.9, 1.0, 0.7, 0.6, 0.5, 1.5, 0.9, 0.9):
        metrics = {"entropy": entropy}
        bonus.follow(metrics)
        found.append(metrics["entropy_weight"])
        skipped = {}
        bonus.follow(skipped)
        assert skipped == {}
    # It stays within 0 and 1. After 1.5 it is 0.75, but the update after that one has no bonus.
    assert found == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 0.0, 1.0]


def test_an_update_has_the_bonus_that_the_one_before_left_and_a_learner_goes_on_with_it(tmp_path):
    start = model()
    groups = sampled_groups(start)
    learners = [Learner(copy.deepcopy(start), replace(BONUS, entropy=e, entropy_target=t)) for e, t in CASES]
    first, second = ([learner.step(groups).metrics for learner in learners] for _ in range(2))
    plain, held, idle = (each["loss"] for each in first)
    assert plain == held == idle  # the first update has none
    plain, held, idle = second
    assert held["loss"] == pytest.approx(plain["loss"] - 0.5 * plain["entropy"], rel=1e-5)
    assert (held["entropy_weight"], idle["entropy_weight"]) == (0.5, 0.0)
    assert "entropy_weight" not in plain
    assert {name: idle[name] for name in plain} == plain  # bit for bit: a target that is never reached is no bonus
    learners[1].save(tmp_path)
    again = Learner(copy.deepcopy(start), learners[1].settings)
    again.load(tmp_path, version=2)
    assert again.step(groups).metrics == learners[1].step(groups).metrics
