"""A real browser, and pages in which nothing may go wrong.

Chromium without a window draws with the same engine for two thirds of the work, so it comes first.
"""

import os
import shutil

import pytest

from bapo.report import write_report
from tests.compared_runs import COMPARED

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 180_000
"""Milliseconds. Pages of several MB are slow to draw on two busy cores, and nothing here is about speed."""


@pytest.fixture(scope="package")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install bapo[dev]")
    if CHROMIUM is None:
        pytest.skip("no chromium in PATH (apt-get install chromium-headless-shell), nor its path in $CHROMIUM")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Pages:
    """Pages in which nothing may go wrong: no error, no warning, and no request for an address that is not allowed."""

    def __init__(self, browser):
        self.browser = browser
        self.contexts = []
        self.wrong = []

    def open(self, url, allowed, **options):
        """A page that may ask for addresses with these beginnings only."""
        viewport = options.pop("viewport", {"width": 1280, "height": 900})
        self.contexts.append(self.browser.new_context(viewport=viewport, **options))
        page = self.contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", self.listen)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", lambda request: request.url.startswith(allowed) or self.wrong.append(request.url))
        page.goto(url)
        return page

    def listen(self, message):
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def close(self):
        for context in self.contexts:
            context.close()


@pytest.fixture(scope="module")
def lasting(browser):
    """Pages that stay open for all tests of a module."""
    pages = Pages(browser)
    yield pages
    pages.close()


@pytest.fixture
def watched(browser, lasting):
    """A function that opens a page for one test; at its end nothing may have gone wrong in any page."""
    pages = Pages(browser)
    yield pages.open
    pages.close()
    assert pages.wrong + lasting.wrong == []


@pytest.fixture(scope="package")
def report(tmp_path_factory):
    """The page of the compared runs."""
    out = tmp_path_factory.mktemp("report") / "report.html"
    write_report([COMPARED], out)
    return out.as_uri()
