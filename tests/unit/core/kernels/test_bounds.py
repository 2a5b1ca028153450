"""The solver's kernels against the literal loop and against the torch code they stand in for.

Kernels run on the GPU where there is one, else under Triton's interpreter; what they are compared with runs on CPU.
"""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipSettings, StopReason, bounds_from_table, signal_table, solve_bounds
from bapo.core.bounds import table_by_kernel, walked_by_kernel
from bapo.core.checks import MAX_LOG_RATIO
from bapo.core.kernels.bounds import BLOCK_TOKENS, kinds_of
from bapo.core.tokens import Tokens
from tests.precisions import PRECISIONS
from tests.reference import search

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMBINATIONS = list(itertools.product(["gradient", "surrogate"], ["none", "rollout_prob"], ["high_first", "low_first"]))
RANGES = [
    {},
    {"low": (0.8, 0.95), "high": (1.2, 2.0), "low_step": 0.05, "high_step": 0.1},
    {"low": (0.8, 0.8), "high": (1.2, 1.2)},
    {"low": (0.0, 1.0), "high": (1.0, 9.0), "low_step": 0.07, "high_step": 0.9},
]


def table_of(ratio, advantages, mask, settings, behavior=None, limit=None, uses=None):
    behavior, uses = (None if x is None else x.to(DEVICE) for x in (behavior, uses))
    return table_by_kernel(ratio.to(DEVICE), advantages.to(DEVICE), mask.to(DEVICE), settings, behavior, uses, limit)


def kernel_bounds(ratio, advantages, mask, settings, behavior=None, uses=None):
    dtype = torch.float64 if ratio.dtype == torch.float64 else torch.float32
    return walked_by_kernel(table_of(ratio, advantages, mask, settings, behavior, uses=uses), settings, dtype)


def values(bounds):
    found = (bounds.low, bounds.high, bounds.share, bounds.share_at_start, bounds.share_at_end, bounds.stop)
    return [x.item() for x in found]


def tokens_near_the_grid(count, settings, seed, dtype=torch.float32):
    """Half of the ratios are candidates or their neighbours in float32, where comparisons are easiest to get wrong."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.tensor(settings.low_grid + settings.high_grid, dtype=torch.float64).to(dtype)
    near = torch.cat([grid, *(torch.nextafter(grid, torch.full_like(grid, end)) for end in (-math.inf, math.inf))])
    near = near[torch.randint(len(near), (count,), generator=generator)].clamp(min=0)
    free = torch.randn(count, generator=generator).mul(0.5).exp().to(dtype)
    ratio = torch.where(torch.rand(count, generator=generator) < 0.5, near, free)
    advantages = (torch.randn(count, generator=generator) - 0.2).to(dtype)
    advantages[::5] = 0
    mask = torch.rand(count, generator=generator) < 0.8
    return ratio, advantages, mask, (-3 * torch.rand(count, generator=generator)).to(dtype)


def test_a_launch_is_remembered_by_types_and_only_for_aligned_tensors():
    floats, bools = torch.zeros(64, device=DEVICE), torch.zeros(64, dtype=torch.bool, device=DEVICE)
    assert kinds_of(floats, bools) == kinds_of(floats[4:], bools[16:]) is not None
    assert kinds_of(floats, bools) != kinds_of(floats.double(), bools)
    assert kinds_of(floats[1:], bools) is kinds_of(floats, bools[4:]) is None


@pytest.mark.parametrize(("measure", "weight", "order"), COMBINATIONS)
def test_the_kernels_equal_the_literal_loop(measure, weight, order):
    for seed, (ranges, target) in enumerate(itertools.product(RANGES, (0.0, 0.35, 0.6, 1.0))):
        settings = ClipSettings(target_share=target, measure=measure, weight=weight, order=order, **ranges)
        dtype = torch.float64 if seed % 3 == 2 else torch.float32
        ratio, advantages, mask, behavior = tokens_near_the_grid(40, settings, seed, dtype)
        found = search(ratio, advantages, mask, settings, behavior)
        bounds = kernel_bounds(ratio, advantages, mask, settings, behavior)
        assert (bounds.low.item(), bounds.high.item()) == pytest.approx((found.low, found.high), abs=1e-6)
        assert bounds.share.item() == pytest.approx(found.share, abs=1e-6)


@pytest.mark.parametrize(("measure", "weight", "order"), COMBINATIONS)
def test_table_and_bounds_equal_those_of_the_torch_path(measure, weight, order):
    count = 2 * BLOCK_TOKENS + 77  # three programs, the last one not full
    for seed, target in enumerate((0.3, 0.45, 0.9)):
        settings = ClipSettings(target_share=target, measure=measure, weight=weight, order=order)
        ratio, advantages, mask, behavior = tokens_near_the_grid(count, settings, seed)
        ours = table_of(ratio, advantages, mask, settings, behavior)
        table = signal_table(ratio, advantages, mask, settings, behavior_logprobs=behavior)
        assert_close(ours.cpu(), table, rtol=1e-12, atol=1e-12)
        expected = solve_bounds(ratio, advantages, mask, settings, behavior_logprobs=behavior)
        for filled in (ours, table.to(DEVICE)):
            bounds = walked_by_kernel(filled, settings, torch.float32)
            assert values(bounds) == pytest.approx(values(expected), rel=1e-6)
            assert bounds.stop == expected.stop


def test_what_the_kernel_returns_has_the_torch_path_s_types():
    settings = ClipSettings()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        inputs = (torch.ones(3, dtype=dtype), torch.tensor([1.0, 1.0, -1.0], dtype=dtype), torch.ones(3).bool())
        ours, theirs = kernel_bounds(*inputs, settings), solve_bounds(*inputs, settings)
        for name in ("low", "high", "share", "share_at_start", "share_at_end", "stop"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a.dtype, a.shape, a.item()) == (b.dtype, b.shape, pytest.approx(b.item()))


@pytest.mark.parametrize("order", ["high_first", "low_first"])
def test_every_stop_reason(order):
    cases = {
        StopReason.START: ([1.0, 1.0], [1.0, -1.0], 0.5),
        StopReason.RAISING_HIGH: ([2.0, 1.0], [1.0, -1.0], 0.5),
        StopReason.RAISING_LOW: ([1.0, 0.7], [1.0, -2.0], 0.9),
        StopReason.END: ([1.0, 1.0], [1.0, -1.0], 0.6),
        StopReason.NO_SIGNAL: ([1.0, 2.0], [0.0, 0.0], 0.9),
    }
    for stop, (ratio, advantages, target) in cases.items():
        inputs = torch.tensor(ratio), torch.tensor(advantages), torch.ones(2).bool()
        settings = ClipSettings(target_share=target, order=order)
        bounds = kernel_bounds(*inputs, settings)
        assert bounds.stop == stop
        assert values(bounds) == pytest.approx(values(solve_bounds(*inputs, settings)))


def test_one_candidate_that_fails_is_the_end_not_the_start():
    settings = ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2))
    bounds = kernel_bounds(torch.tensor([3.0, 1.0]), torch.tensor([1.0, -1.0]), torch.ones(2).bool(), settings)
    assert bounds.stop == StopReason.END
    assert (bounds.share, bounds.share_at_start, bounds.share_at_end) == (0.0, 0.0, 0.0)


def test_one_sided_signals_and_no_tokens_at_all():
    ones = torch.ones(3)
    assert kernel_bounds(ones, ones, ones.bool(), ClipSettings()).share == 1.0
    assert kernel_bounds(ones, -ones, ones.bool(), ClipSettings()).share == 0.0
    for empty in (torch.zeros(0), torch.zeros(0, 4)):
        bounds = kernel_bounds(empty, empty, empty.bool(), ClipSettings())
        assert (bounds.stop, bounds.share) == (StopReason.NO_SIGNAL, 1.0)


def test_more_candidates_than_one_block_holds():
    settings = ClipSettings(low=(0.5, 0.9), high=(1.1, 3.0), low_step=0.004, high_step=0.01, target_share=0.52)
    ratio, advantages, mask, _ = tokens_near_the_grid(300, settings, 0)
    for target in (0.1, 0.45, 0.52, 1.0):
        settings = ClipSettings(
            low=(0.5, 0.9), high=(1.1, 3.0), low_step=0.004, high_step=0.01, target_share=target, order="low_first"
        )
        expected = solve_bounds(ratio, advantages, mask, settings)
        assert values(kernel_bounds(ratio, advantages, mask, settings)) == pytest.approx(values(expected))


def test_a_share_exactly_at_the_target_reaches_it_in_float64():
    # 0.4 is no float32: as one it would be larger than the share 2 / 5, and the search would go on.
    settings = ClipSettings(target_share=0.4)
    bounds = kernel_bounds(torch.ones(5), torch.tensor([1.0, 1, -1, -1, -1]), torch.ones(5).bool(), settings)
    assert bounds.stop == StopReason.START


def test_padded_input_and_views_count_like_packed_input():
    settings = ClipSettings()
    ratio, advantages, mask, _ = tokens_near_the_grid(600, settings, 1)
    packed = table_of(ratio, advantages, mask, settings)
    padded = table_of(*(x.view(20, 30) for x in (ratio, advantages, mask)), settings)
    assert_close(padded, packed, rtol=0, atol=0)
    transposed = [x.view(20, 30).t().contiguous().t() for x in (ratio, advantages, mask)]
    assert_close(table_of(*transposed, settings), packed, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["ratio", "advantages", "behavior"])
def test_a_bad_value_poisons_every_entry_and_every_bound(bad, place):
    settings = ClipSettings(weight="rollout_prob")
    ratio, advantages, mask, behavior = tokens_near_the_grid(300, settings, 2)
    advantages[280] = 1.0
    {"ratio": ratio, "advantages": advantages, "behavior": behavior}[place][280] = bad
    mask[280] = False
    assert table_of(ratio, advantages, mask, settings, behavior).isfinite().all()
    mask[280] = True
    table = table_of(ratio, advantages, mask, settings, behavior)
    assert table.isnan().all()
    bounds = walked_by_kernel(table, settings, torch.float32)
    assert all(math.isnan(value) for value in values(bounds)[:5])


def test_an_infinite_table_has_no_plausible_bounds():
    settings = ClipSettings()
    table = signal_table(torch.ones(3), torch.ones(3), torch.ones(3).bool(), settings)
    table[-2] = math.inf
    assert all(math.isnan(value) for value in values(walked_by_kernel(table.to(DEVICE), settings, torch.float32))[:5])


def test_log_probs_give_the_table_of_their_ratios_without_tokens_past_the_limit():
    settings = ClipSettings(weight="rollout_prob", measure="surrogate")
    generator = torch.Generator().manual_seed(0)
    behavior = -3 * torch.rand(500, generator=generator)
    logprobs = behavior + torch.randn(500, generator=generator).mul(0.4)
    logprobs[3], logprobs[4], behavior[5] = -60.0, behavior[4] - MAX_LOG_RATIO, -60.0
    advantages, mask = torch.randn(500, generator=generator), torch.rand(500, generator=generator) < 0.9
    mask[3:6] = True
    tokens = Tokens(logprobs, behavior, advantages, mask)
    expected = signal_table(tokens.ratio, advantages, mask & tokens.within, settings, behavior_logprobs=behavior)
    table = table_of(logprobs, advantages, mask, settings, behavior, MAX_LOG_RATIO)
    assert_close(table.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert table[-1] == expected[-1] < mask.sum()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bad_log_prob_is_no_token_past_the_limit(bad):
    logprobs = torch.tensor([-1.0, bad, -1.0])
    table = table_of(logprobs, torch.ones(3), torch.ones(3).bool(), ClipSettings(), -torch.ones(3), MAX_LOG_RATIO)
    assert table.isnan().all()


@pytest.mark.parametrize("weight", ["none", "rollout_prob"])
@pytest.mark.parametrize("limit", [None, MAX_LOG_RATIO])
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_masked_tokens_may_hold_anything(weight, limit, dtype):
    settings = ClipSettings(weight=weight, measure="surrogate")
    ratio, advantages, mask, behavior = tokens_near_the_grid(300, settings, 6, dtype)
    first = ratio if limit is None else behavior + ratio.log().clamp(min=-30)
    clean = table_of(first, advantages, mask, settings, behavior, limit)
    for values, bad in zip((first, advantages, behavior), (math.inf, math.nan, math.inf), strict=True):
        values[~mask] = bad
    assert clean.isfinite().all()
    assert torch.equal(table_of(first, advantages, mask, settings, behavior, limit), clean)


def test_programs_stride_over_more_tokens_than_they_cover_at_once(monkeypatch):
    settings = ClipSettings()
    ratio, advantages, mask, _ = tokens_near_the_grid(3 * BLOCK_TOKENS + 1, settings, 3)
    expected = signal_table(ratio, advantages, mask, settings)
    monkeypatch.setattr("bapo.core.kernels.bounds.MAX_PROGRAMS", 2)
    assert_close(table_of(ratio, advantages, mask, settings).cpu(), expected, rtol=1e-12, atol=1e-12)


def test_more_candidates_than_one_tile_of_the_second_kernel_holds():
    for order, target in itertools.product(("high_first", "low_first"), (0.3, 0.45, 0.5, 0.9)):
        settings = ClipSettings(target_share=target, order=order, low_step=0.002, high_step=0.02)
        ratio, advantages, mask, _ = tokens_near_the_grid(400, settings, 4)
        table = signal_table(ratio, advantages, mask, settings)
        bounds = walked_by_kernel(table.to(DEVICE), settings, torch.float32)
        assert values(bounds) == pytest.approx(values(bounds_from_table(table, settings)))


def test_the_same_tokens_give_the_same_bits():
    settings = ClipSettings()
    ratio, advantages, mask, _ = tokens_near_the_grid(700, settings, 5)
    first, second = (table_of(ratio, advantages, mask, settings) for _ in range(2))
    assert torch.equal(first, second)
