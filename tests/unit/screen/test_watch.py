"""How often a watch is called, and when a line is worth reading, by hand under a fake clock."""

import pytest

from bapo.rollout.engine import Sampled
from bapo.screen.watch import Learned, OnScreen, in_lines


class Clock:
    def __init__(self):
        self.time = 100.0

    def __call__(self):
        return self.time


def test_the_line_by_hand():
    assert (
        Sampled(412, 2048, 96_400).line("sampling", 77.75)
        == "sampling: 412/2048 responses, 96,400 tokens, 1,240 tokens/s"
    )
    assert Sampled(0, 4, 0).line("evaluating", 0.0) == "evaluating: 0/4 responses, 0 tokens, 0 tokens/s"
    line = "learning: 48/128 groups, 3 updates, 96,400 tokens, 1,240 tokens/s"
    assert Learned(3, 48, 128, 96_400).line("learning", 77.75) == line
    assert Learned(1, 2, 2, 8).line("learning", 0.0) == "learning: 2/2 groups, 1 update, 8 tokens, 0 tokens/s"


def test_a_log_gets_no_line_for_what_is_short_and_few_for_what_is_long():
    clock, lines = Clock(), []
    for seconds in (29, 29, 95):
        with in_lines("sampling", lines.append, clock) as watch:
            for second in range(seconds):
                watch(Sampled(second, 95, 10 * second))
                clock.time += 1
    assert [line.split(",")[0] for line in lines] == [f"sampling: {at}/95 responses" for at in (30, 60, 90)]
    assert all(line.endswith(" 10 tokens/s") for line in lines)


def test_a_screen_gets_a_line_after_two_seconds_and_loses_it_at_the_end():
    clock = Clock()
    screen = OnScreen(clock)
    assert screen.line == ""
    with screen.doing("sampling") as watch:
        clock.time += 5
        assert screen.line == ""  # nobody has told anything yet
    with pytest.raises(KeyboardInterrupt), screen.doing("sampling") as watch:  # noqa: PT012
        watch(Sampled(0, 8, 0))
        clock.time += 1.9
        assert screen.line == ""
        clock.time += 0.1
        assert screen.line == "sampling: 0/8 responses, 0 tokens, 0 tokens/s"  # the screen asks by itself
        watch(Sampled(2, 8, 50))
        clock.time += 60
        assert screen.line == "sampling: 2/8 responses, 50 tokens, 25 tokens/s"
        raise KeyboardInterrupt
    assert screen.line == ""
