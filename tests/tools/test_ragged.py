"""The paper engine for ragged lengths: its clock by hand, and what knowing lengths is worth."""

import pytest
from ragged import LONGEST, PREFILL, SLOTS, ByMates, drawn, rate


def test_the_clock_adds_prefill_and_steps():
    assert rate("135m", [8]) == pytest.approx(8 / (PREFILL + 63 * 0.001 + 8 * 1.08))
    steps = LONGEST * 1.66
    prompts = SLOTS // 8
    assert rate("135m", [LONGEST] * SLOTS) == pytest.approx(SLOTS * LONGEST / (PREFILL + prompts * 63 * 0.001 + steps))


def test_known_lengths_help_and_guesses_from_unlike_mates_do_not():
    load = drawn(1.0, 0)
    submitted = rate("135m", load)
    assert rate("135m", sorted(load, reverse=True)) > 1.2 * submitted
    assert rate("135m", load, ByMates) == pytest.approx(submitted, rel=0.05)
    alike = drawn(0.0, 0)
    assert rate("135m", alike, ByMates) > 1.1 * rate("135m", alike)
