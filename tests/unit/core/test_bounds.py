"""solve_bounds against the literal loop, and every degenerate case the method defines."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from bapo import ClipSettings, StopReason, bounds_from_table, signal_table, solve_bounds
from bapo.core.bounds import LEAST_WEIGHT, grids_of, weight_of_remainder
from bapo.core.checks import holds
from bapo.core.entropy_rule import positive_share
from bapo.core.objectives import low_of_each
from bapo.core.sums import CPU_CHUNK, Chunk, binned_sums, compared_sums
from tests.reference import search

COMBINATIONS = list(itertools.product(["gradient", "surrogate"], ["none", "rollout_prob"], ["high_first", "low_first"]))
RANGES = [
    {},
    {"low": (0.8, 0.9), "high": (1.2, 2.0)},
    {"low": (0.8, 0.95), "high": (1.2, 2.0), "low_step": 0.05, "high_step": 0.1},
    {"low": (0.8, 0.8), "high": (1.2, 1.2)},
    {"low": (0.8, 0.81), "high": (1.2, 3.0)},
    {"low": (0.6, 0.9), "high": (1.28, 1.28)},
    {"low": (0.0, 1.0), "high": (1.0, 9.0), "low_step": 0.07, "high_step": 0.9},
]
GRID_POINTS = [c for r in RANGES for c in ClipSettings(**r).low_grid + ClipSettings(**r).high_grid]


def float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


def neighbours(value):
    """The float32 next to a grid point and its two neighbours: where a comparison is easiest to get wrong."""
    centre = torch.tensor(value, dtype=torch.float32)
    return [centre.item(), *(torch.nextafter(centre, torch.tensor(end)).item() for end in (-math.inf, math.inf))]


on_the_grid = st.sampled_from([x for c in GRID_POINTS for x in neighbours(c) if x >= 0])
ratios = st.one_of(
    on_the_grid,
    st.sampled_from([0.0, 1.0, 1e-9, 4.8e8]),
    st.floats(1 / 64, 10.0, width=32),
)
exact_advantages = st.integers(-16, 16).map(lambda n: n / 8)
token = st.tuples(
    ratios,
    st.one_of(exact_advantages, st.floats(-3, 3, width=32)),
    st.booleans(),
    st.floats(-20, 0, width=32),
)


def tensors(batch, dtype):
    ratio, advantages, mask, behavior = (list(column) for column in zip(*batch, strict=True))
    return (
        torch.tensor(ratio, dtype=dtype),
        torch.tensor(advantages, dtype=dtype),
        torch.tensor(mask),
        torch.tensor(behavior, dtype=dtype),
    )


@pytest.mark.parametrize(("measure", "weight", "order"), COMBINATIONS)
@settings(max_examples=500, deadline=None)
@given(
    batch=st.lists(token, min_size=1, max_size=40).filter(lambda batch: any(t[2] for t in batch)),
    ranges=st.sampled_from(RANGES),
    target=st.one_of(st.sampled_from([0.0, 0.25, 0.4, 0.5, 1.0]), st.floats(0, 1)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_solver_equals_the_literal_loop(measure, weight, order, batch, ranges, target, dtype):
    settings = ClipSettings(target_share=target, measure=measure, weight=weight, order=order, **ranges)
    ratio, advantages, mask, behavior = tensors(batch, dtype)
    found = search(ratio, advantages, mask, settings, behavior)
    bounds = solve_bounds(ratio, advantages, mask, settings, behavior_logprobs=behavior)
    # A share this close to the target is decided by the order of summation; exact ties have a test of their own.
    assume(min(found.margins) > 1e-12 or target in (0.0, 1.0))
    assert (bounds.low.item(), bounds.high.item()) == pytest.approx((found.low, found.high), abs=1e-6)
    assert bounds.share.item() == pytest.approx(found.share, abs=1e-6)


@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
@pytest.mark.parametrize("order", ["high_first", "low_first"])
@settings(max_examples=300, deadline=None)
@given(
    ratio=st.lists(st.integers(0, 512).map(lambda n: n / 128), min_size=1, max_size=40),
    data=st.data(),
    eighths=st.integers(0, 8),
)
def test_solver_equals_the_loop_even_at_exact_ties_when_arithmetic_is_exact(measure, order, ratio, data, eighths):
    # Dyadic ratios, advantages, bounds and target: no sum is rounded, so ties must be decided alike.
    settings = ClipSettings(
        target_share=eighths / 8,
        low=(0.5, 0.875),
        high=(1.25, 3.0),
        low_step=1 / 64,
        high_step=1 / 32,
        measure=measure,
        order=order,
    )
    advantages = data.draw(st.lists(exact_advantages, min_size=len(ratio), max_size=len(ratio)))
    ratio, advantages = torch.tensor(ratio), torch.tensor(advantages)
    mask = torch.ones_like(ratio, dtype=torch.bool)
    found = search(ratio, advantages, mask, settings)
    bounds = solve_bounds(ratio, advantages, mask, settings)
    assert (bounds.low.item(), bounds.high.item()) == (found.low, found.high)
    assert bounds.share.item() == float32(found.share)


@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
@settings(max_examples=300, deadline=None)
@given(batch=st.lists(token, min_size=1, max_size=60), ranges=st.sampled_from(RANGES))
def test_the_two_ways_to_fill_a_table_agree(measure, batch, ranges):
    ratio, advantages, mask, _ = tensors(batch, torch.float32)
    grids = grids_of(ClipSettings(measure=measure, **ranges), torch.float32, torch.device("cpu"))
    signal = torch.where(mask, advantages, 0.0)
    chunk = Chunk(ratio, ratio, signal)
    candidates, surrogate = (grids.low, grids.high, grids.thresholds), measure == "surrogate"
    binned = binned_sums([chunk], *candidates, steps=grids.steps, surrogate=surrogate)
    compared = compared_sums([chunk], grids.low, grids.high, grids.thresholds, surrogate=measure == "surrogate")
    assert_close(binned, compared, rtol=1e-12, atol=1e-12 * float((ratio * signal).abs().sum() + 1))


def test_bounds_by_hand():
    # P(high) = sum of r A below high; N(low) = sum of r |A| above low.
    ratio = torch.tensor([1.0, 1.5, 2.0, 1.0, 0.7, 2.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    mask = torch.ones(6, dtype=torch.bool)
    # N(0.6) = 1 + 0.7 + 2.5 = 4.2. P: 1 below 1.5; 2.5 from high = 1.55 on; 4.5 from high = 2.05 on.
    # shares 1/5.2 = .19, 2.5/6.7 = .37, 4.5/8.7 = .52: target 0.4 is reached at high = 2.05.
    bounds = solve_bounds(ratio, advantages, mask, ClipSettings())
    assert_close(bounds.low, torch.tensor(0.6))
    assert_close(bounds.high, torch.tensor(2.05))
    assert_close(bounds.share, torch.tensor(4.5 / 8.7))
    assert bounds.stop == StopReason.RAISING_HIGH
    # Target 0.54 needs the negative at 0.7 clipped too: N(0.7) = 3.5 and 4.5 / 8 = .5625, at low = 0.7.
    bounds = solve_bounds(ratio, advantages, mask, ClipSettings(target_share=0.54))
    assert_close(torch.stack([bounds.low, bounds.high]), torch.tensor([0.7, 3.0]), rtol=0, atol=2e-2)
    assert bounds.stop == StopReason.RAISING_LOW
    assert_close(bounds.share, torch.tensor(4.5 / 8.0))


def test_surrogate_raising_low_moves_the_share_away_from_the_target():
    ratio, mask = torch.tensor([1.0, 0.5]), torch.ones(2, dtype=torch.bool)
    advantages = torch.tensor([1.0, -3.0])
    settings = ClipSettings(target_share=0.4, measure="surrogate")
    table = signal_table(ratio, advantages, mask, settings)
    negative = table[len(settings.high_grid) : -1]
    assert_close(negative, torch.tensor([3 * low for low in settings.low_grid], dtype=torch.float64))
    bounds = solve_bounds(ratio, advantages, mask, settings)
    assert bounds.stop == StopReason.END
    assert bounds.share < bounds.share_at_start


ALL = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
@pytest.mark.parametrize(
    ("case", "ratio", "advantages", "low", "high", "share", "stop"),
    [
        ("no signal", [1.0, 2.0, 0.5], [0.0, 0.0, 0.0], 0.6, 1.2, 1.0, StopReason.NO_SIGNAL),
        ("no positives", [1.0, 2.0, 0.7], [-1.0, -1.0, -1.0], 0.9, 3.0, 0.0, StopReason.END),
        ("no negatives", [1.0, 1.1, 0.7], [1.0, 1.0, 1.0], 0.6, 1.2, 1.0, StopReason.START),
        ("ratios 1, balanced", [1.0, 1.0, 1.0], [1.0, -1.0, 0.0], 0.6, 1.2, 0.5, StopReason.START),
        ("ratios 1, unbalanced", [1.0, 1.0, 1.0], [1.0, -1.0, -1.0], 0.9, 3.0, 1 / 3, StopReason.END),
    ],
)
def test_degenerate_batches(measure, case, ratio, advantages, low, high, share, stop):
    bounds = solve_bounds(torch.tensor(ratio), torch.tensor(advantages), ALL, ClipSettings(measure=measure))
    assert_close(torch.stack([bounds.low, bounds.high, bounds.share]), torch.tensor([low, high, share]), msg=case)
    assert bounds.stop == stop


def test_everything_clipped_counts_as_share_zero_and_the_search_goes_on():
    # One positive at ratio 2: clipped away until high passes 2. P + N = 0 before that, although a signal exists.
    bounds = solve_bounds(torch.tensor([2.0]), torch.tensor([1.0]), torch.ones(1).bool(), ClipSettings())
    assert_close(bounds.high, torch.tensor(2.05))
    assert (bounds.share_at_start, bounds.share) == (0.0, 1.0)
    everything = solve_bounds(torch.tensor([9.0]), torch.tensor([1.0]), torch.ones(1).bool(), ClipSettings())
    assert (everything.share, everything.stop) == (0.0, StopReason.END)


def test_ranges_of_zero_width_fix_the_bounds():
    settings = ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2))
    bounds = solve_bounds(torch.tensor([3.0, 1.0]), torch.tensor([1.0, -1.0]), torch.ones(2).bool(), settings)
    assert_close(torch.stack([bounds.low, bounds.high]), torch.tensor([0.8, 1.2]), rtol=0, atol=0)
    assert_close(bounds.share, torch.tensor(0.0))


def test_a_low_range_narrower_than_its_step_still_walks_the_high_half():
    settings = ClipSettings(low=(0.8, 0.81), low_step=0.02, high=(1.2, 3.0))
    bounds = solve_bounds(torch.tensor([2.0, 1.0]), torch.tensor([1.0, -1.0]), torch.ones(2).bool(), settings)
    assert_close(torch.stack([bounds.low, bounds.high]), torch.tensor([0.8, 2.05]))


def test_masked_tokens_may_hold_anything():
    ratio = torch.tensor([1.0, 1.5, math.nan, math.inf])
    advantages = torch.tensor([-1.0, 1.0, math.inf, math.nan])
    mask = torch.tensor([True, True, False, False])
    padded = solve_bounds(ratio, advantages, mask, ClipSettings())
    plain = solve_bounds(ratio[:2], advantages[:2], mask[:2], ClipSettings())
    assert_close(
        torch.stack([padded.low, padded.high, padded.share]), torch.stack([plain.low, plain.high, plain.share])
    )


def test_integer_and_float_masks_select_like_bool_ones():
    ratio, advantages = torch.rand(50) * 3, torch.randn(50)
    mask = torch.rand(50) < 0.5
    tables = [signal_table(ratio, advantages, m, ClipSettings()) for m in (mask, mask.int(), mask.float())]
    assert_close(tables[0], tables[1])
    assert_close(tables[0], tables[2])
    with pytest.raises(ValueError, match="mask holds values other than 0 and 1"):
        signal_table(ratio, advantages, mask.float() / 2, ClipSettings())


def test_nonfinite_ratio_names_the_first_offending_sequence():
    ratio = torch.ones(3, 4)
    ratio[1, 2] = math.nan
    ratio[2, 0] = math.inf
    with pytest.raises(ValueError, match=r"ratio is nan in sequence 1, token 2"):
        solve_bounds(ratio, torch.ones(3, 4), torch.ones(3, 4).bool(), ClipSettings())


def test_a_nonfinite_table_gives_nan_bounds_never_plausible_ones():
    settings = ClipSettings()
    for bad in (math.nan, math.inf):
        grids = grids_of(settings, torch.float32, torch.device("cpu"))
        ratio = torch.tensor([bad, 1.0])
        chunk = Chunk(ratio, ratio, torch.tensor([1.0, -1.0]))
        surrogate = settings.measure == "surrogate"
        table = compared_sums([chunk], grids.low, grids.high, grids.thresholds, surrogate=surrogate)
        bounds = bounds_from_table(table, settings)
        assert bounds.low.isnan()
        assert bounds.high.isnan()
        assert bounds.share.isnan()


def test_empty_mask_and_missing_behavior_logprobs_are_refused():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match="mask selects none of its 6 tokens"):
        solve_bounds(ones, ones, torch.zeros(2, 3).bool(), ClipSettings())
    with pytest.raises(ValueError, match="needs behavior_logprobs"):
        solve_bounds(ones, ones, ones.bool(), ClipSettings(weight="rollout_prob"))


def test_a_table_of_other_settings_is_refused():
    table = signal_table(torch.ones(3), torch.ones(3), ALL, ClipSettings())
    with pytest.raises(ValueError, match="filled with other settings"):
        bounds_from_table(table, ClipSettings.preset("weak-model"))


def test_bfloat16_ratios_are_worked_on_in_float32():
    ratio, advantages = torch.tensor([1.5, 1.0]).bfloat16(), torch.tensor([1.0, -1.0]).bfloat16()
    bounds = solve_bounds(ratio, advantages, torch.ones(2).bool(), ClipSettings())
    assert bounds.low.dtype == bounds.high.dtype == torch.float32
    assert_close(bounds.high, torch.tensor(1.55))


def test_positive_share_by_hand():
    ratio, signal = torch.tensor([1.5, 1.0, 0.5, 1.0]), torch.tensor([1.0, 1.0, -2.0, -1.0])
    # gradient at (0.8, 1.2): P = 1, N = 1.  surrogate: P = 1.2 + 1, N = 1.6 + 1.  unclipped: P = 2.5, N = 2
    assert_close(positive_share(ratio, signal, 0.8, 1.2), torch.tensor(0.5).double())
    assert_close(positive_share(ratio, signal, 0.8, 1.2, "surrogate"), torch.tensor(2.2 / 4.8).double())
    assert_close(positive_share(ratio, signal, -1.0, math.inf), torch.tensor(2.5 / 4.5).double())
    assert positive_share(ratio, signal * 0, 0.8, 1.2) == 1.0
    assert positive_share(torch.tensor([5.0]), torch.tensor([1.0]), 0.8, 1.2) == 0.0


@pytest.mark.parametrize("weight", ["none", "rollout_prob"])
@pytest.mark.parametrize("measure", ["gradient", "surrogate"])
def test_batches_larger_than_a_chunk_add_up(measure, weight):
    generator = torch.Generator().manual_seed(0)
    count = CPU_CHUNK + 1000
    ratio = torch.randn(count, generator=generator).mul(0.4).exp()
    ratio[CPU_CHUNK:] *= 2  # the second chunk is unlike the first
    advantages = torch.randn(count, generator=generator) - 0.2
    behavior = -torch.rand(count, generator=generator) * 3
    settings = ClipSettings(measure=measure, weight=weight)
    whole = signal_table(ratio, advantages, torch.ones(count).bool(), settings, behavior_logprobs=behavior)
    parts = [
        signal_table(r, a, torch.ones(len(r)).bool(), settings, behavior_logprobs=b)
        for r, a, b in zip(ratio.split(70_000), advantages.split(70_000), behavior.split(70_000), strict=True)
    ]
    assert_close(whole, sum(parts), rtol=1e-12, atol=1e-9)


def test_stop_reason_and_end_share_when_low_moves_first():
    ratio, advantages = torch.tensor([2.0, 0.7, 1.0]), torch.tensor([1.0, -1.0, -1.0])
    # low first: N falls from 1.7 to 1 at low = 0.7, P stays 0 until high passes 2.
    settings = ClipSettings(order="low_first", target_share=0.6)
    bounds = solve_bounds(ratio, advantages, ALL, settings)
    assert_close(torch.stack([bounds.low, bounds.high]), torch.tensor([0.9, 2.05]))
    assert bounds.stop == StopReason.RAISING_HIGH
    assert_close(bounds.share_at_end, torch.tensor(2 / 3))
    ratio[0], settings = 1.0, ClipSettings(order="low_first", target_share=0.45)
    bounds = solve_bounds(ratio, advantages, ALL, settings)
    assert bounds.stop == StopReason.RAISING_LOW
    assert_close(bounds.high, torch.tensor(1.2))


def test_reaching_the_target_on_the_way_is_not_the_end_even_if_the_end_misses_it():
    # Surrogate: P = high up to 2, N = 3 low. 2 / (2 + 1.8) is reached, but at the end 2 / (2 + 2.7) is not.
    ratio, advantages = torch.tensor([2.0, 0.1]), torch.tensor([1.0, -3.0])
    bounds = solve_bounds(ratio, advantages, ALL[:2], ClipSettings(measure="surrogate", target_share=0.5))
    assert bounds.stop == StopReason.RAISING_HIGH
    assert bounds.share_at_end < 0.5 <= bounds.share


def test_float64_ratios_are_compared_in_float64():
    settings = ClipSettings(low=(0.8, 0.8), high=(1.3, 1.3))
    mask = torch.ones(2).bool()
    for offset, share in ((-1e-12, 1.3 / 2.3), (1e-12, 0.0)):
        ratio = torch.tensor([1.3 + offset, 1.0], dtype=torch.float64)
        bounds = solve_bounds(ratio, torch.tensor([1.0, -1.0], dtype=torch.float64), mask, settings)
        assert bounds.share.item() == pytest.approx(share)


def test_tiny_rollout_probabilities_do_not_underflow():
    settings = ClipSettings(weight="rollout_prob")
    tiny = torch.full((2,), -110.0)
    bounds = solve_bounds(torch.ones(2), torch.tensor([1.0, -1.0]), ALL[:2], settings, behavior_logprobs=tiny)
    assert bounds.stop == StopReason.START
    assert bounds.share == 0.5


def test_negative_ratios_are_refused():
    with pytest.raises(ValueError, match=r"ratio is -0.5 in packed token 1.*log-ratio"):
        solve_bounds(torch.tensor([1.0, -0.5]), torch.ones(2), ALL[:2], ClipSettings())


def test_an_infinite_table_has_no_plausible_share():
    table = signal_table(torch.ones(3), torch.ones(3), ALL, ClipSettings())
    table[-2] = math.inf
    bounds = bounds_from_table(table, ClipSettings())
    values = [bounds.low, bounds.high, bounds.share, bounds.share_at_start, bounds.share_at_end]
    assert torch.stack(values).isnan().all()


def test_caches_survive_another_default_device():
    from bapo.core import bounds, sums

    sums._lanes.cache_clear()
    bounds.grids_of.cache_clear()
    ones = torch.ones(3)
    with torch.device("meta"):
        inside = solve_bounds(ones, ones, ALL, ClipSettings())
    assert_close(inside.high, solve_bounds(ones, ones, ALL, ClipSettings()).high)


@pytest.mark.parametrize(
    ("share", "target", "weight"),
    [(0.25, 0.4, 0.5), (0.4, 0.4, 1.0), (0.6, 0.4, 1.0), (0.0, 0.4, LEAST_WEIGHT), (1.0, 0.4, 1.0), (0.3, 0.0, 1.0)],
)
def test_the_remainder_by_hand(share, target, weight):
    # P = 1, N = 3: a share of .25. Halved negatives, N = 1.5, make it 1 / 2.5 = .4.
    assert weight_of_remainder(torch.tensor(share), target).item() == pytest.approx(weight)


@settings(max_examples=200, deadline=None)
@given(batch=st.lists(token, min_size=2, max_size=30).filter(lambda batch: any(t[2] for t in batch)))
def test_weighing_the_remainder_reaches_the_target_wherever_there_is_a_positive_signal(batch):
    ratio, advantages, mask, _ = tensors(batch, torch.float64)
    chosen = ClipSettings(target_share=0.45, low=(0.8, 0.9), high=(1.2, 2.0), remainder="weigh")
    bounds = solve_bounds(ratio, advantages, mask, chosen)
    plain = solve_bounds(ratio, advantages, mask, replace(chosen, remainder="leave"))
    assert (bounds.low, bounds.high, bounds.share) == (plain.low, plain.high, plain.share)
    assert plain.negative_weight is None
    signal = torch.where(mask, advantages, 0.0)
    weighed = torch.where(signal < 0, signal * bounds.negative_weight, signal)
    share = positive_share(ratio, weighed, bounds.low, bounds.high).item()
    if LEAST_WEIGHT < bounds.negative_weight < 1:
        assert share == pytest.approx(0.45, rel=1e-9)
    elif bounds.share >= 0.45:
        assert bounds.negative_weight == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("low", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("used_low", [0.0, 0.3, 0.7, 0.9, 1.0, 1.7, 300.0])
def test_the_lower_bound_of_each_token_is_exactly_one_of_the_two(low, used_low, dtype):
    used = torch.tensor([True, False, False, True])
    expected = torch.tensor([used_low if x else low for x in used], dtype=dtype)
    for bound in (low, torch.tensor(low, dtype=dtype)):
        ours = low_of_each(bound, used, used_low, dtype)
        assert ours.dtype == dtype
        assert torch.equal(ours, expected)
    assert low_of_each(torch.tensor(math.nan), used, used_low, dtype).isnan().all()  # poisons every token


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_comparisons_are_those_of_torch(dtype):
    values = torch.tensor([[0.5, 0.8, 1.0], [math.nan, math.inf, -math.inf]], dtype=dtype, requires_grad=True)
    for other in (0.8, 0, math.inf, math.nan, torch.tensor(0.8, dtype=dtype), values.detach().flip(1)):
        for operator in (torch.gt, torch.ge, torch.lt, torch.le, torch.eq):
            ours = holds(operator, values, other)
            assert ours.dtype == torch.bool
            assert torch.equal(ours, operator(values, other))
