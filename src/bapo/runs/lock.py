"""One process at a time: a lock on a file, kept until all who inherited its descriptor have closed it."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo.config.errors import ConfigError


@contextmanager
def held(path: Path, *, busy: str) -> Iterator[int]:
    """Inside, nobody else holds this file; a ConfigError that says `busy` if somebody does.

    Yields the descriptor, which children must inherit to share the lock. Where files cannot be locked, a note says so.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError as error:
            print(
                f"bapo: {path.parent} is in a file system without locks ({error.strerror}): make sure that no other "
                "process works there.",
                file=sys.stderr,
            )
        yield file.fileno()


def is_held(path: Path) -> bool:
    """Whether somebody holds this file now. Only a look: it makes no file, and keeps nobody out for long."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks there
        return False
    return False
