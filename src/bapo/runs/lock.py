"""A lock on a file, for one process at a time. It lasts until every process that inherited its descriptor closes it."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo.config.errors import ConfigError


@contextmanager
def held(path: Path, *, busy: str) -> Iterator[int]:
    """Hold the lock inside the block. If another process holds it, raise a ConfigError with the text `busy`.

    Yields the descriptor, which child processes must inherit to share the lock. If the file system has no locks, a note
    on standard error says so, and the block runs.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError as error:
            print(
                f"bapo: {path.parent} is on a file system without locks ({error.strerror}). Make sure that no other "
                "process works there.",
                file=sys.stderr,
            )
        yield file.fileno()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now. This creates no file and does not keep the lock."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks there
        return False
    return False
