"""AdamW on float32 masters: Adam by hand, gradients summed in float32, and state that is put back exactly."""

import copy

import pytest
import torch
from torch.nn import Parameter
from torch.testing import assert_close

from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.optimizer import Optimizer
from tests.tiny.batches import batch_of, flat_batch
from tests.tiny.models import tiny
from tests.tiny.optimizers import copies_of, put_back

BF16, FP32 = torch.bfloat16, torch.float32


def optimizer(*parameters, lr=1e-3, weight_decay=0.1):
    return Optimizer(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


def adamw_by_hand(weight, gradients, lr, decay):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr (decay w + m^ / (sqrt v^ + eps)), in float64."""
    weight, m, v = weight.double(), 0.0, 0.0
    for step, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g.double(), 0.95 * v + 0.05 * g.double() ** 2
        weight = weight - lr * decay * weight
        weight = weight - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_masters_follow_adam_by_hand(dtype):
    torch.manual_seed(0)
    matrix, vector = Parameter(torch.randn(3, 4).to(dtype)), Parameter(torch.randn(5).to(dtype))
    before = matrix.detach().clone(), vector.detach().clone()
    ours = optimizer(vector, matrix)
    gradients = [(torch.randn(3, 4).to(dtype), torch.randn(5).to(dtype)) for _ in range(6)]
    for g_matrix, g_vector in gradients:
        ((matrix * g_matrix).sum() + (vector * g_vector).sum()).backward()
        ours.step(1e-3)
    expected = [  # matrices decay, vectors do not
        adamw_by_hand(start, [g[i] for g in gradients], 1e-3, decay)
        for i, (start, decay) in enumerate(zip(before, (0.1, 0.0), strict=True))
    ]
    for weight, master, hand in zip(ours.weights, ours.masters, expected, strict=True):
        assert (weight.dtype, master.dtype) == (dtype, FP32)
        assert_close(master.detach(), hand.float(), rtol=1e-6, atol=1e-6)
        assert torch.equal(weight, master.to(dtype))
    assert ours.weights[0] is matrix
    assert (ours.masters[0] is matrix) == (dtype == FP32)


def test_updates_too_small_for_bfloat16_are_not_lost():
    weight = Parameter(torch.ones(4, dtype=BF16))
    ours = optimizer(weight, lr=1e-4, weight_decay=0.0)
    alone = Parameter(torch.ones(4, dtype=BF16))
    plain = torch.optim.AdamW([alone], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(100):  # a constant gradient moves Adam by lr each time
        weight.sum().backward()
        ours.step(1e-4)
        alone.sum().backward()
        plain.step()
        plain.zero_grad()
    assert torch.equal(alone, torch.ones(4, dtype=BF16))
    assert_close(ours.masters[0].detach(), torch.full((4,), 0.99), rtol=0, atol=1e-5)
    assert_close(weight.detach().float(), torch.full((4,), 0.99), rtol=0, atol=0.002)


def test_gradients_of_micro_batches_are_summed_in_float32():
    weight = Parameter(torch.zeros(2, dtype=BF16))
    ours = optimizer(weight)
    for value in (256.0, *[1.0] * 7):  # in bfloat16, 256 + 1 is 256
        (weight * value).sum().backward()
        assert weight.grad is None
    assert ours.masters[0].grad.tolist() == [263.0, 263.0]
    assert float(ours.clip(1.0)) == pytest.approx(263 * 2**0.5)
    assert_close(ours.masters[0].grad, torch.full((2,), 0.5**0.5))
    ours.forget_gradients()
    assert ours.masters[0].grad is None
    before = weight.detach().clone()
    ours.step(1.0)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-5), (BF16, 2e-2)])
def test_one_backward_pass_over_eight_sequences_equals_eight_over_one(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 30, (n,), generator=generator) for n in (5, 9, 4, 7, 3, 8, 6, 5)]
    gradients = []
    for cut in ([sequences], [[x] for x in sequences]):
        learner = Learner(tiny().to(dtype), LearnerSettings())
        for part in cut:
            logprobs, _ = learner.logprobs(batch_of(part))
            logprobs.sum().backward()
        gradients.append(torch.cat([m.grad.flatten() for m in learner.optimizer.masters]))
    assert gradients[0].dtype == FP32
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < tolerance


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_state_is_put_back_exactly(dtype):
    settings = LearnerSettings(objective="grpo", lr=1e-3, weight_decay=0.1)
    batches = [flat_batch([6, 3], seed=seed) for seed in range(4)]
    learner = Learner(tiny("qwen3").to(dtype), settings)
    for batch in batches[:2]:
        learner.step_on([batch])
    weights = copy.deepcopy(learner.model.state_dict())
    kept = copies_of(learner.optimizer)
    other = Learner(tiny("qwen3").to(dtype), settings)
    other.model.load_state_dict(weights)
    put_back(other.optimizer, kept)
    other.version = learner.version
    for batch in batches[2:]:
        assert learner.step_on([batch]).metrics == other.step_on([batch]).metrics
    for ours, theirs in zip(learner.optimizer.masters, other.optimizer.masters, strict=True):
        assert torch.equal(ours, theirs)
