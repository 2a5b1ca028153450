"""The directory of an evaluation: its configuration, its responses, and the promise that nothing is sampled twice.

config.json       everything that determines the result; written first and never changed
responses.jsonl   one line per problem, in order; appended a chunk at a time
chunks.jsonl      where each chunk ends, and the SHA-256 of all responses up to there
results.json      all figures; written last, so its presence means the evaluation is complete
report.html       the same for people
lock              held by the process at work

A chunk holds the responses of one engine call and is kept whole or not at all. If the process is killed, half a line or
half a chunk may be left, which is cut off when the directory is opened again. Chunks do not depend on where an
evaluation was stopped, so a continued evaluation has the same bytes as one that was never stopped. Saved chunks must be
as they were written: the figures of an evaluation are computed from them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, InstanceOf, ValidationError

from bapo.config.errors import ConfigError, DamagedError, PlaceError
from bapo.config.words import flat
from bapo.evaluate.estimates import Row
from bapo.runs.files import DIGITS, append, appended, check_kinds, cut, held, read, read_object
from bapo.runs.files import write as write_whole

FORMAT = "bapo eval 1"
CHECKSUMS = "chunks.jsonl"
FILES = ("config.json", "responses.jsonl", CHECKSUMS, "results.json", "report.html", "lock")
RESTORE = "Restore it, or delete everything from that line on to sample it again."
Chunk = tuple[str, Sequence[str]]  # name of a data set, and the ids of some of its problems

_WHY = {
    "weights": "the model's weights have changed",
    "fingerprints": "its problems, or the prompts made of them, have changed",
    "versions": "another version may round differently",
    "threads": "another number of threads may round differently",
    "slots": "another number of slots may round differently",
    "chunk": "other chunks may round differently",
}


@contextmanager
def opened(path: Path, identity: dict[str, Any]) -> Iterator[Directory]:
    """Open a directory, new or to be continued; nobody else can work in it meanwhile."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        check_kinds(path, files=FILES)
        appended(path / "lock").close()
    except PlaceError:
        raise
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written to: {error.strerror}. Choose another place.") from None
    with held(path / "lock", busy=f"--out {path}: another process is at work there. Wait for it, or stop it."):
        directory = Directory(path, identity["k"])
        directory._claim(json.loads(json.dumps(identity)))
        yield directory


Number = Annotated[FiniteFloat, Field(ge=-(10.0**DIGITS), le=10.0**DIGITS)]


class _Response(BaseModel, strict=True):
    text: InstanceOf[str]
    tokens: Annotated[int, Field(ge=0, lt=2**53)]
    status: Literal["stopped", "truncated", "dropped"]
    reward: Number | None
    failure: InstanceOf[str]
    answer: InstanceOf[str] | None
    entropy: Number | None
    turns: Annotated[int, Field(ge=0, lt=2**53)] = 1
    ending: InstanceOf[str] = ""


class _Row(BaseModel, strict=True):
    """What a line of responses.jsonl must hold."""

    data: InstanceOf[str]
    id: InstanceOf[str]
    source: InstanceOf[str]
    prompt: InstanceOf[str]
    reference: Any
    responses: Annotated[list[_Response], Field(min_length=1)]


class Directory:
    """The files of an evaluation. Made by `opened`."""

    def __init__(self, path: Path, k: int) -> None:
        self.path, self.k = path, k
        self.responses = path / "responses.jsonl"
        self._size, self._hash = 0, hashlib.sha256()

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all. It is on the disk afterwards."""
        write_whole(self.path / name, text)

    def append(self, rows: Sequence[Row]) -> None:
        """Append the rows of one chunk. They, and the names of both files, are on the disk when this returns."""
        data = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
        append(self.responses, data)
        append(self.path / CHECKSUMS, self._checksum(data))

    def _checksum(self, data: bytes) -> bytes:
        """The line of chunks.jsonl after these bytes."""
        self._size += len(data)
        self._hash.update(data)
        return json.dumps({"bytes": self._size, "sha256": self._hash.hexdigest()}).encode() + b"\n"

    def complete(self, chunks: Sequence[Chunk]) -> list[Row]:
        """The rows of the complete chunks from the first on, which must be as they were saved. The rest is cut off."""
        lines = read(self.responses).splitlines(keepends=True) if self.responses.exists() else []
        if lines and not _is_object(lines[-1]):  # a kill, or a power cut
            lines.pop()
        problems = sum(len(ids) for _, ids in chunks)
        if len(lines) > problems:
            raise DamagedError(f"{self.responses} has {len(lines)} lines for {problems} problems. {RESTORE}")
        recorded = read(known).splitlines(keepends=True) if (known := self.path / CHECKSUMS).exists() else []
        self._size, self._hash = 0, hashlib.sha256()
        rows, checksums = list[Row](), list[bytes]()
        for name, ids in chunks:
            first, saved = len(rows) + 1, lines[len(rows) : len(rows) + len(ids)]
            if len(saved) < len(ids):
                break
            checksums.append(self._checksum(b"".join(saved)))
            if (before := recorded[len(checksums) - 1 : len(checksums)]) and before != checksums[-1:]:
                raise DamagedError(
                    f"{self.responses} was changed: the chunk that begins in line {first} is not as it was written, or "
                    f"{CHECKSUMS} is not. {RESTORE}"
                )
            rows += [self._row(first + at, line, name, ids[at]) for at, line in enumerate(saved)]
        if self.responses.exists():
            cut(self.responses, self._size)
        self.write(CHECKSUMS, b"".join(checksums).decode())
        return rows

    def _row(self, number: int, line: bytes, name: str, id: str) -> Row:
        """What a line holds, which must be the responses to this problem."""
        try:
            row: Row = json.loads(line)
            found = _Row.model_validate(row)
            if (found.data, found.id) == (name, id) and len(found.responses) == self.k:
                return row
            wrong = f"it has {len(found.responses)} responses to problem {found.id!r} of {found.data}, and not {self.k}"
            wrong += f" to {id!r} of {name}"
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (ValueError, RecursionError):
            wrong = repr(line[:60])
        raise DamagedError(f"{self.responses}, line {number} is damaged: {wrong}. {RESTORE}")

    def _claim(self, identity: dict[str, Any]) -> None:
        """Write config.json, or check that it says the same."""
        identity = {"format": FORMAT, **identity}
        config = self.path / "config.json"
        if not config.exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name != "lock" and p.suffix != ".partial")
            if others:
                holds = f"it holds {others[0]} but no config.json, so it is not an evaluation"
                raise ConfigError(f"--out {self.path}: {holds}. Choose another directory.")
            return self.write("config.json", json.dumps(identity, indent=2) + "\n")
        try:
            there = read_object(config)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{config} is damaged: {error}. Restore it, or choose another directory.") from None
        if there.get("format") != FORMAT:
            other = "its config.json does not describe an evaluation by this version"
            raise ConfigError(f"--out {self.path}: {other}. Choose another directory.")
        before, now = dict(flat(there)), dict(flat(identity))
        if changed := [key for key in [*now, *before] if before.get(key) != now.get(key)]:
            key, why = changed[0], _WHY.get(changed[0].split(".")[0])
            raise ConfigError(
                f"--out {self.path} holds an evaluation with {key}={before.get(key)!r}, but this one has "
                f"{now.get(key)!r}{f': {why}' if why else ''}. Give the same options to continue it, or another --out."
            )
        return None


def _is_object(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
