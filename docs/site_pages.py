"""What the documentation site adds to the files of docs/: pages that are generated, and links that a site can follow.

mkdocs calls the functions that begin with `on_` while it builds the site (`hooks` in mkdocs.yml). Generated are the
page of the notebook, and those that are files of the repository's root. They are made anew for every build, so they
cannot be out of date. The page of the Python API lists names, which become their signatures and docstrings here.

Pages link to files of the repository, so that every link also works in a clone. A link to a file that a generated page
is made from leads to that page here. Any other link out of docs/, such as one to a source file, becomes the path as
text, because a site does not hold the repository.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "four_tensors.ipynb"
API = "reference/api.md"
NAMED = re.compile(r"^- `(bapo\.[\w.]+)`: .*$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for address, make in PAGES.items():
        files.append(File.generated(config, address, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links out of docs/ into links to generated pages, or into names of files, and names into docstrings."""
    if page.file.src_uri == API:
        markdown = NAMED.sub(r"::: \1", markdown)
    return LINK.sub(lambda link: _within_site(link, posixpath.dirname(page.file.src_uri)), markdown)


def _within_site(link: re.Match[str], folder: str) -> str:
    words, target = link.groups()
    if "://" in target or target.startswith(("#", "mailto:")):
        return link[0]
    path = (ROOT / "docs" / folder / target.split("#")[0]).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return link[0]
    named = path.relative_to(ROOT).as_posix()
    if named in MADE_FROM:
        return f"[{words}]({posixpath.relpath(MADE_FROM[named], folder or '.')})"
    return f"`{named}`" if words.strip("`") == named else f"{words} (`{named}`)"


# Pages that are files elsewhere in the repository


def notebook() -> str:
    """The notebook, with the outputs that are stored in it."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            printed = "".join("".join(output.get("text", "")) for output in cell["outputs"]).rstrip()
            parts.append(f"```python\n{source}\n```")
            parts += [f"```text\n{printed}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"


def at_root(name: str) -> Callable[[], str]:
    """A page that is a file of the repository's root."""

    def read() -> str:
        text = (ROOT / name).read_text(encoding="utf-8")
        return LINK.sub(lambda link: f"[{link[1]}]({link[2].removeprefix('docs/')})", text)

    return read


PAGES: dict[str, Callable[[], str]] = {
    "tutorials/notebook.md": notebook,
    "changelog.md": at_root("CHANGELOG.md"),
    "contributing.md": at_root("CONTRIBUTING.md"),
}
"""Where a generated page is, and what makes it."""
MADE_FROM = {
    "examples/four_tensors.ipynb": "tutorials/notebook.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""The file that a page of the repository links to, and the generated page that the site shows instead."""
