"""The documentation site, built as `make docs` builds it and read in a browser: wide, on a phone, light and dark."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install bapo[docs]")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install bapo[docs]")

ROOT = Path(__file__).parents[2]
PAGES = [
    *("index", "quickstart", "concepts", "tutorials/own_data", "tutorials/notebook"),
    *("reference/train", "reference/objectives", "reference/api", "metrics", "results"),
]
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 420, "height": 900}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the built site. A warning of mkdocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    surroundings = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    built = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def check(page):
    """What must hold for every page: a title, pictures that are there, and nothing that sticks out at the side."""
    assert page.locator("h1").first.inner_text().strip()
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    missing = page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
    assert missing == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_reads_well_wide_and_on_a_phone(site, watched, name):
    wide = watched(f"{site}{name}.html", (site, "data:"), viewport=WIDE, color_scheme="light")
    check(wide)
    phone = watched(f"{site}{name}.html", (site, "data:"), viewport=PHONE, color_scheme="dark")
    check(phone)
    backgrounds = [page.evaluate("getComputedStyle(document.body).backgroundColor") for page in (wide, phone)]
    assert backgrounds[0] != backgrounds[1]  # light and dark


def test_keys_objectives_and_functions_are_there(site, watched):
    page = watched(f"{site}reference/train.html", (site, "data:"), viewport=WIDE)
    assert "learn.lr" in page.locator("article").inner_text()
    assert "learning rate of AdamW" in page.locator("tr", has_text="learn.lr").first.inner_text()
    page.goto(f"{site}reference/objectives.html")
    assert "low = 0.8" in page.locator("article").inner_text()
    page.goto(f"{site}reference/api.html")
    assert page.locator("#bapo\\.core\\.loss\\.policy_loss").count() == 1


def test_search_finds_a_page(site, watched):
    page = watched(f"{site}index.html", (site, "data:"), viewport=WIDE)
    query = page.locator("[data-md-component=search-query]")
    query.click()
    query.press_sequentially("partial_budget")
    page.locator(".md-search-result__item").first.wait_for(timeout=120_000)
    assert "training" in page.locator(".md-search-result__list").inner_text().lower()
