"""Both views rendered to text: the plain lines parsed, the live screen read back, hostile text and odd numbers."""

import io
import re
from math import inf, nan

import pytest
from rich.console import Console

from bapo.rollout.engine import Sampled
from bapo.screen.terminal import duration, eta
from bapo.screen.view import MEANINGS, SHOWN, LiveView, PlainView, make_view, sparkline, summary_table
from bapo.screen.watch import ActorLine

METRICS = {
    "reward": 0.4321, "entropy": 0.49, "share": 0.41, "clip_low": 0.8, "clip_high": 1.25,
    "clip_fraction_positive": 0.05, "clip_fraction_negative": 0.011, "staleness_mean": 1.5, "staleness_max": 4,
    "length": 47.25, "grad_norm": 0.7, "eval/avg": 0.388, "not/shown": 12345.0,
}  # fmt: skip
ENDED = [key for key in SHOWN if key.startswith("endings/")]
TIMING = {"tokens_per_second": 5123.4, "seconds": 2.0, "sample_seconds": 0.777}
VALUES = [
    "0.432", "0.490", "0.410", "0.80", "1.25", "0.050", "0.011", "1.5", "4", "47.2", "0.700", "0.388", "5123", "2.00",
]  # fmt: skip


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def plain_view(total=60, clock=None):
    stream = io.StringIO()
    return make_view(total, title="bapo · countdown", stream=stream, clock=clock or Clock()), stream


def screen(tell, *, width=80, height=24, total=60, samples=True):
    """The live view's screen, line by line, after it was told things."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(total, title="bapo [bold]countdown[/]", console=console, clock=Clock(), samples=samples)
    tell(view)
    with console.capture() as capture:
        console.print(view.frame())
    lines = capture.get().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


# Plain


def test_plain_line_shows_every_known_value_once_and_nothing_else():
    view, stream = plain_view()
    with view:
        view.step(12, METRICS, TIMING)
    title, explained, line = stream.getvalue().splitlines()
    assert title == "bapo · countdown"
    assert explained == (
        "  share: positive part of the signal; low, high: bounds of the clip; clipped+, clipped-: clipped share of "
        "positive and negative tokens; stale, stalest: mean and largest age of tokens, in updates"
    )
    assert line.startswith("step 12/60  reward 0.432  ")
    assert line.endswith("  eta 1:36")  # 48 steps of 2 seconds
    shown = dict(re.findall(r"(\S+) (\S+)(?:  |$)", line))
    assert shown == {"step": "12/60", "eta": "1:36"} | dict(
        zip((SHOWN[key][0] for key in [*METRICS, *TIMING] if key in SHOWN), VALUES, strict=True)
    )


def test_the_bound_of_used_tokens_is_shown_where_the_brake_has_raised_it():
    for used_low, shown in ((0.8, False), (0.87, True)):
        lines = screen(lambda view, used_low=used_low: view.step(3, METRICS | {"used_low": used_low}, TIMING))
        assert bool(re.search(r"used +0\.87 ", "\n".join(lines))) == shown


def test_the_share_of_responses_that_were_cut_off_is_shown():
    view, stream = plain_view()
    with view:
        view.step(1, {"length": 30.1, "truncated": 0.875, "grad_norm": 0.7}, {})
    meanings, line = stream.getvalue().splitlines()[1:]
    assert meanings == "  cut: share of responses cut off at rollout.max_tokens"
    assert line == "step  1/60  length 30.1   cut 0.875  grad 0.700"
    lines = screen(lambda view: view.step(3, METRICS | {"truncated": 0.875}, TIMING))
    assert re.search(r"cut +0\.875 ", "\n".join(lines))


def test_each_of_several_rewards_is_shown_by_name_after_their_sum():
    named = {"reward/math": 1.0, "reward/mine.brief": -0.25, "reward/\x1b[31m": 1.0}
    view, stream = plain_view()
    with view:
        view.step(1, {"reward": 0.75, "grad_norm": 0.7} | named, {})
    assert stream.getvalue().splitlines()[1] == "step  1/60  reward 0.750  math 1.000  mine.brief -0.250  grad 0.700"
    shown = "\n".join(screen(lambda view: view.step(3, METRICS | named, TIMING)))
    assert re.search(r"math +1\.000 ", shown)
    assert re.search(r"mine\.brief +-0\.250 ", shown)
    assert "[31m" not in shown


def test_plain_lines_are_aligned_and_keep_the_place_of_what_is_missing():
    clock = Clock()
    view, stream = plain_view(total=100, clock=clock)
    for step, metrics in ((9, {"reward": 0.5, "eval/avg": 0.25, "entropy": 1.0}), (10, {"reward": 1, "entropy": 0.1})):
        clock.time += 5
        view.step(step, metrics, {})
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step   9/100  reward 0.500  eval 0.250  entropy 1.000",
        "step  10/100  reward 1.000              entropy 0.100",
    ]


def test_plain_view_explains_its_columns_once_and_only_those_it_has():
    clock = Clock()
    view, stream = plain_view(clock=clock)
    for step in (1, 2, 3):
        clock.time += 5
        view.step(step, {"reward": 0.5, "clip_low": 0.8, "staleness_max": 3}, {})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "  low: bounds of the clip; stalest: mean and largest age of tokens, in updates"
    assert [line[:4] for line in lines[1:]] == ["step"] * 3
    assert {key for keys in MEANINGS for key in keys} <= SHOWN.keys()


def test_plain_lines_are_throttled_except_first_last_and_notes():
    clock = Clock()
    view, stream = plain_view(total=10, clock=clock)
    with view:
        for step in range(1, 11):
            view.step(step, {"reward": 0.1}, {})
            if step == 5:
                view.note("checkpoint saved")
            clock.time += 0.5
    lines = [line.partition("  reward")[0] for line in stream.getvalue().splitlines()[1:]]
    assert lines == ["step  1/10", "step  5/10", "checkpoint saved", "step  9/10", "step 10/10"]


def test_plain_view_prints_the_step_it_held_back_when_training_breaks_off():
    view, stream = plain_view(total=10)
    with pytest.raises(KeyboardInterrupt), view:  # noqa: PT012
        view.step(1, {"reward": 0.1}, {})
        view.step(2, {"reward": 0.2}, {})
        raise KeyboardInterrupt
    assert stream.getvalue().splitlines()[-1] == "step  2/10  reward 0.200"


def test_plain_samples_take_one_line_and_come_seldom():
    clock = Clock()
    view, stream = plain_view(clock=clock)
    for at in (0, 19, 20):
        clock.time = at
        view.sample("a\nb", f"\x1b[2J[red]{at}\r\n" + "x" * 1000, 1.0)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("  sample  reward 1.00  a\\nb  ->  ·[2J[red]0\\nxxx")
    assert "[red]20" in second
    assert len(first) < 400


def test_plain_view_tells_of_long_work_only():
    clock = Clock()
    view, stream = plain_view(clock=clock)
    for seconds in (10, 65):
        with view.doing("evaluating") as watch:
            for second in range(seconds):
                clock.time += 1
                watch(Sampled(second, 2048, 1_240 * (second + 1)))
    assert stream.getvalue().splitlines() == [
        "evaluating: 29/2048 responses, 37,200 tokens, 1,240 tokens/s",
        "evaluating: 59/2048 responses, 74,400 tokens, 1,240 tokens/s",
    ]


def test_plain_view_replaces_letters_the_stream_cannot_spell():
    raw = io.BytesIO()
    view = make_view(2, title="bapo · π", stream=io.TextIOWrapper(raw, encoding="ascii"))
    with view:
        view.note("über\ud800")
        view.sample("∑", "≈", 0.0)
    assert raw.getvalue().decode("ascii").splitlines()[:2] == ["bapo ? ?", "?ber?"]


# Numbers


def test_numbers_that_are_not_finite_or_far_off_are_shown_as_they_are():
    view, stream = plain_view()
    view.step(
        1, {"reward": nan, "entropy": -inf, "grad_norm": 0.00012, "length": 2.5e7, "share": 0.0}, {"seconds": inf}
    )
    line = stream.getvalue()
    for cell in ("reward nan", "entropy -inf", "grad 0.00012", "length 2.5e+07", "share 0.000", "seconds inf"):
        assert cell in line
    assert "eta" not in line


def test_eta_by_hand():
    assert eta(46, 2, 4.0) == "eta 1:32"
    assert eta(0, 1, 5.0) == "eta 0:00"
    assert eta(-3, 1, 5.0) == "eta 0:00"
    assert eta(1000, 1, 3.725) == "eta 1:02:05"
    assert eta(100_000, 1, 3.6) == "eta 4 days"
    assert eta(5, 0, 3.0) == ""
    assert [duration(seconds) for seconds in (0, 59.6, 3723, -5, inf)] == ["0:00", "1:00", "1:02:03", "0:00", "?"]
    hours = (47.9997, 48, 635.5, 24 * 1500)
    assert [duration(3600 * count) for count in hours] == ["47:59:59", "2 days", "26 days", "1,500 days"]


def test_eta_goes_by_recent_steps_only():
    view, stream = plain_view(total=41)
    for step in range(1, 42):
        view.step(step, {}, {"seconds": 100.0 if step <= 20 else 2.0})
        if step == 40:
            assert view.remaining() == "eta 0:02"
    assert stream.getvalue().splitlines()[0].endswith("eta 1:06:40")  # 40 steps of 100 seconds


def test_sparkline_by_hand():
    assert sparkline([], 5) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7, 2, 4], 3) == "▁█▄"
    assert sparkline([1.4] * 7, 3) == "▄▄▄"
    assert sparkline([0.0, nan, 1.0], 3) == "▁×█"
    assert sparkline([inf, nan], 8) == "××"
    assert sparkline([nan, 1.0, 2.0, 2.0], 2) == "▁█"
    assert len(sparkline(list(range(1000)), 17)) == 17


# Live


def test_a_supervised_run_shows_its_loss_and_no_empty_place_for_responses():
    def tell(view):
        view.step(3, {"imitation/loss": 1.234, "grad_norm": 0.7}, TIMING)

    lines = screen(tell, samples=False)
    assert re.search(r"loss +1\.234 ", "\n".join(lines))
    assert not any("sample" in line for line in lines)
    assert any("sample" in line for line in screen(tell))


def test_live_screen_shows_every_value_and_fits_24_lines_of_80():
    def tell(view):
        for step in range(1, 13):
            moved = {"reward": METRICS["reward"] - 0.01 * (12 - step), "used_low": 0.8 + step / 100}
            moved |= {"truncated": 0.5, "reward_failures": 2, "turns": 5.6} | dict.fromkeys(ENDED, 3)
            view.step(step, METRICS | moved, TIMING)
        view.sample("3,7,2=13:", "3+7+2=12;7+3*2=13." * 40, 1.0)

    lines = screen(tell)
    text = "\n".join(lines)
    assert len(lines) <= 23
    for label in (label for key, (label, _) in SHOWN.items() if not key.startswith("imitation/")):
        assert re.search(rf"{re.escape(label)} +[\d.]+ [{'▁▂▃▄▅▆▇█'}]", text), label
    for value in [
        *VALUES,
        "step 12/60",
        "eta 1:36",
        "reward 1.00",
        "3,7,2=13:",
        "▁▂▂▃▄▄▅▅▆▇▇█",
        "bapo [bold]countdown[/]",
    ]:
        assert value in text
    assert "12345" not in text
    assert "0.92" in text
    taller = re.sub(r"[│\s]+", " ", "\n".join(screen(tell, height=32)))  # with room for what the labels mean
    assert "share: positive part of the signal; low, high: bounds of the clip; used:" in taller
    assert "age of tokens, in updates" in taller
    assert "13. " in lines[-2]  # the end of the response, after the gap
    assert any("…" in line for line in lines)


def test_live_screen_survives_any_text():
    def tell(view):
        view.sample("[link=x]p[/nope]", "[red]a[/red]\t[/]\x1b[2J\x07\r\nsecond 漢字\ud800", nan)

    text = "\n".join(screen(tell))
    assert "[link=x]p[/nope]" in text
    assert "[red]a[/red]" in text
    assert "·[2J·" in text
    assert "second 漢字·" in text
    assert "reward nan" in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("width", [1, 8, 20, 39, 40, 75, 76, 200])
@pytest.mark.parametrize("height", [1, 5, 18, 24, 60])
def test_live_screen_takes_any_terminal(width, height):
    def tell(view):
        view.step(1, METRICS, TIMING)
        view.sample("3,7,2=13:", "word " * 300, 0.0)

    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    clock = Clock()
    with LiveView(60, title="title", console=console, clock=clock) as view, view.doing("sampling") as watch:
        tell(view)
        watch(Sampled(412, 2048, 96_400))
        clock.time += 3
        view.live.refresh()
    if width >= 40:
        lines = screen(tell, width=width, height=height)
        assert "reward" in "".join(lines)
        assert len(lines) < max(height, 18)


def test_live_screen_has_a_line_for_long_work_that_moves_nothing():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    clock = Clock()
    view = LiveView(60, title="run", console=console, clock=clock)
    view.step(1, METRICS, TIMING)

    def lines():
        with console.capture() as capture:
            console.print(view.frame())
        return [re.sub(r"\d:\d\d:\d\d", "", line) for line in capture.get().splitlines()]  # without the time elapsed

    before = lines()
    with view.doing("sampling") as watch:
        watch(Sampled(0, 2048, 0))
        assert lines() == before
        clock.time += 77.75
        watch(Sampled(412, 2048, 96_400))
        during = lines()
    assert lines() == before
    ((old, new),) = [(a, b) for a, b in zip(before, during, strict=True) if a != b]  # one line differs: the border
    assert set(old) == set("╰─╯")
    assert "─ sampling: 412/2048 responses, 96,400 tokens, 1,240 tokens/s ─" in new


ACTORS = [
    ActorLine("rollout 0", "sampling", 12, 1234.5, 64, 0),
    ActorLine("rollout 1", "starting", -1, 0.0, 0, 3),
    ActorLine("learner 0-1", "take update 14", 13, 980.0, 0, 1),
]


def test_live_screen_shows_every_actor():
    def tell(view):
        view.step(1, METRICS, TIMING)
        view.actors(ACTORS)

    lines = screen(tell)
    assert len(lines) <= 23
    found = {line.strip("│ ").split("  ")[0]: re.sub(" {2,}", "|", line.strip("│ ")) for line in lines}
    assert found["rollout 0"] == "rollout 0|sampling|12|1,234|64"
    assert found["rollout 1"] == "rollout 1|starting|-|3"
    assert found["learner 0-1"] == "learner 0-1|take update 14|13|980|1"


def test_live_screen_counts_the_actors_it_has_no_room_for():
    def tell(view):
        view.step(1, METRICS, TIMING)
        view.actors([ActorLine(f"rollout {number}", "sampling", 3, 10.0, 1, 0) for number in range(64)])

    text = "\n".join(lines := screen(tell))
    assert len(lines) <= 24
    shown = len(re.findall(r"rollout \d+", text))
    assert 0 < shown < 64
    assert f"and {64 - shown} more" in text


def test_plain_view_reports_actors_now_and_then():
    clock = Clock()
    view, stream = plain_view(clock=clock)
    with view:
        view.actors(ACTORS)
        assert "rollout" not in stream.getvalue()
        clock.time += 31
        view.actors(ACTORS)
        view.actors(ACTORS)
    assert stream.getvalue().splitlines()[1:] == [
        "  rollout 0: sampling, version 12, tok/s 1,234, responses 64",
        "  rollout 1: starting, restarts 3",
        "  learner 0-1: take update 14, version 13, tok/s 980, restarts 1",
    ]


def test_a_resumed_run_shows_its_step_before_it_goes_on():
    assert "step 40/60" in "\n".join(screen(lambda view: view.begin_after(40)))


def test_the_legend_gives_way_to_actors_and_samples():
    def tell(view):
        view.step(1, METRICS, TIMING)
        view.actors(ACTORS)

    assert "bounds of the clip" not in "\n".join(screen(tell))
    assert "bounds of the clip" in "\n".join(screen(tell, height=30))


def test_live_screen_before_the_first_step():
    text = "\n".join(screen(lambda view: None))
    assert "step 0/60" in text
    assert "no response yet" in text
    assert "eta" not in text


def test_live_view_marks_what_is_not_finite():
    text = "\n".join(screen(lambda view: [view.step(s, {"reward": v}, {}) for s, v in ((1, 0.5), (2, nan))]))
    assert re.search("reward +nan ▄×", text)


def test_live_view_leaves_its_last_screen_and_its_notes_behind(monkeypatch):
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with make_view(3, title="run", stream=stream) as view:
        assert isinstance(view, LiveView)
        for step in (1, 2, 3):
            view.step(step, {"reward": step / 4}, {"seconds": 1.0})
        view.note("avg@8 [0.41, 0.52] [/oops]")
        view.sample("question", "answer", 1.0)
    output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "avg@8 [0.41, 0.52] [/oops]" in output
    last = output[output.rindex("╭─ run") :]
    assert re.search(r"step 3/3 .*eta 0:00", last)
    assert re.search(r"reward +0\.750 ▁", last)
    assert "answer" in last
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # the cursor is back


# Which view


def test_make_view_is_live_only_on_a_terminal_that_can_show_it(monkeypatch):
    def made(stream, plain=None):
        return type(make_view(1, title="", stream=stream, plain=plain))

    monkeypatch.setenv("TERM", "xterm")
    assert made(Terminal()) is LiveView
    assert made(Terminal(), plain=True) is PlainView
    assert made(io.StringIO()) is PlainView
    assert made(io.StringIO(), plain=False) is LiveView
    latin = Terminal()
    latin.encoding = "latin-1"
    assert made(latin) is PlainView
    monkeypatch.setenv("TERM", "dumb")
    assert made(Terminal()) is PlainView
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert made(io.StringIO()) is PlainView


# Summary


def test_summary_table(capsys):
    summary_table("countdown", [("avg@8", "0.38", "0.712"), ("entropy", "0.5", "0.4")])
    assert capsys.readouterr().out.splitlines() == [
        "countdown",
        "           before  after",
        "  avg@8      0.38  0.712",
        "  entropy     0.5    0.4",
    ]
