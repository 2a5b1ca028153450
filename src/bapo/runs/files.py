"""Files of a run: read without waiting, written whole or not at all, and on the disk before anything relies on them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""How the name of a file or directory ends while it is being written. A killed process leaves such names behind."""


def opened(path: Path) -> BufferedReader:
    """A regular file, open for reading. OSError for anything else: opening a FIFO would wait for whoever writes it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read(path: Path) -> bytes:
    """All bytes of a regular file."""
    with opened(path) as file:
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, in words, if there is something else in it."""
    data = read(path)
    if not data.strip(b"\0 \n"):
        raise ValueError("it is empty")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all. It is on the disk afterwards."""
    partial = path.with_name(f"{path.name}{PARTIAL}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
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
    found = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def sweep(run: Path) -> None:
    """Remove what killed processes left half-written in a run directory. Only for the process that holds its lock."""
    for path in (*run.glob(f"*{PARTIAL}"), *run.glob(f"checkpoints/*{PARTIAL}")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
