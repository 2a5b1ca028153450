"""Prints docs/reference/train.md or sft.md: every key of a configuration, with its type, default and meaning.

python docs/keys.py train > docs/reference/train.md
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bapo.config.run import Config
from bapo.config.sft import SftConfig

SCHEMAS: dict[str, type[BaseModel]] = {"train": Config, "sft": SftConfig}
WORDS = {type(None): "none", bool: "true or false", int: "whole number", float: "number", str: "text"}
"""What a type is called on a page."""
HEAD = """# Configuration of bapo {command}

Every key that a recipe of `bapo {command}` can hold. On the command line, `learn.lr` is `--learn.lr`.
`python docs/keys.py {command}` prints this page from the definitions that the command itself reads, and a test keeps it
current.

## Top level
"""


def page(command: str) -> str:
    """The whole page."""
    fields = SCHEMAS[command].model_fields
    lines = [HEAD.format(command=command), *_table(fields, "")]
    for name, field in fields.items():
        section = _section(field)
        if section is not None:
            lines += _sections(name, section)
    return "\n".join(lines)


def _sections(path: str, section: type[BaseModel]) -> Iterator[str]:
    """A section as a heading, its own sentence and its table, and after it the sections within it."""
    yield from (f"## {path}", "", inspect.cleandoc(section.__doc__ or "").split("\n\n")[0], "")
    yield from _table(section.model_fields, f"{path}.")
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is not None:
            yield from _sections(f"{path}.{name}", inner)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _table(fields: dict[str, FieldInfo], prefix: str) -> list[str]:
    cells = [
        (f"`{prefix}{name}`", _cell(_kind(field.annotation)), _default(field), _cell(field.description or ""))
        for name, field in fields.items()
        if _section(field) is None
    ]
    rows = [f"| {' | '.join(row)} |" for row in cells]
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


if __name__ == "__main__":
    print(page(sys.argv[1]), end="")
