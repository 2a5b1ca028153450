"""Recipes and grids that come with bapo, and go by their names: `bapo train offpolicy`, `bapo compare quick`.

They are the files in the folders recipes/ and grids/ of the package. The first comment of each says what it is. A file
of that name in the current directory, which may be a stranger's, does not take its place: `./offpolicy` means that one.
"""

from __future__ import annotations

import difflib
import textwrap
import tomllib
from pathlib import Path

from bapo.config.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
FOLDERS = ("recipes", "grids")


def shipped(command: str | None = None) -> dict[str, Path]:
    """The recipes or grids that a command can run, by name; with None, all of them."""
    recipes, grids = ({path.stem: path for path in sorted((PACKAGE / name).glob("*.toml"))} for name in FOLDERS)
    if command is None:
        return recipes | grids
    if command == "bapo compare":
        return grids
    wanted = command == "bapo sft"
    return {name: path for name, path in recipes.items() if ("epochs" in tomllib.loads(path.read_text())) is wanted}


def find(given: str | Path) -> Path:
    """The file that a path or a name leads to. A path that does not exist is left for whoever opens it."""
    path, known = Path(given).expanduser(), shipped()
    name = path.stem.replace("-", "_")
    is_name = str(given) == path.name and not path.suffix
    if is_name and name in known:
        return known[name]
    if path.is_file():
        return path
    if is_name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{given!r} is neither a file here nor a recipe or grid that comes with bapo. {hint}`bapo train --list`, "
            "`bapo sft --list` and `bapo compare --list` show what there is."
        )
    if not path.exists() and name in known:
        raise ConfigError(
            f"cannot read {given}: No such file or directory. {name!r} comes with bapo and goes by its name, without a "
            "directory and without .toml."
        )
    return path


def listing(command: str) -> str:
    """The names of what a command can run, each with what it is."""
    found = {name: _purpose(path) for name, path in shipped(command).items()}
    width = max(map(len, found)) + 2
    lines = [
        textwrap.fill(f"{name:<{width}}{purpose}", 100, initial_indent="  ", subsequent_indent=" " * (width + 2))
        for name, purpose in found.items()
    ]
    return "\n".join([*lines, "", f"Run one with `{command} NAME`. The files are in {PACKAGE}."])


def _purpose(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    comment = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return " ".join(comment).partition(". ")[0].rstrip(".") + "."
