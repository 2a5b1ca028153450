"""A log of a run, as the process at work writes it: it grows line by line, and what is in it stays as it was written.

The writer remembers the size and the SHA-256 of all that it wrote. A checkpoint keeps both, so that a log that was
damaged, reordered, cut or exchanged is noticed when the run is resumed, and not after all training. A log that somebody
deletes while the run is at work is still open here, so it is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from bapo.config.errors import CheckpointError
from bapo.runs import files
from bapo.screen.terminal import say

CHUNK = 1 << 20
"""How many bytes are read at a time."""


class Log:
    """One file of lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """How many bytes were written so far."""
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    @property
    def digest(self) -> str:
        """The SHA-256 of what was written so far."""
        return self._hash.hexdigest()

    def append(self, *values: dict[str, Any]) -> None:
        """Add lines."""
        data = "".join(json.dumps(value) + "\n" for value in values).encode()
        file = self._present()
        file.write(data)
        file.flush()
        self.size += len(data)
        self._hash.update(data)

    def flush(self) -> None:
        """Wait until the log is on the disk, so that it is never shorter than a checkpoint says."""
        if self.size:
            os.fsync(self._present().fileno())

    def flaw(self, size: int, digest: str | None) -> str | None:
        """What is wrong with the first `size` bytes of the file; None if they are those that were written."""
        try:
            with files.opened(self.path) as file:
                present = os.fstat(file.fileno()).st_size
                if present < size:
                    return f"is shorter than its checkpoint recorded: {present} of {size} bytes"
                if digest is not None and _hash_of(file, size).hexdigest() == digest:
                    return None
                file.seek(0)
                for number, line in enumerate(file, start=1):
                    if file.tell() <= size and not _is_object(line):
                        return f"is damaged: line {number} is not a JSON object"
        except FileNotFoundError:
            return "is missing" if size else None
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return None if digest is None else "was changed: its lines are not those that the run wrote"

    def cut(self, size: int) -> None:
        """Cut the file back to `size` bytes and go on from there."""
        self.close()
        self.size, self._hash = size, hashlib.sha256()
        if os.path.lexists(self.path):
            files.cut(self.path, size)
            with files.opened(self.path) as file:
                self._hash = _hash_of(file, size)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _present(self) -> BinaryIO:
        """The open file, which is surely the one with its name and holds what was written."""
        if self._file is None:
            self._file = files.appended(self.path)
        elif not self._has_its_name(self._file):
            self._file = self._written_again(self._file)
        found = os.fstat(self._file.fileno()).st_size
        if found != self.size:
            raise CheckpointError(
                f"{self.path} has {found} bytes, but this run wrote {self.size}: something else changed the file while "
                "the run was at work, so the run stops. Put back what was in it, then continue with `bapo resume "
                f"{self.path.parent}`."
            )
        return self._file

    def _has_its_name(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.lstat())
        except FileNotFoundError:
            return False

    def _written_again(self, old: BinaryIO) -> BinaryIO:
        """The log under its own name again. It was deleted, but its content lives as long as it is open."""
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"{self.path} was replaced by another file while the run was at work, so the run stops. Put the file "
                f"of the run back, then continue with `bapo resume {self.path.parent}`."
            )
        say(f"bapo: {self.path} was deleted while the run was at work. It was written again.", error=True)
        old.seek(0)
        with old, self.path.open("xb") as new:
            shutil.copyfileobj(old, new)
        return files.appended(self.path)


def _hash_of(file: BinaryIO, size: int) -> hashlib._Hash:
    """The SHA-256 of the next bytes of a file, which may be too many to hold in memory."""
    found = hashlib.sha256()
    while size > 0 and (part := file.read(min(size, CHUNK))):
        found.update(part)
        size -= len(part)
    return found


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
