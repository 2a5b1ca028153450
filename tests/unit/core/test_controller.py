"""A controller's bounds are those of the tokens in its window."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from bapo import ClipSettings, bounds_from_table, policy_loss, update_table
from bapo.core.bounds import StopReason
from bapo.core.controller import BoundController, as_numbers, averageable
from tests.processes import in_ranks

SETTINGS = ClipSettings(target_share=0.5)


def table(seed):
    generator = torch.Generator().manual_seed(seed)
    old = -2.5 - 2 * torch.rand(40, generator=generator)
    now = old + 0.5 * torch.randn(40, generator=generator)
    return update_table(now, old, torch.randn(40, generator=generator), torch.ones(40, dtype=torch.bool), SETTINGS)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_bounds_are_those_of_the_calls_in_the_window(window):
    controller = BoundController(SETTINGS, window)
    for seed in range(5):
        bounds = controller.bounds(table(seed))
        seen = range(max(0, seed + 1 - window), seed + 1)
        expected = bounds_from_table(sum(table(past) for past in seen), SETTINGS)
        assert_close(bounds.share, expected.share)
        assert bounds.high == expected.high
        assert bounds.low == expected.low


def test_a_bad_table_spoils_its_own_call_only():
    controller = BoundController(SETTINGS, 3)
    controller.bounds(table(0))
    assert controller.bounds(table(1) * torch.nan).share.isnan()
    assert_close(controller.bounds(table(2)).share, bounds_from_table(table(0) + table(2), SETTINGS).share)


def test_a_bad_table_takes_up_its_place_in_the_window():
    controller = BoundController(SETTINGS, 3)
    for seed in range(3):
        controller.bounds(table(seed))
    controller.bounds(table(3) * torch.inf)
    for seed, seen in ((4, (2, 4)), (5, (4, 5)), (6, (4, 5, 6))):
        expected = bounds_from_table(sum(table(past) for past in seen), SETTINGS)
        assert_close(controller.bounds(table(seed)).share, expected.share)


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_a_window_is_a_number_of_calls(window):
    with pytest.raises(ValueError, match="window="):
        BoundController(SETTINGS, window)


def batch(seed=5, tokens=40):
    generator = torch.Generator().manual_seed(seed)
    old = -2.5 - 2 * torch.rand(tokens, generator=generator)
    now = (old + 0.5 * torch.randn(tokens, generator=generator)).requires_grad_()
    return now, old, torch.randn(tokens, generator=generator), torch.rand(tokens, generator=generator) < 0.8


def test_its_loss_is_policy_loss_at_the_bounds_of_the_window():
    controller = BoundController(SETTINGS, 2)
    controller.policy_loss(*batch(1), denominator=1.0)
    out = controller.policy_loss(*batch(2), denominator=10.0, dual_clip=3.0)
    bounds = bounds_from_table(sum(update_table(*batch(seed), SETTINGS) for seed in (1, 2)), SETTINGS)
    expected = policy_loss(*batch(2), bounds=bounds, denominator=10.0, dual_clip=3.0)
    assert_close(out.loss, expected.loss)
    assert out.bounds.high == bounds.high


def test_metrics_can_be_averaged_over_calls():
    out = BoundController(SETTINGS).policy_loss(*batch(), denominator=1.0)
    numbers = as_numbers(out.metrics)
    assert numbers["bapo/clip_high"] == out.bounds.high.item()
    assert "bapo/stop" not in numbers
    assert [name for name, value in numbers.items() if "/stop/" in name and value] == [
        f"bapo/stop/{StopReason(int(out.bounds.stop)).name.lower()}"
    ]
    assert averageable({"share": torch.tensor(0.5)}) == {"bapo/share": torch.tensor(0.5)}


def _rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    controller = BoundController(SETTINGS, 2, all_ranks=True)
    bounds = [controller.bounds_of(*batch(10 * call + rank)) for call in range(3)]
    alone = BoundController(SETTINGS).bounds_of(*batch(20 + rank))
    bad = list(batch(0))
    if rank == 0:
        bad[2] = bad[2] * torch.nan
    try:
        error = f"share is nan: {bool(controller.bounds_of(*bad).share.isnan())}"
    except ValueError as raised:
        error = str(raised)
    torch.save((bounds[-1].low, bounds[-1].high, bounds[-1].share, alone.share, error), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_all_ranks_share_their_tables_and_their_errors(tmp_path):
    in_ranks(_rank, 2, str(tmp_path))
    (low, high, share, alone, error), other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    seen = [batch(10 * call + rank) for call in (1, 2) for rank in (0, 1)]
    expected = bounds_from_table(sum(update_table(*part, SETTINGS) for part in seen), SETTINGS)
    assert (low, high, share) == other[:3]
    assert (low, high) == (expected.low, expected.high)
    assert_close(share, expected.share)
    assert alone != share
    assert "advantages" in error
    assert other[4] == "share is nan: True"  # the peer's loss will be NaN too, and it did not wait for the other rank


def test_bounds_are_named_once_for_every_log():
    out = BoundController(SETTINGS).policy_loss(*batch(), denominator=1.0)
    searched = out.bounds.metrics()
    assert [*searched] == ["clip_low", "clip_high", "share", "share_at_start", "share_at_end", "stop"]
    assert searched.items() <= out.metrics.items()
    assert searched["clip_low"] is out.bounds.low
    assert [*out.bounds.metrics(ends=False)] == ["clip_low", "clip_high", "share", "stop"]
    given = policy_loss(*batch(), objective="grpo").bounds
    assert [*given.metrics()] == ["clip_low", "clip_high", "share"]
    weighed = bounds_from_table(table(0), ClipSettings(target_share=0.9, remainder="weigh"))
    assert weighed.metrics()["negative_weight"] is weighed.negative_weight
