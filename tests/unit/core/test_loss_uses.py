"""A bound of their own for tokens that were trained on before: in the search, in the loss, and in every kernel."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from bapo import ClipSettings, StopReason, bounds_from_table, policy_loss, signal_table, solve_bounds
from bapo.core.bounds import ClipBounds
from bapo.core.checks import MAX_LOG_RATIO
from bapo.core.entropy_rule import use_profile
from bapo.core.kernels.clipped import clipped_loss
from bapo.core.loss import clipped_at, update_table
from bapo.core.objectives import OBJECTIVES
from bapo.core.sums import rounded_down
from bapo.core.tokens import Tokens
from bapo.types import USE_EDGES
from tests.reference import search
from tests.unit.core.kernels.test_bounds import DEVICE, kernel_bounds, table_of, tokens_near_the_grid
from tests.unit.core.test_bounds import COMBINATIONS, RANGES, tensors, token

USED_LOWS = [1.0, 0.95, 0.7, 0.0]


@pytest.mark.parametrize(("measure", "weight", "order"), COMBINATIONS)
@settings(max_examples=200, deadline=None)
@given(
    batch=st.lists(token, min_size=1, max_size=40).filter(lambda batch: any(t[2] for t in batch)),
    ranges=st.sampled_from(RANGES),
    used_low=st.sampled_from(USED_LOWS),
    target=st.one_of(st.sampled_from([0.0, 0.4, 1.0]), st.floats(0, 1)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_the_search_counts_used_negatives_at_their_own_bound(
    measure, weight, order, batch, ranges, used_low, target, dtype, data
):
    settings = ClipSettings(
        target_share=target, measure=measure, weight=weight, order=order, used_low=used_low, **ranges
    )
    ratio, advantages, mask, behavior = tensors(batch, dtype)
    uses = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch))))
    found = search(ratio, advantages, mask, settings, behavior, uses)
    bounds = solve_bounds(ratio, advantages, mask, settings, behavior_logprobs=behavior, uses=uses)
    assume(min(found.margins) > 1e-12 or target in (0.0, 1.0))
    assert (bounds.low.item(), bounds.high.item()) == pytest.approx((found.low, found.high), abs=1e-6)
    assert bounds.share.item() == pytest.approx(found.share, abs=1e-6)
    assert bounds.used_low == used_low


@pytest.mark.parametrize(("measure", "weight", "order"), COMBINATIONS)
def test_the_kernel_counts_them_alike(measure, weight, order):
    for seed, (ranges, used_low) in enumerate(itertools.product(RANGES[:4], USED_LOWS)):
        settings = ClipSettings(
            target_share=0.4, measure=measure, weight=weight, order=order, used_low=used_low, **ranges
        )
        dtype = torch.float64 if seed % 3 == 2 else torch.float32
        ratio, advantages, mask, behavior = tokens_near_the_grid(60, settings, seed, dtype)
        ratio[::7] = used_low  # at the bound itself
        uses = torch.arange(60, dtype=(torch.int64, torch.int32, torch.uint8)[seed % 3]) % 3
        found = search(ratio, advantages, mask, settings, behavior, uses)
        bounds = kernel_bounds(ratio, advantages, mask, settings, behavior, uses)
        assert (bounds.low.item(), bounds.high.item()) == pytest.approx((found.low, found.high), abs=1e-6)
        assert bounds.share.item() == pytest.approx(found.share, abs=1e-6)
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior, uses=uses)
        ours = table_of(ratio, advantages, mask, settings, behavior, uses=uses)
        assert_close(ours.cpu(), table, rtol=1e-12, atol=1e-12)


def test_the_kernel_computes_ratios_on_the_way():
    settings = ClipSettings(used_low=1.0)
    generator = torch.Generator().manual_seed(0)
    behavior = -torch.rand(300, generator=generator) - 1
    logprobs = behavior + 0.3 * torch.randn(300, generator=generator)
    advantages, uses = torch.randn(300, generator=generator), torch.arange(300) % 4
    mask = torch.rand(300, generator=generator) < 0.9
    table = update_table(logprobs, behavior, advantages, mask, settings, uses=uses)
    ours = table_of(logprobs, advantages, mask, settings, behavior, MAX_LOG_RATIO, uses)
    assert_close(ours.cpu(), table, rtol=1e-6, atol=1e-9)


def test_bounds_by_hand():
    # Negatives: a fresh one at 0.7, a used one at 0.95, a used one at 1.1. Positives weigh 1 below high = 1.2.
    ratio = torch.tensor([1.0, 0.7, 0.95, 1.1])
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    uses = torch.tensor([0, 0, 1, 2])
    mask = torch.ones(4, dtype=torch.bool)
    fixed = {"low": (0.6, 0.6), "high": (1.2, 1.2), "target_share": 0.4}
    # Without uses N = 0.7 + 0.95 + 1.1. With used_low = 1, the used token below 1 has no gradient: N = 0.7 + 1.1.
    assert_close(solve_bounds(ratio, advantages, mask, ClipSettings(**fixed)).share, torch.tensor(1 / 3.75))
    pushed_once = solve_bounds(ratio, advantages, mask, ClipSettings(**fixed, used_low=1.0), uses=uses)
    assert_close(pushed_once.share, torch.tensor(1 / 2.8))
    # By the surrogate it counts at its bound: N = 0.7 + 1.0 + 1.1.
    surrogate = ClipSettings(**fixed, used_low=1.0, measure="surrogate")
    assert_close(solve_bounds(ratio, advantages, mask, surrogate, uses=uses).share, torch.tensor(1 / 3.8))


def test_used_negatives_that_are_all_clipped_are_still_a_signal():
    settings = ClipSettings(used_low=1.0)
    bounds = solve_bounds(torch.tensor([0.9]), torch.tensor([-1.0]), ONE, settings, uses=torch.tensor([1]))
    assert (bounds.share, bounds.stop) == (0.0, StopReason.END)
    fresh = solve_bounds(torch.tensor([0.95]), torch.tensor([-1.0]), ONE, settings, uses=torch.tensor([0]))
    assert fresh.stop == StopReason.END


ONE = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("objective", ["grpo", "clip_higher", "dual_clip", "bapo"])
def test_the_loss_by_hand(objective):
    # Negative tokens at ratio 0.9: fresh ones are inside (0.8, high) and keep their gradient, used ones are clipped at
    # 1. At ratio 1.1 both keep it. Positive tokens do not care how often they were used.
    ratio = torch.tensor([0.9, 0.9, 1.1, 1.1, 0.9, 1.1], dtype=torch.float64)
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    uses = torch.tensor([0, 3, 0, 1, 5, 5])
    behavior = torch.full((6,), math.log(0.1), dtype=torch.float64)
    logprobs = (behavior + ratio.log()).requires_grad_()
    tokens = Tokens(logprobs, behavior, advantages, torch.ones(6, dtype=torch.bool), uses=uses)
    options = {"used_low": 1.0}
    if objective == "bapo":
        pair = torch.tensor([0.8, 1.2], dtype=torch.float64)
        options = {"bounds": ClipBounds(pair[0], pair[1], pair[0], used_low=1.0)}
    result = OBJECTIVES[objective].compute(tokens, **options)
    assert result.loss.tolist() == pytest.approx([0.9, 1.0, 1.1, 1.1, -0.9, -1.1])
    result.loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.9, 0, 1.1, 1.1, -0.9, -1.1])
    assert result.retained.tolist() == [True, False, True, True, True, True]
    if objective != "bapo":  # P = 0.9 + 1.1, N = 0.9 + 1.1 + 1.1
        assert result.bounds.share.item() == pytest.approx(2.0 / 5.1)
        assert result.bounds.used_low == 1.0


def stale(count=400, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    behavior = -3 * torch.rand(count, generator=generator)
    logprobs = (behavior + 0.3 * torch.randn(count, generator=generator)).clamp(max=0)
    advantages = torch.randn(count, generator=generator) - 0.2
    advantages[::5] = 0
    mask = torch.rand(count, generator=generator) < 0.9
    uses = torch.randint(0, 3, (count,), generator=generator)
    return *(x.to(dtype) for x in (logprobs, behavior, advantages)), mask, uses


@pytest.mark.parametrize("used_low", [1.0, 0.9, 20.0])
@pytest.mark.parametrize(("low", "high", "cap"), [(0.8, 1.2, None), (0.8, 1.2, 3.0), (0.7, 1.9, None)])
def test_the_kernel_of_the_loss_equals_the_torch_path(low, high, cap, used_low):
    logprobs, behavior, advantages, mask, uses = stale(1500)
    leaf = logprobs.clone().requires_grad_()
    options = {"low": low, "high": high, "used_low": used_low} | ({} if cap is None else {"cap": cap})
    tokens = Tokens(leaf, behavior, advantages, mask, uses=uses)
    theirs = OBJECTIVES["grpo" if cap is None else "dual_clip"].compute(tokens, **options)
    torch.where(mask, theirs.loss, 0.0).sum().div(mask.sum()).backward()
    ours_leaf = logprobs.to(DEVICE).requires_grad_()
    rest = [x.to(DEVICE) for x in (behavior, advantages, mask)]
    for pair in ((low, high), torch.tensor([low, high], device=DEVICE).unbind()):
        ours_leaf.grad = None
        ours = clipped_loss(
            ours_leaf, *rest, *pair, log_ratio_limit=MAX_LOG_RATIO, cap=cap, uses=uses.to(DEVICE), used_low=used_low
        )
        ours.loss.backward()
        assert_close(ours.loss.detach().cpu(), (theirs.loss.detach() * mask).sum() / mask.sum(), rtol=2e-6, atol=1e-7)
        assert_close(ours_leaf.grad.cpu(), leaf.grad, rtol=1e-6, atol=0)
        assert torch.equal(ours.retained.cpu(), theirs.retained)
        if ours.bounds:
            assert_close(ours.bounds[2].cpu(), theirs.bounds.share, rtol=1e-6, atol=0)


@pytest.mark.parametrize("objective", ["grpo", "clip_higher", "dual_clip", "bapo"])
def test_fresh_tokens_give_the_loss_without_the_rule_bit_for_bit(objective):
    logprobs, behavior, advantages, mask, _ = stale()
    fresh = torch.zeros(len(mask), dtype=torch.int64)
    with_rule, without = {"used_low": 1.0}, {}
    if objective == "bapo":
        with_rule, without = {"settings": ClipSettings(used_low=1.0)}, {"settings": ClipSettings()}
    results = []
    for options in ({**with_rule, "uses": fresh}, without):
        leaf = logprobs.clone().requires_grad_()
        result = policy_loss(leaf, behavior, advantages, mask, objective=objective, **options)
        result.loss.backward()
        results.append((result, leaf.grad))
    (ours, our_gradient), (theirs, their_gradient) = results
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(our_gradient, their_gradient)
    assert torch.equal(ours.retained, theirs.retained)
    assert ours.metrics == theirs.metrics


def test_push_once_in_every_way_to_call_it():
    """One call, a table and a call, the core's per-token loss: the same update, with finite-difference gradients."""
    logprobs, behavior, advantages, mask, uses = stale(dtype=torch.float64)
    rule = ClipSettings.from_options("weak-model", used_low=1.0)
    leaf = logprobs.clone().requires_grad_()
    whole = policy_loss(leaf, behavior, advantages, mask, settings=rule, uses=uses)
    whole.loss.backward()
    halves = [slice(0, 150), slice(150, None)]
    parts = [update_table(logprobs[h], behavior[h], advantages[h], mask[h], rule, uses=uses[h]) for h in halves]
    bounds = bounds_from_table(sum(parts), rule, dtype=torch.float64)
    assert (bounds.low, bounds.high, bounds.used_low) == (whole.bounds.low, whole.bounds.high, 1.0)
    again = logprobs.clone().requires_grad_()
    for h in halves:
        policy_loss(
            again[h], behavior[h], advantages[h], mask[h], bounds=bounds, denominator=mask.sum(), uses=uses[h]
        ).loss.backward()
    assert_close(again.grad, leaf.grad, rtol=1e-12, atol=0)
    per_token = clipped_at(bounds, logprobs, behavior, advantages, mask, uses=uses)
    assert torch.equal(per_token.retained & mask, whole.retained & mask)
    for at in mask.nonzero().flatten()[:40].tolist():
        moved = [logprobs.clone() for _ in range(2)]
        for shifted, sign in zip(moved, (1, -1), strict=True):
            shifted[at] += sign * 1e-6
        losses = [policy_loss(x, behavior, advantages, mask, bounds=bounds, uses=uses).loss for x in moved]
        ratio = (logprobs - behavior).exp()[at]
        if min(abs(ratio - edge) for edge in (bounds.low, bounds.high, 1.0)) > 1e-4:
            assert leaf.grad[at] == pytest.approx(float(losses[0] - losses[1]) / 2e-6, abs=1e-8)


def test_rule_and_uses_come_together_and_bad_ones_are_refused():
    logprobs, behavior, advantages, mask, uses = stale()
    arguments = logprobs, behavior, advantages, mask
    rule = ClipSettings(used_low=1.0)
    for options in (
        {"settings": rule},
        {"bounds": solve_bounds((logprobs - behavior).exp(), advantages, mask, rule, uses=uses)},
        {"objective": "grpo", "used_low": 1.0},
    ):
        with pytest.raises(ValueError, match="needs uses="):
            policy_loss(*arguments, **options)
    for options in ({}, {"objective": "grpo"}, {"objective": "gspo", "sequence_ids": uses}):
        with pytest.raises(ValueError, match="nothing asks for it"):
            policy_loss(*arguments, uses=uses, **options)
    with pytest.raises(ValueError, match="needs uses="):
        signal_table((logprobs - behavior).exp(), advantages, mask, rule)
    for bad, message in (
        (uses.float(), "expected integers"),
        (uses[:-1], "expected integers of shape"),
        (uses.tolist(), "uses is a list"),
        (-uses, "less than 0 times"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(*arguments, settings=rule, uses=bad)
    padded = torch.where(mask, uses, -100)  # padding can hold anything
    assert torch.equal(
        policy_loss(*arguments, settings=rule, uses=padded).loss, policy_loss(*arguments, settings=rule, uses=uses).loss
    )
    for bad in (1.5, -0.1, math.nan, True, "1"):
        with pytest.raises(ValueError, match="used_low="):
            ClipSettings(used_low=bad)
    for bad in (-1.0, math.inf, math.nan, True, "1"):
        with pytest.raises(ValueError, match="finite ratio"):
            policy_loss(*arguments, objective="grpo", used_low=bad, uses=uses)


def test_the_threshold_is_rounded_towards_zero_so_comparisons_are_exact():
    for bound in (0.95, 0.8, 0.9, 1.0, 0.7):
        floor = torch.tensor(rounded_down(bound, torch.float32), dtype=torch.float32)
        assert floor.double() <= bound
        assert torch.nextafter(floor, torch.tensor(2.0)).double() > bound


def test_the_profile_by_use_equals_a_loop():
    logprobs, behavior, advantages, mask, uses = stale(600, seed=3)
    uses = uses * 4
    retained = torch.rand(600, generator=torch.Generator().manual_seed(1)) < 0.7
    profile = use_profile(Tokens(logprobs, behavior, advantages, mask, uses=uses), retained)
    rows = list(zip(logprobs - behavior, advantages, mask, uses.tolist(), retained, strict=True))
    edges = [0, *USE_EDGES, math.inf]
    for place, (first, last) in enumerate(itertools.pairwise(edges)):
        inside = [row for row in rows if row[2] and first <= row[3] < last]
        positive = [row for row in inside if row[1] > 0]
        negative = [row for row in inside if row[1] < 0]
        expected = {
            "use_histogram": len(inside),
            "use_positive": math.fsum(row[0] for row in positive) / max(1, len(positive)),
            "use_negative": math.fsum(row[0] for row in negative) / max(1, len(negative)),
            "use_retained": sum(bool(row[4]) for row in negative) / max(1, len(negative)),
            "use_below": sum(bool(row[4] and row[0] < 0) for row in negative) / max(1, len(negative)),
        }
        assert {name: profile[name][place].item() for name in profile} == pytest.approx(expected, rel=1e-6)


def test_a_replaced_bound_of_used_tokens_is_not_lost():
    bounds = ClipBounds(torch.tensor(0.8), torch.tensor(1.2), torch.tensor(0.5), used_low=1.0)
    assert replace(bounds, low=torch.tensor(0.7)).used_low == 1.0
