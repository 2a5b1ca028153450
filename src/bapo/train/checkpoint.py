"""Checkpoints: all or nothing.

A checkpoint is a directory `checkpoints/step-000040` with the trained weights, the optimizer's moments and float32
masters (all safetensors), and `state.json`: the learner's version, the length of the logs, and everything else the loop
must remember, such as parked responses and the data cursor. It is written under another name, every file is flushed to
disk and its checksum is kept in `manifest.json`, and the directory is renamed last. So a directory with the final name
is complete, whatever kills the process. Loading verifies every checksum.

The random state needs no file: every draw is a function of a seed and a counter that is saved here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bapo.config.errors import CheckpointError
from bapo.learn.learner import Learns

MANIFEST, STATE = "manifest.json", "state.json"


def save(directory: Path, step: int, learner: Learns, state: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of the step just completed, then remove all but the newest `keep`.

    `state`: everything besides the learner that the next step depends on, as plain JSON data.
    """
    final = directory / f"step-{step:06d}"
    if final.exists():
        return final  # a step is a function of what came before it, so this one is already saved
    partial = directory / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        learner.save(partial)
        (partial / STATE).write_text(json.dumps(state | {"version": learner.version}))
        checksums = {}
        for path in sorted(partial.iterdir()):
            _flush(path)
            checksums[path.name] = _checksum(path)
        (partial / MANIFEST).write_text(json.dumps(checksums, indent=2))
        _flush(partial / MANIFEST)
        partial.rename(final)
        _flush(directory)
    except SafetensorError as error:  # this is how safetensors reports a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{partial}: {error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in available(directory)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))
    return final


def available(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first. Leftovers of a killed process are called `.partial` and are not included."""
    return sorted(path for path in directory.glob("step-*") if path.is_dir() and not path.name.endswith(".partial"))


def newest(directory: Path) -> Path:
    """The checkpoint to resume from."""
    found = available(directory)
    if not found:
        raise CheckpointError(
            f"{directory} holds no checkpoint, so there is nothing to resume: the run ended before it saved one. "
            "Start it again."
        )
    return found[-1]


def load(path: Path, learner: Learns) -> dict[str, Any]:
    """Restore the learner. Returns the state that was saved with it."""
    _verify(path)
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        learner.load(path, version=state["version"])
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit this run's model or this version of bapo: {error}. Use the version that wrote it."
        ) from error
    return state


def _verify(path: Path) -> None:
    try:
        checksums = json.loads((path / MANIFEST).read_text())
        broken = [name for name, expected in checksums.items() if _checksum(path / name) != expected]
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot read it: {error}") from None
    if broken:
        raise _damaged(path, f"{', '.join(broken)} changed since it was written")


def _damaged(path: Path, why: str) -> CheckpointError:
    others = [other.name for other in available(path.parent) if other != path]
    remedy = (
        f"Move {path.name} away to resume from {others[-1]}." if others else "It is the only one: start the run again."
    )
    return CheckpointError(f"the checkpoint {path} is damaged: {why}. Nothing was changed. {remedy}")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
