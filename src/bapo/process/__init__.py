"""What a process of ours is to the machine around it: signals, other processes, and where it finds its modules.

    stops       the signals that it hears
    tree        the processes below it
    limited     a process that calls one function under limits

Python never looks for modules in the current directory, which may hold the files of a stranger. It would look there
first if PYTHONPATH has an empty entry or a dot, which a line like `PYTHONPATH=$PYTHONPATH:/mine` leaves behind. Entries
with a name are the user's own word. The reward function of a run is looked for in the current directory, too, after
everything that is installed (`tasks/verify/finding.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "PYTHONPATH"


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
