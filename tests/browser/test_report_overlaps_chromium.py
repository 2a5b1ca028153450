"""Lines of the report that lie on each other, in a real browser: every colour is seen, and a note names them."""

import pytest

from tests.browser.test_report_chromium import ALLOWED, embedded, plot, redrawn, unfolded

WIDTHS = "plot.data.filter(trace => trace.showlegend).map(trace => [trace.name, trace.line.width])"
GROUPS = "([lines, log]) => overlaps.groups(lines.map(([x, y]) => ({type: 'scatter', mode: 'lines', x, y})), log)"


@pytest.fixture(scope="module")
def shown(lasting, report):
    page = lasting.open(report, ALLOWED)
    unfolded(page)
    return page


@pytest.fixture
def page(shown, watched):
    """The report. Tests share it, and leave it as they found it."""
    return shown


def note(page, name):
    """What the reader sees below a plot."""
    below = page.locator(f".panel:has(#plot-{name}) .overlaps")
    return below.text_content() if below.is_visible() else ""


def panel(page, key):
    return next(p["id"] for f in embedded(page)["figures"] for p in f["panels"] if p.get("key") == key)


def test_lines_on_each_other_are_named_and_show_as_stripes(page):
    """In avg@2, bapo and grpo fall from .375 to .25 in six updates, and bapo goes on; two others stay at .375."""
    avg, entropy = panel(page, "eval/avg"), panel(page, "eval/entropy")
    assert note(page, avg) == (
        "Lines on each other as far as they go: bapo · reuse-2, grpo · reuse-2 and bapo · reuse-4. "
        "Lines on each other as far as they go: clip_higher · reuse-4 and push-once · reuse-4."
    )
    wide = {"bapo · reuse-2": 6.2, "clip_higher · reuse-4": 6.2}  # a line of 2.2 covers all but two pixels at each side
    assert {name: width for name, width in plot(page, avg, WIDTHS) if width != 2.2} == pytest.approx(wide)
    drawn_widths = "[...plot.querySelectorAll('path.js-line')].map(path => parseFloat(path.style.strokeWidth))"
    assert sorted(plot(page, avg, drawn_widths))[-2:] == pytest.approx([6.2, 6.2])
    assert note(page, entropy) == ""
    assert {width for _, width in plot(page, entropy, WIDTHS)} == {2.2}


def test_only_lines_in_sight_are_named(page):
    avg = panel(page, "eval/avg")
    before = note(page, avg)
    redrawn(page, lambda: page.locator(".chip", has_text="grpo").click())
    assert note(page, avg).startswith("Lines on each other as far as they go: bapo · reuse-2 and bapo · reuse-4. ")
    redrawn(page, lambda: page.locator(".chip", has_text="reuse-4").click())
    assert note(page, avg) == ""
    assert {width for _, width in plot(page, avg, WIDTHS)} == {2.2}
    for name in ("grpo", "reuse-4"):
        redrawn(page, lambda name=name: page.locator(".chip", has_text=name).click())
    assert note(page, avg) == before


@pytest.mark.parametrize(
    ("lines", "log", "groups"),
    [
        ([[[0, 2, 4], [0, 1, 0]], [[0, 2, 4], [0, 1, 0]], [[0, 2, 4], [0, 1, 0.5]]], False, [[0, 1]]),
        ([[[0, 2], [0, 1]], [[0, 1, 2], [0, 0.5, 1]]], False, [[0, 1]]),  # the same line, logged more often
        ([[[0, 2], [0, 1]], [[0, 1, 2], [0, 0.6, 1]]], False, []),  # they only begin and end together
        ([[[0, 4], [0, 1]], [[0, 4], [0.004, 1]]], False, [[0, 1]]),  # nearer than 0.5% of the height
        ([[[0, 4], [0, 1]], [[0, 4], [0.006, 1]]], False, []),
        ([[[0, 2], [0, 0]], [[0, 2, 4], [0, 0, 1]], [[0, 2, 4], [0, 0, 2]]], False, [[0, 2], [0, 1]]),  # those two part
        ([[[0, 2, 4], [0, 0, 1]], [[4, 6, 8], [1, 0, 0]]], False, []),  # they meet in one point
        ([[[0, 1], [1, 1e-4]], [[0, 1], [1, 1.1e-4]]], False, [[0, 1]]),
        ([[[0, 1], [1, 1e-4]], [[0, 1], [1, 1.1e-4]]], True, []),  # log10 1.1 = .041 of a height of 4
        ([[[1, 2, 3], [None, 1, 2]], [[1, 2, 3], [0, 1, 2]]], False, [[0, 1]]),  # it is not drawn there
        ([[[], []], [[], []]], False, []),
        ([[[0, 2], [0, 1]], [[0, 2], [0, 2]], [[0], [0]]], False, []),  # a run has only begun where all begin
        ([[[0, 2], [0, 1]], [[0], [0]], [[0], [0]]], False, [[1, 2]]),
        ([[[1, 1, 4], [0, 1, 2]], [[1, 1, 4], [0, 1, 2]]], False, [[0, 1]]),  # two points at one place
    ],
)
def test_which_lines_lie_on_each_other(page, lines, log, groups):
    assert sorted(page.evaluate(GROUPS, [lines, log])) == sorted(groups)
