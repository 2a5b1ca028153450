"""A lock on a file, for one process at a time. It lasts until every process that inherited its descriptor closes it.

The directory of the file is locked with it. So a lock file that somebody deletes does not let a second process in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bapo.config.errors import ConfigError
from bapo.runs.files import appended
from bapo.screen.terminal import say


@contextmanager
def held(path: Path, *, busy: str) -> Iterator[int]:
    """Hold the lock inside the block. If another process holds it, raise a ConfigError with the text `busy`.

    Yields the descriptor, which child processes must inherit to share the lock. If the file system has no locks, a note
    on standard error says so, and the block runs.
    """
    file, directory = appended(path), os.open(path.parent, os.O_RDONLY)
    descriptor = file.fileno()
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _lock_directory(directory)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError as error:
            say(
                f"bapo: {path.parent} is on a file system without locks ({error.strerror}). Make sure that no other "
                "process works there.",
                error=True,
            )
        yield descriptor
    finally:
        os.close(directory)
        file.close()


def _lock_directory(descriptor: int) -> None:
    """Lock a directory, if its file system can do that; some only lock files that are open for writing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now. This creates no file and does not keep the lock."""
    return _taken(path, os.O_NOFOLLOW) or _taken(path.parent)


def _taken(path: Path, flags: int = 0) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    except OSError:  # no such file
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks there
        return False
    finally:
        os.close(descriptor)
    return False
