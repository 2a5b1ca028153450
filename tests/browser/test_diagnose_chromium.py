"""The page of a diagnosis in a real browser: it draws in silence, follows the theme, fits a phone, and stays text."""

from dataclasses import replace

import pytest

from bapo.diagnose.diagnosis import diagnose
from bapo.diagnose.diagnosis_page import html_page
from bapo.diagnose.dumps import Dump
from tests.browser.conftest import PATIENCE
from tests.unit.diagnose.test_diagnosis import batch

EVIL = "<img src=x onerror=\"document.title='gone'\">"
UPDATES = [replace(batch(drift=0.15 * n, longer=2.0, seed=n), name=str(n)) for n in (1, 2, 3)]
ALLOWED = ("file:", "data:", "blob:")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A function that writes the page of some updates, and gives its address."""
    root = tmp_path_factory.mktemp("diagnose")

    def write(*updates):
        file = root / f"{len(list(root.iterdir()))}.html"
        result = diagnose(Dump(list(updates), {"behavior_logprobs": "rollout_log_probs"}))
        file.write_text(html_page(result), encoding="utf-8")
        return file.as_uri(), result

    return write


@pytest.fixture
def opened(watched):
    """A function that opens a page and waits until it is drawn."""

    def open_page(url, **options):
        page = watched(url, ALLOWED, **options)
        page.wait_for_selector("html[data-drawn]", timeout=PATIENCE)
        return page

    return open_page


def test_headline_and_charts_are_there(opened, written):
    url, result = written(*UPDATES)
    page = opened(url)
    assert page.locator("#verdict .answer").inner_text() == result.headline.text
    assert page.locator(".plot .main-svg .cartesianlayer").count() == 4
    assert page.locator("#plot-share-0 .scatterlayer .trace").count() == 5  # four rules and the target
    assert page.locator("#plot-sides .barlayer .trace").count() == 4
    assert page.locator("#plot-sides .yaxislayer-above .ytick, #plot-sides .ytick").count() == len(result.overall.fates)
    drawn = page.evaluate("Array.from(document.getElementById('plot-share-0').data[1].y)")
    assert drawn == pytest.approx([numbers.fates["grpo"].gradient.share for numbers in result.updates], rel=1e-5)


def test_light_and_dark_and_back(opened, written):
    page = opened(written(*UPDATES)[0], color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    color = "document.getElementById('plot-sides').data[0].marker.color"
    assert page.evaluate(background) == "rgb(20, 22, 26)"
    dark = page.evaluate(color)
    page.evaluate("delete document.documentElement.dataset.drawn")
    page.locator("#theme").click()
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate(background) == "rgb(251, 251, 250)"
    assert page.evaluate(color) != dark


def test_one_update_fits_a_phone_and_names_stay_text(opened, written):
    page = opened(written(replace(UPDATES[2], name=EVIL))[0], viewport={"width": 420, "height": 900}, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.locator(".plot .main-svg .cartesianlayer").count() == 3
    right = "Math.max(...[...document.querySelectorAll('.plot')].map((plot) => plot.getBoundingClientRect().right))"
    assert page.evaluate(right) <= 420
    assert page.locator("img").count() == 0
    assert page.title() == "bapo diagnose"


def test_names_of_many_updates_stay_text(opened, written):
    page = opened(written(*(replace(update, name=f"{n}<b>") for n, update in enumerate(UPDATES)))[0])
    ticks = page.locator("#plot-share-0 .xtick text").all_text_contents()
    assert ticks == ["0<b>", "1<b>", "2<b>"]


def test_it_can_be_read_without_scripts(watched, written):
    url, result = written(*UPDATES)
    page = watched(url, ALLOWED, java_script_enabled=False)
    assert page.locator("#verdict .answer").inner_text() == result.headline.text
    assert page.locator("table").count() > 5
    assert page.locator("noscript").is_visible()
    assert not page.locator("#theme").is_visible()
