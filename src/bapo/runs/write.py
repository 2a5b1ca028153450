"""The directory of a run, as the process that works on it writes it.

A log grows line by line, so that others can follow it, and what is in it stays as it was written. The writer remembers
the size and the SHA-256 of all that it wrote. A checkpoint keeps both, so that a log that was damaged, reordered, cut
or exchanged is noticed when the run is resumed, and not after all training. A log that somebody deletes while the run
is at work is still open here, so it is written again.

All other files are written whole or not at all, and are on the disk before anything relies on them (files.py). The
modules that write the files, train/run.py and train/sft.py, say what they mean. The process at work holds a lock on the
file `lock` and on the directory, which is released when the process ends, for whatever reason. Others may read
meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from bapo.config.errors import CheckpointError, ConfigError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.runs import files, history
from bapo.screen.terminal import say

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kept = TypeVar("Kept", Config, SftConfig)

CONFIG, SUMMARY = "config.json", "summary.json"
LOGS = ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "ledger.jsonl", "failures.jsonl")
MODEL_CHECKSUMS = "model.sha256"  # the checksums of the trained model, in the format of `sha256sum --check`
JUDGED = "judged.jsonl"
FILES = (CONFIG, SUMMARY, *LOGS, JUDGED, MODEL_CHECKSUMS, "data.json", "lock", history.FILE)
FOLDERS = ("checkpoints", "model", "adapter", "skipped")  # what bapo itself reads and writes in a run directory
BEFORE_THE_FIRST_STEP = {CONFIG, "checkpoints", "data.json", "lock", history.FILE, JUDGED}
CHUNK = 1 << 20  # how many bytes of a log are read at a time


class Log:
    """One log of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0  # how many bytes were written so far
        self.hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    def append(self, *values: dict[str, Any]) -> None:
        """Add lines."""
        data = "".join(json.dumps(value) + "\n" for value in values).encode()
        file = self._present()
        file.write(data)
        file.flush()
        self.size += len(data)
        self.hash.update(data)

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
        self.size, self.hash = size, hashlib.sha256()
        if os.path.lexists(self.path):
            files.cut(self.path, size)
            with files.opened(self.path) as file:
                self.hash = _hash_of(file, size)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _present(self) -> BinaryIO:
        """The open file, once it is clear that it still has its name and holds what was written."""
        if self._file is None:
            self._file = files.appended(self.path)
        elif not os.path.lexists(self.path):
            self._file = self._written_again(self._file)
        elif not os.path.samestat(os.fstat(self._file.fileno()), self.path.lstat()):
            raise self._changed("was replaced by another file")
        if (found := os.fstat(self._file.fileno()).st_size) != self.size:
            raise self._changed(f"has {found} bytes, but this run wrote {self.size}: something else changed it")
        return self._file

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {what} while the run was at work, so the run stops. Put the file of the run back, then "
            f"continue with `bapo resume {self.path.parent}`."
        )

    def _written_again(self, old: BinaryIO) -> BinaryIO:
        """The log under its own name again. It was deleted, but its content lives as long as it is open."""
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


class RunDirectory:
    """The files of a run. Logs are appended line by line and flushed, so that others can follow them.

    PlaceError if a link, or anything else that does not belong there, stands in the place of one of them.
    """

    def __init__(self, path: Path) -> None:
        files.check_kinds(path, files=FILES, folders=FOLDERS)
        self.given = path  # the path as a person wrote it, for messages
        self.path = path = path.absolute()  # whatever becomes of the working directory
        self.id: str | None = None  # the identity of the run, once it is known
        self._logs = {name: Log(path / name) for name in LOGS}

    @classmethod
    @contextmanager
    def begun(cls, config: Config | SftConfig) -> Iterator[Self]:
        """A new directory, with its lock held inside the block. A run that exists already is never overwritten."""
        run = cls(_made(config.out))
        with run.held():
            if not unused(run.path):
                raise _exists(config.out, run.path)  # another process was faster
            run.clear()
            run.write(CONFIG, config.model_dump(mode="json"))
            files.flush(run.path.parent)
            yield run

    def clear(self) -> None:
        """Remove what a run left behind that never took a step. Its configuration stays until it is written again."""
        files.sweep(self.path)
        (self.path / history.FILE).unlink(missing_ok=True)

    def config(self, schema: type[Kept]) -> Kept:
        """The configuration that the run was created with."""
        try:
            return parse(schema, self.values(), source=CONFIG)
        except ConfigError as error:
            raise CheckpointError(
                f"{self.path} cannot be resumed: {error}\nIt is not a configuration of this version of bapo. Resume it "
                "with the version that wrote it, or restore the file."
            ) from None

    def values(self) -> dict[str, Any]:
        """The keys in config.json. If it is empty, damaged or lost, those in the newest checkpoint that has a copy."""
        wrong = f"{self.path} has no config.json that can be read, so it is not a run directory. Give the directory "
        wrong += "that a run printed."
        for directory in (self.path, *reversed(self.checkpoints())):
            try:
                return files.read_object(directory / CONFIG)
            except ValueError as error:
                if directory == self.path:
                    wrong = f"{directory / CONFIG} is damaged: {error}. Restore it to resume."
            except OSError:
                continue
        raise CheckpointError(wrong)

    def has_config(self) -> bool:
        """Whether config.json can be read."""
        try:
            return bool(files.read_object(self.path / CONFIG))
        except (OSError, ValueError):
            return False

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return files.checkpoints(self.path / "checkpoints")

    def held(self) -> AbstractContextManager[int]:
        """Hold the lock, so that no other process works in the directory."""
        busy = f"another process is at work on the run in {self.path}"
        return files.held(self.path / "lock", busy=f"{busy}. Wait for it, or stop it, then run this command again.")

    def complete(self) -> tuple[dict[str, Any] | None, str | None]:
        """The summary, if the run is complete and its model is as it was written; otherwise None, and what is wrong.

        There is nothing wrong with a run that has no summary: it was stopped, or it is going on.
        """
        path = self.path / SUMMARY
        try:
            summary = files.read_object(path) if path.exists() else None
        except (OSError, ValueError) as error:
            return None, f"{SUMMARY} cannot be read: {error}"
        flaw = None if summary is None else _model_flaw(self.path)
        return (None, flaw) if flaw else (summary, None)

    def seal(self) -> None:
        """Wait until the trained model is on the disk, and keep its checksums."""
        written = [self.path / name for name in ("model", "adapter") if (self.path / name).is_dir()]
        for directory in written:
            files.flush_tree(directory)
        found = sorted(path for directory in written for path in directory.rglob("*") if path.is_file())
        lines = [f"{files.checksum(path)}  {path.relative_to(self.path)}\n" for path in found]
        files.write(self.path / MODEL_CHECKSUMS, "".join(lines))

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file, whole or not at all."""
        files.write(self.path / name, json.dumps(value, indent=2) + "\n")

    def write_arrays(self, name: str, arrays: dict[str, NDArray[Any]]) -> None:
        """Write a safetensors file, whole or not at all."""
        from safetensors.numpy import save

        path = self.path / name
        files.folder(path.parent)
        files.write(path, save(arrays))

    def append(self, name: str, *values: dict[str, Any]) -> None:
        """Append lines to a log."""
        self._logs[name].append(*values)

    def logged(self) -> dict[str, Any]:
        """What a checkpoint keeps of the logs: how long each is, in bytes, and the SHA-256 of these bytes."""
        return {
            "logs": {name: log.size for name, log in self._logs.items()},
            "log_digests": {name: log.hash.hexdigest() for name, log in self._logs.items()},
        }

    def flaw(self, state: dict[str, Any]) -> str | None:
        """Which log is not as it was when a checkpoint with this state was written, and why; None if all are."""
        for name, size in state["logs"].items():
            why = self._logs[name].flaw(size, state.get("log_digests", {}).get(name))
            if why is not None:
                return f"{self.path / name} {why}"
        return None

    def cut(self, state: dict[str, Any]) -> None:
        """Cut the logs back to their length at a checkpoint. The steps after it will be repeated."""
        for name, size in state["logs"].items():
            self._logs[name].cut(size)

    def flush(self) -> None:
        """Flush the logs to disk, so that none is shorter than a checkpoint says."""
        for log in self._logs.values():
            log.flush()

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            log.close()


def unused(path: Path) -> bool:
    """Whether a directory is empty, or holds only what a run writes before its first checkpoint is complete."""
    if not path.is_dir():
        return False
    names = {entry.name.removesuffix(files.PARTIAL) for entry in path.iterdir()}
    if not names <= BEFORE_THE_FIRST_STEP or files.checkpoints(path / "checkpoints"):
        return False
    return all(files.STEP.fullmatch(entry.name) for entry in (path / "checkpoints").glob("*"))


def _made(out: str) -> Path:
    """The directory for a new run. A run that was killed before its first checkpoint leaves one that is used again."""
    first = _place(out)
    for path in (first, *(first.with_name(f"{first.name}-{number}") for number in range(2, 1000))):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if "{time}" in out:  # another run started in the same second
                continue
            if not unused(path):
                raise _exists(out, path) from None
        except OSError as error:
            raise ConfigError(f"out={out}: cannot create {path}: {error.strerror}. Choose another place.") from None
        return path
    raise _exists(out, first)


def _place(out: str) -> Path:
    return Path(out.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))


def why_not_out(out: str) -> str | None:
    """Why no run directory can be made there; None if one can. It tries with a temporary file."""
    path = _place(out)
    if os.path.exists(path) and "{time}" not in out and not unused(path):
        return str(_exists(out, path))
    above = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    try:
        with TemporaryFile(dir=above) as file:
            file.write(b"bapo")
        return None
    except OSError as error:
        reason = f"nothing can be written to {above}: {error.strerror}"
    reason = reason if above.is_dir() else f"{above} is not a directory"
    return f"out={out}: cannot create {path}: {reason}. Choose another place."


def _exists(out: str, path: Path) -> ConfigError:
    is_run = (path / CONFIG).exists()
    other = f", or continue that run with `bapo resume {path}`." if is_run else "; this one holds no run."
    return ConfigError(f"out={out}: {path} exists already. Choose another directory{other}")


def _model_flaw(run: Path) -> str | None:
    """What is wrong with the trained model of a complete run."""
    try:
        lines = files.read(run / MODEL_CHECKSUMS).decode().splitlines()
        expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        if strange := [name for name in expected if not _is_in_model(name)]:
            return f"{MODEL_CHECKSUMS} names {strange[0]!r}, which is no file of the trained model"
        folders = {str(above) for name in expected for above in list(PurePath(name).parents)[:-1]}
        files.check_kinds(run, files=expected, folders=sorted(folders))
        for name, digest in expected.items():
            if files.checksum(run / name) != digest:
                return f"{name} is not as it was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(run)} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"the trained model cannot be read: {error}"
    return None if expected else f"{MODEL_CHECKSUMS} is empty"


def _is_in_model(name: str) -> bool:
    folder, *below = name.split("/")
    return folder in ("model", "adapter") and bool(below) and not {"", ".", ".."} & set(below) and "\0" not in name
