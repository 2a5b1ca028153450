"""The documentation site, built as `make docs` builds it and read in a browser: wide, on a phone, light and dark."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from itertools import product
from pathlib import Path

import pytest

from tests.browser.looks import PHONE, WIDE, flaws

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install bapo[docs]")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install bapo[docs]")

ROOT = Path(__file__).parents[2]
PAGES = [
    *("index", "quickstart", "concepts", "tutorials/own_data", "tutorials/notebook"),
    *("reference/train", "reference/objectives", "reference/api", "reference/metrics", "results", "choose", "trouble"),
]
THEME_LEGIBLE = 4.4
"""The theme colours code a little paler than the contrast that WCAG asks for (4.5)."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The built site. A warning of mkdocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    surroundings = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    built = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def site(folder):
    """The address of the site on a server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def check(page):
    """What must hold for every page: a title, pictures that are there, and a look without flaws."""
    assert page.locator("h1").first.inner_text().strip()
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    missing = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
    assert missing == []
    assert flaws(page, ".md-content", THEME_LEGIBLE) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_reads_well_wide_and_on_a_phone(site, watched, name):
    grounds = {}
    for viewport, scheme in product((WIDE, PHONE), ("light", "dark")):
        page = watched(f"{site}{name}.html", (site, "data:"), viewport=viewport, color_scheme=scheme)
        check(page)
        grounds.setdefault(scheme, set()).add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds["light"]) == len(grounds["dark"]) == 1
    assert grounds["light"] != grounds["dark"]


def test_numbers_of_a_wide_table_stay_on_one_line_and_meanings_have_room(site, watched):
    page = watched(f"{site}results.html", (site, "data:"), viewport=WIDE)
    cell = page.locator("table:has(th:nth-child(8)) td:nth-child(3)").nth(1)
    height, line = cell.evaluate("(td) => [td.clientHeight, parseFloat(getComputedStyle(td).fontSize)]")
    assert height < 3.5 * line  # one line of text, and the padding
    page = watched(f"{site}reference/train.html", (site, "data:"), viewport=PHONE)
    meaning = page.locator("tr", has_text="model.dtype").first.locator("td").last
    assert meaning.bounding_box()["width"] > 200


def test_keys_objectives_and_functions_are_there(site, watched):
    page = watched(f"{site}reference/train.html", (site, "data:"), viewport=WIDE)
    assert "learn.lr" in page.locator("article").inner_text()
    assert "learning rate of AdamW" in page.locator("tr", has_text="learn.lr").first.inner_text()
    page.goto(f"{site}reference/objectives.html")
    assert "low = 0.8" in page.locator("article").inner_text()
    page.goto(f"{site}reference/api.html")
    assert page.locator("#bapo\\.core\\.loss\\.policy_loss").count() == 1


def found(page, words):
    """The list of pages that a search for these words finds."""
    query = page.locator("[data-md-component=search-query]")
    query.click()
    query.press_sequentially(words)
    page.locator(".md-search-result__item").first.wait_for(timeout=120_000)
    return page.locator(".md-search-result__list").inner_text().lower()


def test_search_finds_a_page(site, watched):
    page = watched(f"{site}index.html", (site, "data:"), viewport=WIDE)
    assert "configuration of bapo train" in found(page, "partial_budget")


def test_search_finds_a_page_in_files_without_a_server(folder, watched):
    page = watched((folder / "tutorials" / "own_data.html").as_uri(), ("file:", "data:"), viewport=WIDE)
    assert "configuration of bapo train" in found(page, "partial_budget")
    page.locator(".md-search-result__link", has_text="Configuration of bapo train").first.click()
    page.wait_for_url("**/reference/train.html*")
    assert page.locator("h1").inner_text().startswith("Configuration of bapo train")
