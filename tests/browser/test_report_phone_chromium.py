"""The report on a phone, in a real browser: every section can be reached, and every figure has its legend in sight."""

import pytest

from bapo.report import write_report
from tests.browser.looks import PHONE
from tests.browser.test_report_chromium import ALLOWED, drawn, unfolded
from tests.compared_runs import COMPARED

TOUCH = {"viewport": PHONE, "is_mobile": True, "has_touch": True}
IN_SIGHT = """(element) => {
    const box = element.getBoundingClientRect();
    const there = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    return Boolean(there) && (element.contains(there) || there.contains(element));
}"""


@pytest.fixture(scope="module")
def shown(lasting, report):
    page = lasting.open(report, ALLOWED, **TOUCH)
    unfolded(page)
    return page


@pytest.fixture
def phone(shown, watched):
    """The report on a phone at its top, with everything folded but the figures. Tests share it."""
    shown.evaluate("document.querySelectorAll('details:not(.figure)').forEach((one) => { one.open = false; })")
    shown.evaluate("scrollTo(0, 0)")
    return shown


def in_sight(locator):
    """Whether the middle of each of these elements is on the screen, with nothing over it."""
    return [one.evaluate(IN_SIGHT) for one in locator.all()]


def test_every_section_can_be_reached(phone):
    contents = phone.locator("#contents")
    links = contents.locator("a")
    assert contents.is_visible()
    assert not links.first.is_visible()  # folded, so that the page begins with its answer
    sections = phone.locator("main > section:has(h2):not(#undrawn)").evaluate_all("all => all.map(({id}) => id)")
    assert [link.get_attribute("href") for link in links.all()] == [f"#{name}" for name in sections]
    for name in sections:
        if not links.first.is_visible():
            contents.locator("summary").tap()
        contents.locator(f"a[href='#{name}']").tap()
        assert not links.first.is_visible()
        assert in_sight(phone.locator(f"#{name} h2")) == [True], name


def test_the_legend_and_the_way_back_stay_beside_every_figure(phone):
    chips = phone.locator(".chip")
    assert chips.all_inner_texts() == ["bapo", "grpo", "clip_higher", "push-once", "reuse-2", "partial", "reuse-4"]
    for name in ("held-out", "bounds", "staleness"):
        phone.locator(f"#{name} .plot").last.evaluate("plot => plot.scrollIntoView({ block: 'end' })")
        assert all(in_sight(chips)), name
        assert in_sight(phone.locator(".up")) == [True], name
        legend, plot = (phone.locator(place).bounding_box() for place in (".legend", f"#{name} .plot >> nth=-1"))
        assert legend["y"] + legend["height"] < plot["y"]  # it leaves room for the whole plot
    phone.locator(".up").tap()
    links = phone.locator("#contents a")
    assert in_sight(links) == [True] * links.count()


def test_the_way_back_stays_if_there_are_more_chips_than_fit(watched, report):
    phone = watched(report, ALLOWED, **TOUCH)
    unfolded(phone)
    chip = phone.locator(".chip").first
    chip.evaluate("chip => { for (let at = 0; at < 20; at++) chip.parentElement.append(chip.cloneNode(true)); }")
    off = "chips => chips.forEach(chip => chip.setAttribute('aria-pressed', 'false'))"
    phone.locator(".chip").evaluate_all(off)  # those are drawn apart, and may not lie over the link
    phone.locator("#bounds .plot").last.scroll_into_view_if_needed()
    legend = phone.locator(".legend")
    assert legend.evaluate("legend => legend.scrollHeight > legend.clientHeight")
    for top in (*range(0, 100, 10), 1000):
        legend.evaluate("(legend, top) => { legend.scrollTop = top; }", top)
        assert in_sight(phone.locator(".up")) == [True], top


def test_the_headings_of_the_overview_are_explained_without_a_pointer(phone):
    meaning = phone.locator("#overview .meaning")
    assert not meaning.locator("dd").first.is_visible()
    meaning.locator("summary").tap()
    headings = phone.locator("#overview th").all_inner_texts()
    assert meaning.locator("dt").all_inner_texts() == headings
    told = meaning.locator("dd").all_inner_texts()
    assert [button.get_attribute("title") for button in phone.locator("#overview th button").all()] == told
    assert told[headings.index("pass@2")].startswith("How often at least one of 2 samples solves a held-out problem")
    phone.locator("#overview th button").first.tap()
    assert phone.locator("#overview th[aria-sort]").count() == 1
    assert meaning.locator("dd").first.is_visible()  # sorting leaves it open


def test_the_page_of_one_run_has_no_legend_but_the_way_back(watched, tmp_path):
    write_report([COMPARED / "reuse-2/bapo/seed-0"], tmp_path / "r.html")
    page = watched((tmp_path / "r.html").as_uri(), ALLOWED, **TOUCH)
    unfolded(page)
    page.locator("#staleness .plot").scroll_into_view_if_needed()
    assert page.locator(".chip").count() == 0
    assert in_sight(page.locator(".up")) == [True]


def test_a_wide_page_lists_its_contents_openly(watched, report):
    page = watched(report, ALLOWED)
    drawn(page)
    assert page.locator("main > nav").is_visible()
    assert not page.locator("#contents").is_visible()
    assert not page.locator(".up").is_visible()
