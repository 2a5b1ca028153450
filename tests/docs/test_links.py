"""Every link between files of the repository leads to a file of a clone, and to a heading if it names one.

Pages that only the site has (docs/site_pages.py makes them) are not files of a clone, so no page may link to them.
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
    if "site" not in path.parts
)


def without_code(text):
    """A page without its blocks and spans of code, in which brackets mean something else."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(path):
    """The names that GitHub and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).replace(" ", "-") for title in titles}


def broken(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(file):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert list(broken(path)) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[good](#a-b-c) [bad](#a) [gone](gone.md) `[code](x)` [web](https://example.org)\n")
    assert list(broken(page)) == ["#a: no such heading", "gone.md: no such file"]


def test_every_goal_of_the_navigation_is_one_click_from_the_readme():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("  - Goals:\n")[2].partition("  - How to:\n")[0]
    goals = re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE)
    made = {"docs/tutorials/notebook.md": "examples/four_tensors.ipynb"}
    linked = set(re.findall(r"\]\(([^)\s#]+)", (ROOT / "README.md").read_text()))
    assert len(goals) == 12
    assert [page for page in (f"docs/{goal}" for goal in goals) if made.get(page, page) not in linked] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_needs_no_site_to_be_read(path):
    assert re.findall(r"^(?:::: .*|.*--8<--.*|!!! .*)$", path.read_text(), flags=re.MULTILINE) == []


def test_every_line_of_the_readme_counts():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 175
    assert [line for line in lines if len(line) > 120] == []


def test_the_pages_can_be_read_in_an_afternoon():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    assert sum(len(path.read_text().split()) for path in pages) <= 36_000
