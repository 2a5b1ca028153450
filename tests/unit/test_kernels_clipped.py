"""The clipped loss in one kernel against the torch code and its autograd.

Kernels run on the GPU where there is one, else under Triton's interpreter; what they are compared with runs on CPU.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo.core.bounds import ClipBounds, fixed_bounds
from bapo.core.entropy_rule import clip_statistics
from bapo.core.kernels.clipped import BLOCK_TOKENS, clipped_loss
from bapo.core.objectives import MAX_LOG_RATIO, Tokens, bapo, dual_clip, grpo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(tokens, low, high, cap=None, gradient=None):
    """The kernel's result, and the gradient of the log-probs for an incoming one (ones if not given)."""
    leaf = tokens.logprobs.detach().to(DEVICE).requires_grad_()
    rest = [x.to(DEVICE) for x in (tokens.behavior_logprobs, tokens.advantages, tokens.mask)]
    result = clipped_loss(leaf, *rest, low, high, log_ratio_limit=MAX_LOG_RATIO, cap=cap)
    result.loss.backward(torch.ones_like(result.loss) if gradient is None else gradient.to(DEVICE))
    return result, leaf.grad


def stale_tokens(shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    behavior = -3 * torch.rand(shape, generator=generator)
    logprobs = behavior + 0.5 * torch.randn(shape, generator=generator)
    advantages = torch.randn(shape, generator=generator) - 0.2
    advantages.view(-1)[::5] = 0
    mask = torch.rand(shape, generator=generator) < 0.8
    # Past the ratio limit on both sides, at it, and next to it; each with both signs.
    for place, difference in enumerate((40.0, -40.0, MAX_LOG_RATIO, -MAX_LOG_RATIO, 19.5, -19.5)):
        for sign in (1, -1):
            at = 13 * place + 6 * (1 + sign) // 2 + 1
            behavior.view(-1)[at], logprobs.view(-1)[at] = -64.0, -64.0 + difference
            advantages.view(-1)[at], mask.view(-1)[at] = sign * 0.5, True
    zeroed = [torch.where(mask, x, 0.0).to(dtype) for x in (logprobs, behavior, advantages)]
    return Tokens(*zeroed, mask)


def check(tokens, ours, gradient, theirs, theirs_gradient):
    assert_close(ours.loss.cpu(), theirs.loss.detach(), rtol=1e-6, atol=0)
    assert_close(gradient.cpu(), theirs_gradient, rtol=1e-6, atol=0)
    assert torch.equal(ours.retained.cpu(), theirs.retained)
    for name, value in clip_statistics(tokens, theirs.retained).items():
        assert_close(ours.statistics[name].cpu(), value, rtol=1e-12, atol=0, msg=name)
    assert list(ours.statistics) == list(clip_statistics(tokens, theirs.retained))


@pytest.mark.parametrize("shape", [(BLOCK_TOKENS + 476,), (7, 40)])
def test_fixed_bounds_equal_the_torch_path(shape):
    tokens = stale_tokens(shape)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for low, high, cap in ((0.8, 1.2, None), (0.8, 1.28, None), (0, 2, None), (0.8, 1.2, 3.0)):
        leaf = Tokens(
            tokens.logprobs.clone().requires_grad_(), tokens.behavior_logprobs, tokens.advantages, tokens.mask
        )
        theirs = grpo(leaf, low=low, high=high) if cap is None else dual_clip(leaf, low=low, high=high, cap=cap)
        theirs.loss.backward(weights)
        ours, gradient = fused(tokens, low, high, cap, weights)
        check(tokens, ours, gradient, theirs, leaf.logprobs.grad)
        bounds = fixed_bounds(tokens.ratio, tokens.advantages, low, high)
        for a, b in zip(ours.bounds, (bounds.low, bounds.high, bounds.share), strict=True):
            assert a.dtype == b.dtype
            assert_close(a.cpu(), b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_solved_bounds_stay_on_the_device(cap):
    tokens = stale_tokens((500,))
    pair = torch.tensor([0.7, 1.9])
    bounds = ClipBounds(pair[0], pair[1], torch.tensor(0.5))
    leaf = Tokens(tokens.logprobs.clone().requires_grad_(), tokens.behavior_logprobs, tokens.advantages, tokens.mask)
    theirs = bapo(leaf, bounds=bounds, dual_clip=cap)
    theirs.loss.sum().backward()
    ours, gradient = fused(tokens, *pair.to(DEVICE).unbind(), cap)
    check(tokens, ours, gradient, theirs, leaf.logprobs.grad)
    assert_close(torch.stack(ours.bounds[:2]).cpu(), pair)


def test_by_hand():
    # d(-rA)/dlogp = -rA where unclipped, 0 where the bound binds; the cap blocks the last one
    ratio, advantages = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0, 5.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, -1.0])
    behavior = torch.full((6,), -2.0)
    tokens = Tokens(behavior + ratio.log(), behavior, advantages, torch.ones(6).bool())
    ours, gradient = fused(tokens, 0.8, 1.2, 3.0)
    assert ours.loss.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8, 0.0, 3.0])
    assert gradient.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, 0.0, 0.0])
    assert ours.retained.tolist() == [False, True, True, False, True, False]
    # P = 0.5; N = 1.5 + 5, as the cap is no bound of the share
    assert ours.bounds[2].item() == pytest.approx(0.5 / 7)
    assert ours.statistics["clip_fraction"].item() == pytest.approx(3 / 5)
    assert ours.statistics["clip_fraction_positive"].item() == pytest.approx(1 / 2)
    assert ours.statistics["clip_fraction_negative"].item() == pytest.approx(2 / 3)


def test_a_ratio_at_a_bound_is_clipped():
    pair = torch.tensor([0.8, 1.2])
    logprobs = pair.log()
    exact = Tokens(logprobs, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2).bool()).ratio
    tokens = Tokens(logprobs, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2).bool())
    ours, gradient = fused(tokens, *exact.to(DEVICE).unbind())
    at_bounds = exact.double() == logprobs.double().exp().float().double()
    assert at_bounds.all()  # both ways to round the exponential agree here
    assert not ours.retained.any()
    assert not gradient.any()


def test_masked_tokens_may_hold_anything_and_get_no_gradient():
    tokens = stale_tokens((300,))
    dirty = [x.clone() for x in (tokens.logprobs, tokens.behavior_logprobs, tokens.advantages)]
    for values, bad in zip(dirty, (math.nan, math.inf, math.nan), strict=True):
        values[~tokens.mask] = bad
    clean, clean_gradient = fused(tokens, 0.8, 1.2)
    ours, gradient = fused(Tokens(*dirty, tokens.mask), 0.8, 1.2)
    assert torch.equal(ours.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[~tokens.mask.to(DEVICE)].any()
    for a, b in zip(
        (*ours.bounds, *ours.statistics.values()), (*clean.bounds, *clean.statistics.values()), strict=True
    ):
        assert torch.equal(a, b)


def test_bfloat16_log_probs_are_worked_on_in_float32_and_get_bfloat16_gradients():
    tokens = stale_tokens((200,), dtype=torch.bfloat16)
    wide = Tokens(*(x.float() for x in (tokens.logprobs, tokens.behavior_logprobs, tokens.advantages)), tokens.mask)
    ours, gradient = fused(tokens, 0.8, 1.2)
    expected, expected_gradient = fused(wide, 0.8, 1.2)
    assert torch.equal(ours.loss, expected.loss)
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, expected_gradient.bfloat16())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_bad_value_poisons_its_loss_and_the_share(bad, place):
    behavior = torch.full((3,), -2.0)
    columns = [behavior - 0.1, behavior.clone(), torch.tensor([1.0, 1.0, -1.0])]
    columns[place][1] = bad
    ours, _ = fused(Tokens(*columns, torch.ones(3).bool()), 0.8, 1.2)
    assert ours.loss.isfinite().tolist() == [True, False, True]
    assert ours.bounds[2].isnan()


def test_nan_bounds_give_a_nan_loss_to_every_signed_token():
    tokens = Tokens(torch.zeros(3), torch.zeros(3), torch.tensor([1.0, -1.0, 0.0]), torch.ones(3).bool())
    ours, _ = fused(tokens, *torch.full((2,), math.nan, device=DEVICE).unbind())
    assert ours.loss.isnan().tolist() == [True, True, False]
    assert ours.retained.tolist() == [False, False, True]


def test_a_nan_gradient_reaches_every_token():
    tokens = stale_tokens((200,))
    _, gradient = fused(tokens, 0.8, 1.2, gradient=torch.full((200,), math.nan))
    assert gradient.isnan().all()


def test_nothing_selected_gives_zeros():
    zeros = torch.zeros(4)
    ours, gradient = fused(Tokens(zeros, zeros, zeros, zeros.bool()), 0.8, 1.2)
    assert not ours.loss.any()
    assert not gradient.any()
    assert ours.bounds[2] == 1.0
    assert [value.item() for value in ours.statistics.values()] == [0.0] * 5
