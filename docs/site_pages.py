"""What the documentation site adds to the files of docs/: pages that are generated, and links that a site can follow.

mkdocs calls the functions that begin with `on_` while it builds the site (`hooks` in mkdocs.yml). Generated are the
pages of configuration keys, of objectives, of the notebook, and those that are files of the repository's root. They are
made anew for every build, so they cannot be out of date. The page of the Python API lists names, which become their
signatures and docstrings here.

Pages link to files of the repository, so that every link also works in a clone. A link to a file that a generated page
is made from leads to that page here. Any other link out of docs/, such as one to a source file, becomes the path as
text, because a site does not hold the repository.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "four_tensors.ipynb"
WORDS = {type(None): "none", bool: "true or false", int: "whole number", float: "number", str: "text"}
"""What a type is called on a page."""
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


# Configuration keys


def configuration(title: str, command: str, schema: type[BaseModel]) -> str:
    """Every key of a configuration: its type, default and meaning."""
    lines = [
        f"# {title}",
        "",
        f"Every key that a recipe of `{command}` can hold. On the command line, `learn.lr` is `--learn.lr`. This page "
        "is made from the definitions that the command itself reads.",
        "",
    ]
    top = [(name, field) for name, field in schema.model_fields.items() if _section(field) is None]
    lines += ["## Top level", "", *_table(top, "")]
    for name, field in schema.model_fields.items():
        section = _section(field)
        if section is not None:
            lines += [*_sections(name, section)]
    return "\n".join(lines) + "\n"


def _sections(path: str, section: type[BaseModel]) -> Iterator[str]:
    """A section as a heading, its own sentence and its table, and after it the sections within it."""
    yield from (f"## {path}", "", inspect.cleandoc(section.__doc__ or "").split("\n\n")[0], "")
    yield from _table([(n, f) for n, f in section.model_fields.items() if _section(f) is None], f"{path}.")
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is not None:
            yield from _sections(f"{path}.{name}", inner)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(fields: list[tuple[str, FieldInfo]], prefix: str) -> list[str]:
    cells = [(name, _kind(field.annotation), _default(field), field.description or "") for name, field in fields]
    rows = [f"| `{prefix}{name}` | {_cell(kind)} | {default} | {_cell(help)} |" for name, kind, default, help in cells]
    return ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    return f"`{json.dumps(value)}`" if value not in ((), {}, "") else "empty"


def _kind(annotation: Any) -> str:
    """A type in words."""
    if annotation in WORDS:
        return WORDS[annotation]
    inner = get_args(annotation)
    origin = get_origin(annotation)
    if origin is None:
        return getattr(annotation, "__name__", str(annotation))
    if getattr(origin, "__name__", "") == "Annotated":
        return _kind(inner[0])
    if str(origin).endswith("Literal"):
        return " or ".join(str(value) for value in inner)
    if origin is tuple:
        return f"list of {_kind(inner[0])}" if inner[-1] is Ellipsis else ", ".join(map(_kind, inner))
    if origin is dict:
        return f"table of {_kind(inner[1])}"
    return " or ".join(_kind(each) for each in inner)


def _cell(text: str) -> str:
    """Text that fits into one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def train_keys() -> str:
    """The page of `bapo train`."""
    from bapo.config.run import Config

    return configuration("Configuration of bapo train", "bapo train", Config)


def sft_keys() -> str:
    """The page of `bapo sft`."""
    from bapo.config.sft import SftConfig

    return configuration("Configuration of bapo sft", "bapo sft", SftConfig)


# Objectives


def objectives() -> str:
    """Every objective, its options with their defaults, and what its docstring says."""
    from bapo.core.objectives import OBJECTIVES

    lines = [
        "# Objectives and their options",
        "",
        "Choose one with `--objective.name NAME`, and give its options with `--objective.options KEY VALUE`. In a "
        "recipe that is",
        "",
        '    [objective]\n    name = "grpo"\n    options = {high = 1.28}',
        "",
        'In the core: `policy_loss(..., objective="grpo", high=1.28)`. `bapo` takes its options from the clip '
        "settings; see [the keys of `objective`](train.md#objective) and [the presets](../algorithm.md).",
        "",
    ]
    for name, objective in OBJECTIVES.items():
        options = [
            (option.name, option.default)
            for option in inspect.signature(objective.compute).parameters.values()
            if option.kind is option.KEYWORD_ONLY and option.default is not option.empty
        ]
        listed = ", ".join(f"`{option} = {'none' if value is None else value}`" for option, value in options)
        lines += [f"## {name}", "", f"Options: {listed or 'none'}.", "", *_docstring(objective.compute), ""]
    return "\n".join(lines) + "\n"


def _docstring(function: Callable[..., Any]) -> list[str]:
    """A docstring whose indented lines, which are equations, are set as code."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    lines: list[str] = []
    for paragraph in paragraphs:
        equation = paragraph.startswith("    ") or re.match(r"\S+ = |L_", paragraph)
        lines += [f"```text\n{inspect.cleandoc(paragraph)}\n```" if equation else paragraph.replace("|", "\\|"), ""]
    return lines


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
    "reference/train.md": train_keys,
    "reference/sft.md": sft_keys,
    "reference/objectives.md": objectives,
    "tutorials/notebook.md": notebook,
    "changelog.md": at_root("CHANGELOG.md"),
    "contributing.md": at_root("CONTRIBUTING.md"),
}
"""Where a generated page is, and what makes it."""
MADE_FROM = {
    "src/bapo/config/sections.py": "reference/train.md",
    "src/bapo/config/sft.py": "reference/sft.md",
    "src/bapo/core/objectives.py": "reference/objectives.md",
    "examples/four_tensors.ipynb": "tutorials/notebook.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""The file that a page of the repository links to, and the generated page that the site shows instead."""
