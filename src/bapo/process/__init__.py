"""What a process of ours is to the machine around it: signals, other processes, and where it finds its modules.

    stops       the signals that it hears, and the processes below it
    limited     a process that calls one function under limits

Python never looks for modules in the current directory, which may hold the files of a stranger. It would look there
first if PYTHONPATH has an empty entry or a dot, which a line like `PYTHONPATH=$PYTHONPATH:/mine` leaves behind. Entries
with a name are the user's own word.

A module of the user's, such as a reward function, is looked for in a folder of the user's, after everything that is
installed (`found_in`). So is what its import statements name, then and in later calls, and what those modules import in
turn. Nobody else finds anything there: many libraries import a package "if it is there", and a file with such a name
would run. What runs is the text of .py files: Python would prefer what a __pycache__ or an extension module beside them
holds, which nobody can read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dis import get_instructions
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from types import CodeType
from typing import Any

VARIABLE = "PYTHONPATH"


class _Folders:
    """Finds modules in folders of the user's, for those who may. Python asks it last."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}
        """Modules that the user named, and where to look for them."""
        self.found: dict[str, str] = {}
        """Modules that were found in a folder, and in which."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where a module is; None if it is not in a folder, or if somebody else asks for it."""
        if path is not None or (folder := self.asked.get(name) or self.found.get(_importer(name))) is None:
            return None
        if (spec := source_of(name, [folder])) is not None:
            self.found[name] = folder
        return spec


class _Parts:
    """Finds the modules of packages that were found in a folder, for everybody. Python asks it first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where a module of such a package is; None if its package is another one. Nobody else may look for it."""
        if path is None or name.partition(".")[0] not in _FOLDERS.found:
            return None
        if (spec := source_of(name, path)) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


class _AsWritten(SourceFileLoader):
    """Loads a module from its .py file alone, and leaves no __pycache__."""

    def get_code(self, fullname: str) -> CodeType:
        """The text of the file, compiled."""
        return self.source_to_code(self.get_data(self.path), self.path)


def source_of(name: str, folders: Iterable[str]) -> ModuleSpec | None:
    """Where the .py file of a module is, or the folder that is a package; None if there is none in these folders."""
    finders = (FileFinder(folder, (_AsWritten, [".py"])) for folder in folders)
    return next((spec for finder in finders if (spec := finder.find_spec(name)) is not None), None)


def _importer(name: str) -> str:
    """The top name of the module whose import statement asks for this one; empty if there is no such statement.

    A library in C has no frames. What it imports, in a call or while it is imported itself, looks as if its caller did.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib."):
        frame = frame.f_back
    here = [each for each in get_instructions(frame.f_code) if each.offset == frame.f_lasti]
    asked = [str(each.argval).partition(".")[0] for each in here if each.opname == "IMPORT_NAME"]
    return str(frame.f_globals.get("__name__")).partition(".")[0] if asked == [name] else ""


_FOLDERS, _PARTS = _Folders(), _Parts()


@contextmanager
def found_in(folder: str, module: str) -> Iterator[None]:
    """Inside the block, this module is looked for in this folder, and what it imports is from then on, too."""
    first = module.partition(".")[0]
    if _FOLDERS not in sys.meta_path:
        sys.meta_path[:] = [_PARTS, *sys.meta_path, _FOLDERS]
    _FOLDERS.asked[first] = folder
    try:
        yield
    finally:
        del _FOLDERS.asked[first]


def was_found(module: str) -> bool:
    """Whether a module with this top name was found in a folder of the user's."""
    return module in _FOLDERS.found


def forget_the_current_directory() -> None:
    """Stop looking where entries of PYTHONPATH mean the current directory."""
    here = os.path.abspath("")
    for entry in [] if sys.flags.ignore_environment else _entries():
        if _means_here(entry) and here in sys.path:
            sys.path.remove(here)


def environment() -> dict[str, str]:
    """The environment for a process of ours, without these entries. What a reward function starts keeps them."""
    kept = [entry for entry in _entries() if not _means_here(entry)]
    others = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return others | ({VARIABLE: os.pathsep.join(kept)} if kept else {})


@contextmanager
def clean_environment() -> Iterator[None]:
    """Inside, this process has that environment itself, for a library that starts processes of its own."""
    before = os.environ.get(VARIABLE)
    if before is not None:
        os.environ[VARIABLE] = environment().get(VARIABLE, "")
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before


def _entries() -> list[str]:
    return given.split(os.pathsep) if (given := os.environ.get(VARIABLE)) else []


def _means_here(entry: str) -> bool:
    return os.path.normpath(entry) == os.curdir
