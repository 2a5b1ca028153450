"""The live view on a terminal whose size changes and whose user presses keys: one picture, and no fragments."""

import io
import os
import pty
import sys
import termios
import threading

import pytest
from rich.console import Console, ConsoleDimensions

from bapo.screen.steady import unechoed
from bapo.screen.view import LiveView, PlainView
from tests.terminal import Terminal

METRICS = {"reward": 0.5, "entropy": 0.4, "length": 40.0, "share": 0.4, "clip_low": 0.8, "clip_high": 1.2}


class Wire(io.StringIO):
    """What is written goes to the terminal at once."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def write(self, text):
        self.terminal.feed(text)
        return len(text)


def live_view(width=100, height=30):
    terminal = Terminal(width, height)
    console = Console(file=Wire(terminal), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(60, title="a run", console=console, clock=lambda: 0.0)
    view.live.auto_refresh = False
    return view, terminal


def resize(view, terminal, width, height):
    terminal.resize(width, height)
    view.console.size = ConsoleDimensions(width, height)
    view.live.refresh()


@pytest.mark.parametrize("sizes", [[(70, 30)], [(120, 40)], [(60, 24), (100, 30), (45, 20)], [(100, 12)], [(100, 45)]])
def test_a_change_of_size_leaves_one_picture_and_the_latest_notes(sizes):
    view, terminal = live_view()
    with view:
        for number in range(1, 9):
            view.note(f"note {number}")
        view.step(1, METRICS, {"seconds": 1.0})
        view.sample("3,4=7:", "3+4=7.", 1.0)
        view.live.refresh()
        for width, height in sizes:
            resize(view, terminal, width, height)
            view.live.refresh()
        view.note("after the change")
        shown = terminal.screen
    assert sum("a run" in line for line in shown) == 1
    assert sum("sample" in line for line in shown) == 1
    assert sum(line.startswith("╭") for line in shown) == 2
    assert sum(line.startswith("╰") for line in shown) == 2
    notes = [line for line in shown if line.startswith("note") or line.startswith("after")]
    assert notes[-1:] == ["after the change"]
    assert notes[:-1] == [f"note {number}" for number in range(1, 9)][9 - len(notes) :]


def test_what_is_above_the_screen_stays_in_the_history():
    view, terminal = live_view(height=20)
    with view:
        for number in range(30):
            view.note(f"note {number}")
        view.live.refresh()
        resize(view, terminal, 80, 20)
    for number in range(20):
        assert any(row == f"note {number}" for row, _ in terminal.rows)


@pytest.fixture
def keyboard(monkeypatch):
    """A pseudo terminal as standard input, in the foreground of this process."""
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "r")
    monkeypatch.setattr(sys, "stdin", stream)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    yield theirs
    stream.close()
    os.close(ours)


def echoes(keyboard):
    return bool(termios.tcgetattr(keyboard)[3] & termios.ECHO)


def test_keys_are_not_echoed_into_the_picture(keyboard):
    view, _ = live_view()
    assert echoes(keyboard)
    with pytest.raises(KeyboardInterrupt), view:  # noqa: PT012
        assert not echoes(keyboard)
        raise KeyboardInterrupt
    assert echoes(keyboard)


def test_a_job_in_the_background_leaves_the_terminal_alone(keyboard, monkeypatch):
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    with unechoed():
        assert echoes(keyboard)


def test_a_line_from_a_signal_handler_waits_for_the_line_that_it_interrupted():
    view, terminal = live_view()
    with view:
        with view.console._lock:  # somebody is writing
            view.interrupt("stopping after this step")
            assert not any("stopping" in line for line in terminal.screen)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(5)
        assert sum("stopping after this step" in line for line in terminal.screen) == 1


def test_curves_continue_after_a_resume():
    steps = [(step, {"reward": step / 10}, {"seconds": 2.0}) for step in range(1, 9)]
    view, _ = live_view()
    view.recall(steps)
    view.step(9, {"reward": 0.9}, {"seconds": 2.0})
    view.frame()
    assert view.history["reward"] == [step / 10 for step in range(1, 10)]
    assert (view.current, view.progress.tasks[0].completed, view.remaining()) == (9, 9, "eta 1:42")
    stream = io.StringIO()
    plain = PlainView(60, title="a run", stream=stream, clock=lambda: 0.0)
    plain.recall(steps)
    assert stream.getvalue() == ""
    assert plain.history["reward"][-1] == 0.8
