"""docs/architecture.md and the list of modules stay true: every room, file, name and rule on them exists."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.invariant.test_architecture import MAY_IMPORT

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "bapo"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILES = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", PAGE)


def found(file):
    """A file of the package, or of the repository."""
    path = PACKAGE / file
    return path if path.exists() else ROOT / file


def names(tree, prefix=""):
    """Every name that a module or a class of it defines, dotted."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def rules():
    """The table of the import rules, as the page shows it."""
    rows = [
        f"| `{room}` | {', '.join(f'`{name}`' for name in sorted(allowed)) or 'nothing'} |"
        for room, allowed in sorted(MAY_IMPORT.items())
        if room not in ("__init__", "__main__", "cli")
    ]
    return "\n".join(["| room | may import |", "|---|---|", *rows])


def test_every_room_is_named():
    rooms = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))} - {"__pycache__"}
    modules = (ROOT / "docs" / "reference" / "modules.md").read_text()
    assert rooms == set(re.findall(r"^## (\w+)$", modules, flags=re.MULTILINE))


def test_the_list_of_modules_is_current():
    modules = runpy.run_path(str(ROOT / "docs" / "modules.py"))
    assert (ROOT / "docs" / "reference" / "modules.md").read_text() == modules["page"]() + "\n", (
        "run: python docs/modules.py > docs/reference/modules.md"
    )
    for path in PACKAGE.rglob("*.py"):
        assert modules["first_sentence"](path), f"{path} does not begin with its idea"


@pytest.mark.parametrize(("file", "name"), sorted(set(FILES)))
def test_every_file_and_name_exists(file, name):
    assert found(file).exists()
    if name:
        assert name in set(names(ast.parse(found(file).read_text())))


def test_every_folder_and_page_exists():
    folders = re.findall(r"`([\w/]+/)`", PAGE)
    assert folders
    for folder in folders:
        assert found(folder).is_dir(), folder
    for page in re.findall(r"\]\(([\w/]+\.\w+)\)", PAGE):
        assert (ROOT / "docs" / page).exists(), page


def test_the_rules_are_those_that_are_enforced():
    assert rules() in (ROOT / "docs" / "reference" / "modules.md").read_text()


def test_the_picture_names_real_files():
    picture = (ROOT / "docs" / "loop.svg").read_text()
    shown = re.findall(r'class="name"[^>]*>([\w/]+\.py)<', picture)
    assert len(shown) == 6
    for file in shown:
        assert (PACKAGE / file).exists(), file
