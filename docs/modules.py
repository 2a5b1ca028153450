"""Prints docs/reference/modules.md: every module with the first sentence of its docstring, and the import rules.

python docs/modules.py > docs/reference/modules.md
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "bapo"
RULES = Path(__file__).parents[1] / "tests" / "invariant" / "test_architecture.py"
HEAD = """# Modules

Every module of the package, with the first sentence of its docstring, and at the end [which room may import
which](#import-rules). `python docs/modules.py` prints this page, and a test keeps it current.
[Architecture](../architecture.md) explains how the rooms work together.
"""
SENTENCE = re.compile(r"(.+?)(?:\.(?= |$)|$)")


def page() -> str:
    """The whole page."""
    rooms = (line for room in _rooms() for line in room)
    return "\n".join([HEAD, *_table(PACKAGE, PACKAGE.glob("*.py")), *rooms, "", *_rules()])


def _rooms() -> Iterator[list[str]]:
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        room = init.parent
        modules = [path for path in room.rglob("*.py") if path.name != "__init__.py"]
        yield [
            "",
            f"## {room.name}",
            "",
            f"{first_sentence(init)}.",
            *(["", *_table(PACKAGE, modules)] if modules else []),
        ]


def _table(root: Path, modules: Iterator[Path] | list[Path]) -> list[str]:
    rows = [f"| `{path.relative_to(root).as_posix()}` | {first_sentence(path)}. |" for path in sorted(modules)]
    return ["| module | what it is about |", "|---|---|", *rows]


def _rules() -> Iterator[str]:
    """Which part of the package a room may import, as the test of the architecture enforces it."""
    yield from ("## Import rules", "", "A room may import itself and what its row names.", "")
    yield from ("| room | may import |", "|---|---|")
    for room, allowed in sorted(runpy.run_path(str(RULES))["MAY_IMPORT"].items()):
        if room not in ("__init__", "__main__", "cli"):
            yield f"| `{room}` | {', '.join(f'`{name}`' for name in sorted(allowed)) or 'nothing'} |"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line, without its full stop."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    found = SENTENCE.match(text)
    return found[1].replace("|", "\\|") if found else ""


if __name__ == "__main__":
    print(page())
