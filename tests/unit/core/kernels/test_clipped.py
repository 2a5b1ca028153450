"""The clipped loss by kernels against the torch code and its autograd.

Kernels run on the GPU where there is one, else under Triton's interpreter; what they are compared with runs on CPU.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from bapo.core.bounds import ClipBounds
from bapo.core.checks import MAX_LOG_RATIO
from bapo.core.entropy_rule import clip_statistics
from bapo.core.kernels.clipped import BLOCK_TOKENS, clipped_loss
from bapo.core.objectives import bapo, dual_clip, grpo
from bapo.core.reduction import denominator_of, reduce_tokens, token_weights
from bapo.core.tokens import Tokens
from tests.precisions import COARSE, PRECISIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(tokens, low, high, cap=None, *, incoming=1.0, **reduction):
    """The kernels' result, and the gradient of the log-probs for an incoming one."""
    leaf = tokens.given_logprobs.detach().to(DEVICE).requires_grad_()
    rest = [x.to(DEVICE) for x in (tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask)]
    reduction = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in reduction.items()}
    result = clipped_loss(leaf, *rest, low, high, log_ratio_limit=MAX_LOG_RATIO, cap=cap, **reduction)
    result.loss.backward(torch.tensor(incoming, device=DEVICE))
    return result, leaf.grad


def sums(tokens, low, high, cap=None):
    """The loss of each token, by one call for each, and their gradients: `denominator` 1 makes a mean a sum."""
    here = torch.eye(len(tokens.mask), dtype=torch.bool)
    parts = [
        fused(
            Tokens(
                tokens.given_logprobs, tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask & here[i]
            ),
            low,
            high,
            cap,
            denominator=1.0,
        )
        for i in range(len(here))
    ]
    whole, gradient = fused(tokens, low, high, cap, denominator=1.0)
    assert_close(sum(gradient for _, gradient in parts), gradient, rtol=0, atol=0, equal_nan=True)
    return whole, [part.loss.item() for part, _ in parts], gradient


def stale_tokens(shape, dtype=torch.float32, extremes=True):
    generator = torch.Generator().manual_seed(0)
    behavior = -3 * torch.rand(shape, generator=generator)
    logprobs = behavior + 0.5 * torch.randn(shape, generator=generator)
    advantages = torch.randn(shape, generator=generator) - 0.2
    advantages.view(-1)[::5] = 0
    mask = torch.rand(shape, generator=generator) < 0.8
    # Past the ratio limit on both sides, at it, and next to it; each with both signs. Beside them a sum shows little.
    differences = (40.0, -40.0, MAX_LOG_RATIO, -MAX_LOG_RATIO, 19.5, -19.5) if extremes else ()
    for place, difference in enumerate(differences):
        for sign in (1, -1):
            at = 13 * place + 6 * (1 + sign) // 2 + 1
            behavior.view(-1)[at], logprobs.view(-1)[at] = -64.0, -64.0 + difference
            advantages.view(-1)[at], mask.view(-1)[at] = sign * 0.5, True
    return Tokens(*(x.to(dtype) for x in (logprobs, behavior, advantages)), mask)


def with_garbage(tokens):
    """The same tokens, with what no arithmetic survives where the mask is off."""
    dirty = [x.clone() for x in (tokens.given_logprobs, tokens.given_behavior_logprobs, tokens.given_advantages)]
    off = (~tokens.mask).nonzero().unbind(1)
    for values, bad in zip(dirty, ((math.nan, math.inf), (math.inf, -1e30), (math.nan, 1e38)), strict=True):
        values[off] = torch.tensor(bad, dtype=values.dtype).repeat(len(off[0]))[: len(off[0])]
    return Tokens(*dirty, tokens.mask)


def reference(objective, tokens, *, reduction="token_mean", incoming=1.0, denominator=None, ids=None, **options):
    """The torch path: the loss and the gradient of the log-probs, with the objective's result."""
    leaf = tokens.given_logprobs.clone().requires_grad_()
    result = objective(
        Tokens(leaf, tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask, ids), **options
    )
    if denominator is None:
        denominator = denominator_of(tokens.mask, reduction, sequence_ids=ids, length=32)
    loss = reduce_tokens(result.loss, tokens.mask, reduction, denominator=denominator, sequence_ids=ids)
    loss.backward(torch.tensor(incoming))
    return loss.detach(), leaf.grad, result


def check(tokens, ours, gradient, loss, theirs_gradient, theirs):
    assert (ours.loss.dtype, ours.loss.shape) == (torch.float32, ())
    assert_close(ours.loss.detach().cpu(), loss, rtol=2e-6, atol=1e-7)
    assert_close(gradient.cpu(), theirs_gradient, rtol=max(1e-6, torch.finfo(gradient.dtype).eps), atol=0)
    assert torch.equal(ours.retained.cpu(), theirs.retained)
    for name, value in clip_statistics(tokens, theirs.retained).items():
        assert_close(ours.statistics[name].cpu(), value, rtol=1e-12, atol=0, msg=name)
    assert list(ours.statistics) == list(clip_statistics(tokens, theirs.retained))


@pytest.mark.parametrize("shape", [(BLOCK_TOKENS + 476,), (7, 40)])
@pytest.mark.parametrize("extremes", [True, False])
def test_fixed_bounds_equal_the_torch_path(shape, extremes):
    tokens = stale_tokens(shape, extremes=extremes)
    for low, high, cap in ((0.8, 1.2, None), (0.8, 1.28, None), (0, 2, None), (0.8, 1.2, 3.0)):
        options = {"low": low, "high": high} | ({} if cap is None else {"cap": cap})
        theirs = reference(grpo if cap is None else dual_clip, tokens, incoming=-1.7, **options)
        ours, gradient = fused(with_garbage(tokens), low, high, cap, incoming=-1.7)
        check(tokens, ours, gradient, *theirs)
        bounds = grpo(tokens, low=low, high=high).bounds
        for a, b in zip(ours.bounds, (bounds.low, bounds.high, bounds.share), strict=True):
            assert a.dtype == b.dtype
            assert_close(a.cpu(), b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_solved_bounds_stay_on_the_device(cap):
    tokens = stale_tokens((500,))
    pair = torch.tensor([0.7, 1.9])
    bounds = ClipBounds(pair[0], pair[1], torch.tensor(0.5))
    theirs = reference(bapo, tokens, bounds=bounds, dual_clip=cap)
    ours, gradient = fused(tokens, *pair.to(DEVICE).unbind(), cap)
    check(tokens, ours, gradient, *theirs)
    assert ours.bounds == ()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "fixed_length"])
def test_every_reduction_equals_the_torch_path(reduction, packed):
    tokens = stale_tokens((6, 40), extremes=False)
    tokens.mask[4] = False
    ids = torch.arange(6)[:, None].expand(6, 40).reshape(-1) if packed else None
    if packed:
        given = tokens.given_logprobs, tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask
        tokens = Tokens(*(x.reshape(-1) for x in given), ids)
    weighted = reduction == "sequence_mean"
    weights = token_weights(tokens.mask, reduction, torch.float32, sequence_ids=ids) if weighted else None
    divisor = denominator_of(tokens.mask, reduction, sequence_ids=ids, length=32)
    theirs = reference(grpo, tokens, reduction=reduction, ids=ids)
    ours, gradient = fused(with_garbage(tokens), 0.8, 1.2, weights=weights, denominator=divisor)
    check(tokens, ours, gradient, *theirs)


@pytest.mark.parametrize(
    "denominator",
    [
        None,
        300,
        612.5,
        torch.tensor(612.5),
        torch.tensor([612.5], dtype=torch.float64),
        torch.tensor(300),
    ],
    ids=["counted", "int", "float", "float32", "float64 [1]", "int64"],
)
def test_every_kind_of_denominator(denominator):
    tokens = stale_tokens((200,), extremes=False)
    number = None if denominator is None else float(denominator)
    theirs = reference(grpo, tokens, denominator=number)
    ours, gradient = fused(tokens, 0.8, 1.2, denominator=denominator)
    check(tokens, ours, gradient, *theirs)
    assert ours.loss.shape == ()


def test_by_hand():
    # d(-rA)/dlogp = -rA where unclipped, 0 where the bound binds; the cap blocks the last one
    ratio, advantages = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0, 5.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, -1.0])
    behavior = torch.full((6,), -2.0)
    tokens = Tokens(behavior + ratio.log(), behavior, advantages, torch.ones(6).bool())
    ours, losses, gradient = sums(tokens, 0.8, 1.2, 3.0)
    assert losses == pytest.approx([-1.2, -0.5, 1.5, 0.8, 0.0, 3.0])
    assert ours.loss.item() == pytest.approx(3.6)
    assert gradient.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, 0.0, 0.0])
    assert ours.retained.tolist() == [False, True, True, False, True, False]
    # P = 0.5; N = 1.5 + 5, as the cap is no bound of the share
    assert ours.bounds[2].item() == pytest.approx(0.5 / 7)
    assert ours.statistics["clip_fraction"].item() == pytest.approx(3 / 5)
    assert ours.statistics["clip_fraction_positive"].item() == pytest.approx(1 / 2)
    assert ours.statistics["clip_fraction_negative"].item() == pytest.approx(2 / 3)
    mean, mean_gradient = fused(tokens, 0.8, 1.2, 3.0)
    assert mean.loss.item() == pytest.approx(0.6)
    assert mean_gradient.tolist() == pytest.approx([0.0, -0.5 / 6, 0.25, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("beyond", [25.0, MAX_LOG_RATIO])
def test_the_share_of_given_bounds_leaves_out_tokens_past_the_ratio_limit(sign, beyond):
    # P = 1, N = 2. The third token has no gradient; counted, its ratio of e^20 would be the whole signal.
    logprobs = torch.tensor([-2.0, -2.0, -30.0 + beyond])
    tokens = Tokens(logprobs, torch.tensor([-2.0, -2.0, -30.0]), torch.tensor([1.0, -2.0, sign]), torch.ones(3).bool())
    ours, gradient = fused(tokens, 0.8, math.inf)
    assert ours.bounds[2].item() == pytest.approx(1 / 3)
    assert grpo(tokens, high=math.inf).bounds.share.item() == pytest.approx(1 / 3)
    assert ours.retained.tolist() == [True, True, False]
    assert (gradient[2] == 0) == (beyond > MAX_LOG_RATIO)
    alone = Tokens(*(x[2:] for x in (logprobs, tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask)))
    assert fused(alone, 0.8, math.inf)[0].bounds[2] == 0  # nothing is left of the signal
    assert grpo(alone, high=math.inf).bounds.share == 0


def test_a_ratio_at_a_bound_is_clipped():
    pair = torch.tensor([0.8, 1.2])
    tokens = Tokens(pair.log(), torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2).bool())
    exact = tokens.ratio
    at_bounds = exact.double() == pair.log().double().exp().float().double()
    assert at_bounds.all()  # both ways to round the exponential agree here
    ours, gradient = fused(tokens, *exact.to(DEVICE).unbind())
    assert not ours.retained.any()
    assert not gradient.any()


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_masked_tokens_may_hold_anything_and_get_no_gradient(dtype):
    tokens = stale_tokens((300,), dtype)
    clean, clean_gradient = fused(tokens, 0.8, 1.2)
    ours, gradient = fused(with_garbage(tokens), 0.8, 1.2)
    assert ours.loss.isfinite()
    assert torch.equal(ours.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)
    assert torch.equal(ours.retained, clean.retained)
    assert not gradient[~tokens.mask.to(DEVICE)].any()
    for a, b in zip(
        (*ours.bounds, *ours.statistics.values()), (*clean.bounds, *clean.statistics.values()), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", COARSE)
def test_coarse_log_probs_are_worked_on_in_float32_and_get_gradients_of_their_dtype(dtype):
    tokens = stale_tokens((200,), dtype, extremes=False)
    given = tokens.given_logprobs, tokens.given_behavior_logprobs, tokens.given_advantages
    ours, gradient = fused(tokens, 0.8, 1.2)
    expected, expected_gradient = fused(Tokens(*(x.float() for x in given), tokens.mask), 0.8, 1.2)
    assert torch.equal(ours.loss, expected.loss)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, expected_gradient.to(dtype))
    check(tokens, ours, gradient, *reference(grpo, tokens))


def test_views_and_transposed_tensors_count_by_their_place():
    tokens = stale_tokens((20, 12))
    given = tokens.given_logprobs, tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask
    transposed = [x.t().contiguous().t() for x in given]
    assert not transposed[0].is_contiguous()
    plain, gradient = fused(tokens, 0.8, 1.2)
    ours, transposed_gradient = fused(Tokens(*transposed), 0.8, 1.2)
    assert torch.equal(ours.loss, plain.loss)
    assert torch.equal(ours.retained, plain.retained)
    assert torch.equal(transposed_gradient, gradient)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.5, 0.5])])
def test_a_bad_value_poisons_loss_share_and_every_gradient(bad, place, weights):
    behavior = torch.full((3,), -2.0)
    columns = [behavior - 0.1, behavior.clone(), torch.tensor([1.0, 1.0, -1.0])]
    columns[place][1] = bad
    ours, gradient = fused(Tokens(*columns, torch.ones(3).bool()), 0.8, 1.2, weights=weights)
    assert ours.loss.isnan()
    assert ours.bounds[2].isnan()
    assert gradient.isnan().all()


def test_nan_bounds_give_a_nan_loss_where_there_is_a_signal():
    behavior, nan = torch.zeros(3), torch.full((2,), math.nan, device=DEVICE).unbind()
    signed = Tokens(behavior, behavior, torch.tensor([1.0, -1.0, 0.0]), torch.ones(3).bool())
    ours, gradient = fused(signed, *nan)
    assert ours.loss.isnan()
    assert gradient.isnan().all()
    assert ours.retained.tolist() == [False, False, True]
    ours, gradient = fused(Tokens(behavior, behavior, behavior, torch.ones(3).bool()), *nan)
    assert ours.loss == 0
    assert not gradient.any()


def test_a_nan_gradient_reaches_every_token():
    _, gradient = fused(stale_tokens((200,)), 0.8, 1.2, incoming=math.nan)
    assert gradient.isnan().all()


def test_nothing_selected_gives_zeros_over_a_given_denominator_and_nan_over_none():
    zeros = torch.zeros(4)
    tokens = Tokens(zeros, zeros, zeros, zeros.bool())
    ours, gradient = fused(tokens, 0.8, 1.2, denominator=100)
    assert ours.loss == 0
    assert not gradient.any()
    assert ours.bounds[2] == 1.0
    assert [value.item() for value in ours.statistics.values()] == [0.0] * 5
    ours, gradient = fused(tokens, 0.8, 1.2)
    assert ours.loss.isnan()
    assert gradient.isnan().all()


def test_the_loss_may_be_changed_in_place_and_differentiated_twice_over():
    tokens = stale_tokens((100,))
    leaf = tokens.given_logprobs.to(DEVICE).requires_grad_()
    rest = [x.to(DEVICE) for x in (tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask)]
    loss = clipped_loss(leaf, *rest, 0.8, 1.2, log_ratio_limit=MAX_LOG_RATIO).loss
    once = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    loss /= 4
    assert_close(torch.autograd.grad(loss, leaf)[0], once / 4)


def test_no_graph_where_nothing_asks_for_one():
    tokens = stale_tokens((100,))
    given = [
        x.to(DEVICE)
        for x in (tokens.given_logprobs, tokens.given_behavior_logprobs, tokens.given_advantages, tokens.mask)
    ]
    assert not clipped_loss(*given, 0.8, 1.2, log_ratio_limit=MAX_LOG_RATIO).loss.requires_grad
    with torch.no_grad():
        loss = clipped_loss(given[0].requires_grad_(), *given[1:], 0.8, 1.2, log_ratio_limit=MAX_LOG_RATIO).loss
    assert not loss.requires_grad
