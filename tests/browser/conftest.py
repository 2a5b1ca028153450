"""A real browser, and pages in which nothing may go wrong."""

import os
import shutil

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install bapo[dev]")
    if CHROMIUM is None:
        pytest.skip("no chromium in PATH (apt-get install chromium), nor its path in $CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watched(browser):
    """A function that opens a page which may ask for addresses with these beginnings only.

    At the end the test fails if any page asked for another, had an error, or wrote an error or a warning.
    """
    wrong, contexts = [], []

    def open_page(url, allowed, **options):
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1280, "height": 900}), **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(allowed) else wrong.append(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
