"""A controller's bounds are those of the tokens in its window."""

import pytest
import torch
from torch.testing import assert_close

from bapo import ClipSettings, bounds_from_table, update_table
from bapo.core.controller import BoundController

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


@pytest.mark.parametrize("window", [0, -1, 1.5, True])
def test_a_window_is_a_number_of_calls(window):
    with pytest.raises(ValueError, match="window="):
        BoundController(SETTINGS, window)
