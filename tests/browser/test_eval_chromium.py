"""The page of an evaluation in a real browser: it opens in silence, sorts, unfolds, fits a phone, and stays text."""

import pytest

from bapo.evaluate.estimates import results
from bapo.evaluate.results_page import page as document

EVIL = "<img src=x onerror=\"document.title='gone'\"></pre></script><script>document.title='gone'</script>"


def response(reward, text="so the answer is 2", answer=None):
    return {
        "text": text,
        "tokens": 5 + len(text),
        "status": "stopped",
        "reward": reward,
        "failure": "" if reward is not None else "timeout after 5 s",
        "answer": answer,
        "entropy": 0.5,
    }


def row(data, id, *responses, prompt="What is 1+1?"):
    return {
        "data": data, "id": id, "source": data, "prompt": prompt, "reference": "2", "responses": list(responses),
    }  # fmt: skip


ROWS = [
    row("sums", "half", response(1.0, answer="2"), response(0.0, answer="3")),
    row("sums", "hard", response(0.0, EVIL, EVIL), response(None, EVIL), prompt=EVIL),
    row("sums", "easy", response(1.0, answer="2"), response(1.0, "much longer " * 40, answer="2")),
    row("other", "alone", response(1.0), response(0.0)),
]
IDENTITY = {"model": "a/model", "k": 2, "temperature": 0.6, "max_tokens": 64, "seed": 0, "versions": {"bapo": "0"}}


@pytest.fixture
def opened(watched, tmp_path):
    """A function that opens the page."""
    file = tmp_path / "report.html"
    file.write_text(document(ROWS, results(ROWS, IDENTITY)), encoding="utf-8")

    def open_page(**options):
        page = watched(file.as_uri(), ("file:", "data:,"), **options)
        if options.get("java_script_enabled", True):
            page.wait_for_selector("html[data-drawn]")
        return page

    return open_page


def ids(page, table=0):
    return page.locator("table.each").nth(table).locator("tbody > tr:first-child > td:first-child").all_inner_texts()


def test_the_overview_shows_the_figures(opened):
    page = opened()
    lines = page.locator("#overview tbody tr")
    assert [text.split()[0] for text in lines.all_inner_texts()] == ["sums", "other", "overall"]
    assert "0.500" in lines.first.inner_text()
    assert page.title() == "a/model on sums, other · bapo eval"


def test_problems_are_sorted_and_unfold(opened):
    page = opened()
    assert ids(page) == ["hard", "half", "easy"]
    assert ids(page, 1) == ["alone"]
    length = page.locator("table.each").first.get_by_role("button", name="Length")
    length.click()
    assert ids(page)[-1] == "easy"
    length.click()
    assert ids(page)[0] == "easy"
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Length")
    details = page.locator("details").first
    assert details.locator(".response").count() == 2
    assert not details.locator(".response").first.is_visible()
    details.locator("summary").click()
    assert details.locator(".response").first.is_visible()
    assert "so the answer is 2" in details.locator(".response").first.inner_text()


def test_what_a_model_wrote_stays_text(opened):
    page = opened()
    page.locator("tbody", has=page.locator("code", has_text="hard")).locator("summary").click()
    assert page.locator("img").count() == 0
    assert page.locator(".response pre", has_text="onerror").first.inner_text() == EVIL
    assert "gone" not in page.title()


def test_light_and_dark(opened):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = opened(), opened(color_scheme="dark")
    assert background(light) == "rgb(251, 251, 250)"
    assert background(dark) == "rgb(20, 22, 26)"
    light.locator("#theme").click()
    assert background(light) == background(dark)


def test_it_fits_a_phone_and_needs_no_script(opened):
    phone = opened(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    assert phone.evaluate("document.documentElement.scrollWidth") == 390
    page = opened(java_script_enabled=False)
    assert page.locator("table.each").first.is_visible()
    assert not page.locator("#theme").is_visible()
