"""What the site adds to the files of docs/: generated pages, and links that lead out of docs/."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import bapo

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install bapo[docs]")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_links_out_of_the_site_become_names(pages):
    def rendered(text, at="adapters/trl.md"):
        return pages.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=at)))

    assert rendered("[examples/a.py](../../examples/a.py)") == "`examples/a.py`"
    assert rendered("[one file](../../examples/a.py)") == "one file (`examples/a.py`)"
    assert rendered("[loop](../../src/bapo/train/loop.py)") == "loop (`src/bapo/train/loop.py`)"
    assert rendered("[changes](../CHANGELOG.md#0)", at="versions.md") == "[changes](changelog.md)"
    for kept in ("[a](../algorithm.md#x)", "[b](#here)", "[c](https://example.org/x)", "![d](../live.svg)"):
        assert rendered(kept) == kept


def test_the_page_of_the_api_has_every_name_and_becomes_docstrings(pages):
    text = (ROOT / "docs" / pages.API).read_text()
    assert set(re.findall(r"\*\*(\w+)\*\*", text)) == set(bapo.__all__) - {"__version__"}
    for place in pages.NAMED.findall(text):
        module, _, name = place.rpartition(".")
        assert name == "advantages" or hasattr(importlib.import_module(module), name), place
    shown = pages.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=pages.API)))
    assert shown.count("\n::: bapo.core.") == len(pages.NAMED.findall(text)) == 15
    assert importlib.import_module("bapo.core.advantages")


def test_links_to_what_a_page_is_made_from_lead_to_that_page(pages):
    assert all((ROOT / file).is_file() for file in pages.MADE_FROM)
    assert set(pages.MADE_FROM.values()) == set(pages.PAGES)


def test_the_notebook_becomes_a_page_with_its_outputs(pages):
    page = pages.notebook()
    assert page.startswith("# Four tensors in, loss out")
    assert "```python\nimport torch" in page
    assert "```text\n240 tokens, 80 of them positive\n```" in page
