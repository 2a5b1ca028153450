"""Files of a run: read without waiting, written whole or not at all, and on the disk before anything relies on them.

A run may come from a stranger. So no link in a run directory is followed, whether it stands for a file or for a folder:
bapo would read or write what it leads to. Nor is a FIFO or a device opened, which could keep bapo waiting for ever. All
of them are refused by name. The run directory itself, and what is above it, may be links. Folders of others, such as
those of trackers, are left alone.

A lock on a file lasts until every process that inherited its descriptor closes it. The directory of the file is locked
with it, so a lock file that somebody deletes does not let a second process in.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, cast

from bapo.config.errors import ConfigError, PlaceError
from bapo.screen.terminal import say

DIGITS = 100
"""Most digits of a number in a log. No metric is as large, and sums and squares of longer ones may overflow a float."""
PARTIAL = ".partial"
"""How the name of a file or directory ends while it is being written. A killed process leaves such names behind."""
STEP = re.compile(r"step-\d{6,}(\.\w+)?")
"""Names in checkpoints/ that are bapo's: complete checkpoints, half-written ones, and those that were set aside."""
DEEPEST, TOO_DEEP = 100, "it is nested too deeply"
"""How many lists and objects may be inside one another in JSON."""
KIND_NAMES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
OTHER_DISK = "To keep a run on another disk, give --out a place there; the run directory itself may be a link, too."


def opened(path: Path) -> BufferedReader:
    """A file of a run, open for reading. PlaceError if something else stands in its place."""
    return os.fdopen(_descriptor(path, os.O_RDONLY), "rb")


def appended(path: Path) -> BinaryIO:
    """A file of a run, open for reading anywhere and for writing at its end. It is made if there is none."""
    return cast(BinaryIO, os.fdopen(_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b"))


def made(path: Path) -> BinaryIO:
    """A new file, open for writing. One of this name is removed first, so nothing is written into what was there."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    return cast(BinaryIO, os.fdopen(_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb"))


def append(path: Path, lines: bytes) -> None:
    """Append lines to a file, after ending half a line that a kill left. They, and its name, are then on the disk."""
    with appended(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read(1) not in (b"", b"\n")  # by a kill
        file.write((b"\n" if torn else b"") + lines)
        file.flush()
        os.fsync(file.fileno())
    flush(path.parent)


def cut(path: Path, size: int) -> None:
    """Cut a file of a run back to this size."""
    with os.fdopen(_descriptor(path, os.O_RDWR), "r+b") as file:
        file.truncate(size)


def folder(path: Path) -> Path:
    """A folder of a run, which is made if there is none."""
    _check_kind(path, stat.S_IFDIR)
    path.mkdir(exist_ok=True)
    return path


def check_kinds(directory: Path, *, files: Iterable[str], folders: Iterable[str] = ()) -> None:
    """PlaceError if something else stands in the place of one of these files and folders, in checkpoints/ and below."""
    for name, kind in [*((name, stat.S_IFREG) for name in files), *((name, stat.S_IFDIR) for name in folders)]:
        _check_kind(directory / name, kind)
    for step in (path for path in directory.glob("checkpoints/*") if STEP.fullmatch(path.name)):
        _check_kind(step, stat.S_IFDIR)
        with suppress(FileNotFoundError):  # another rank removes what was half-written
            for path in step.iterdir():
                _check_kind(path, stat.S_IFREG)


def _check_kind(path: Path, wanted: int) -> None:
    try:
        found = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if found != wanted:
        raise PlaceError(path, _told(found, wanted))


def _told(found: int, wanted: int) -> str:
    """What is wrong with a path that is of another kind than it should be, and what to do."""
    belongs = "and not a regular file" if wanted == stat.S_IFREG else "and not a directory"
    if found == stat.S_IFLNK:
        return (
            f"is a link {belongs}, and no link in a run directory is followed: it may lead to files of other programs. "
            f"Put in its place what it leads to, or remove it. {OTHER_DISK}"
        )
    return f"is {KIND_NAMES.get(found, 'something else')} {belongs}. Remove it, or put back what was there."


def _descriptor(path: Path, flags: int) -> int:
    """Open a regular file without following a link and without waiting."""
    _check_kind(path, stat.S_IFREG)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PlaceError(path, _told(stat.S_IFLNK, stat.S_IFREG)) from None
        raise
    status, wrong = os.fstat(descriptor), ""
    if (found := stat.S_IFMT(status.st_mode)) != stat.S_IFREG:
        wrong = _told(found, stat.S_IFREG)
    elif flags & os.O_RDWR and status.st_nlink > 1:
        wrong = "is one file with another name (a hard link), which would change with it. Copy it, and put the copy "
        wrong += "in its place."
    if wrong:
        os.close(descriptor)
        raise PlaceError(path, wrong)
    return descriptor


def read(path: Path) -> bytes:
    """All bytes of a regular file."""
    with opened(path) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, in words, if there is something else in it."""
    return object_in(read(path))


def object_in(data: bytes) -> dict[str, Any]:
    """The JSON object in these bytes. ValueError, in words, if there is something else, or too deep."""
    if not data.strip(b"\0 \n"):
        raise ValueError("it is empty")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for values in inside for inner in values if isinstance(inner, dict | list)]
    if level:
        raise ValueError(TOO_DEEP)
    return value


def strict(value: Any, *, spell: bool = False) -> Any:
    """Nested dicts and lists as JSON can hold them: a number that is not finite becomes null, or text with `spell`."""
    if isinstance(value, Mapping):
        return {str(key): strict(inner, spell=spell) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner, spell=spell) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value) if spell else None
    return value


def write(path: Path, data: str | bytes) -> None:
    """Write a file, whole or not at all. It is on the disk afterwards."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    with made(partial) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Wait until a directory with everything in it is on the disk."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        flush(path)


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in a directory, oldest first: those whose name says a step and nothing else."""
    _check_kind(directory, stat.S_IFDIR)
    found = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def sweep(run: Path) -> None:
    """Remove what killed processes left half-written in a run directory. Only for the process that holds its lock."""
    for path in (*run.glob(f"*{PARTIAL}"), *run.glob(f"checkpoints/*{PARTIAL}")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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
            unlocked = f"{path.parent} is on a file system without locks ({error.strerror})"
            say(f"bapo: {unlocked}. Make sure that no other process works there.", error=True)
        yield descriptor
    finally:
        os.close(directory)
        file.close()


def _lock_directory(descriptor: int) -> None:
    """Lock a directory, if its file system can do that; some only lock files that are open for writing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            raise
