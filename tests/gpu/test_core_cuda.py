"""The core on CUDA: the same numbers as on CPU, and no host sync."""

import pytest
import torch
from torch.testing import assert_close

from bapo import OBJECTIVES, ClipSettings, policy_loss, solve_bounds
from bapo.core.controller import BoundController
from bapo.core.logprobs import token_logprobs
from bapo.core.settings import rule_of_used

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def update(tokens=300_000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(tokens, generator=generator) * 3
    logprobs = (behavior + 0.5 * torch.randn(tokens, generator=generator)).clamp(max=0)
    advantages = torch.randn(tokens, generator=generator) - 0.2
    return logprobs, behavior, advantages, torch.rand(tokens, generator=generator) < 0.9


@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
@pytest.mark.parametrize("weight", ["none", "rollout_prob"])
def test_bounds_equal_those_of_the_cpu(measure, weight):
    logprobs, behavior, advantages, mask = update()
    ratio = (logprobs - behavior).exp()
    for target in (0.3, 0.45, 0.5, 0.6, 0.9):
        settings = ClipSettings(target_share=target, measure=measure, weight=weight)
        cpu = solve_bounds(ratio, advantages, mask, settings, behavior_logprobs=behavior)
        tensors = (x.cuda() for x in (ratio, advantages, mask))
        cuda = solve_bounds(*tensors, settings, behavior_logprobs=behavior.cuda())
        assert cuda.low.device.type == "cuda"
        assert_close(torch.stack([cuda.low, cuda.high, cuda.share]).cpu(), torch.stack([cpu.low, cpu.high, cpu.share]))


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_loss_and_gradient_equal_those_of_the_cpu_without_a_host_sync(objective):
    logprobs, behavior, advantages, mask = update(4096)
    ids = torch.arange(4096) // 64

    def run(device):
        leaf = logprobs.to(device).requires_grad_()
        tensors = [x.to(device) for x in (behavior, advantages, mask)]
        options = {"objective": objective, "sequence_ids": ids.to(device), "entropy": torch.ones(4096, device=device)}
        if rule_of_used(objective, {}):
            options["uses"] = ids.to(device) % 2

        def step():
            leaf.grad = None
            out = policy_loss(leaf, *tensors, **options)
            out.loss.backward()
            return out.loss.detach(), leaf.grad

        return step

    run("cuda")()  # builds the cached grids
    step = run("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for cuda, cpu in zip(results, run("cpu")(), strict=True):
        assert_close(cuda.cpu(), cpu, rtol=1e-4, atol=1e-6)


def test_a_bad_value_poisons_bounds_and_loss():
    for bad in (float("nan"), float("-inf")):
        logprobs, behavior, advantages, mask = (x.cuda() for x in update(1000))
        mask[:] = True
        logprobs[17] = bad
        out = policy_loss(logprobs, behavior, advantages, mask)
        assert out.loss.isnan()
        assert out.bounds.low.isnan()


def test_a_bad_value_spoils_no_later_call_of_a_controller():
    controller = BoundController(ClipSettings(), 3)
    good = [x.cuda() for x in update(1000)]
    bad = [good[0] * torch.nan, *good[1:]]
    assert controller.bounds_of(*bad).share.isnan()
    assert_close(controller.bounds_of(*good).share, BoundController(ClipSettings()).bounds_of(*good).share)


def test_chunked_logprobs_equal_naive_ones():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(500, 64, generator=generator).cuda().requires_grad_()
    weight = torch.randn(5000, 64, generator=generator).div(4).cuda().requires_grad_()
    targets = torch.randint(0, 5000, (500,), generator=generator).cuda()
    full = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
    naive = full.gather(1, targets[:, None]).squeeze(1), -(full.exp() * full).sum(-1)
    ours = token_logprobs(hidden, weight, targets, chunk_logits=5000 * 64)
    for a, b in zip(ours, naive, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(x[0].sum() + x[1].sum(), (hidden, weight)) for x in (ours, naive)]
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, rtol=1e-3, atol=1e-3)
