"""Checkpoints: all or nothing.

A checkpoint is a directory `checkpoints/step-000040` with the trained weights, the optimizer's moments and float32
masters (all safetensors), and `state.json`: the learner's version, the length of the logs, and everything else the loop
must remember, such as parked responses and the data cursor. It is written under another name, every file is flushed to
disk and its checksum is kept in `manifest.json`, and the directory is renamed last. So a directory with the final name
is complete, whatever kills the process. Loading verifies every checksum.

The ranks of a team (`together.py`) write one checkpoint together, into a directory that all of them see: each writes
its shards of the weights and moments, and the first one writes the rest. They divide the checksums among them.

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

from bapo.config.errors import BapoError, CheckpointError
from bapo.learn.learner import Learns
from bapo.train.team import ALONE, Team

MANIFEST, STATE = "manifest.json", "state.json"


def save(directory: Path, step: int, learner: Learns, state: dict[str, Any], *, keep: int, team: Team = ALONE) -> Path:
    """Write the checkpoint of the step just completed, then remove all but the newest `keep`.

    `state`: everything besides the learner that the next step depends on, as plain JSON data.
    """
    final = directory / f"step-{step:06d}"
    if team.lead(final.exists):
        return final  # a step is a function of what came before it, so this one is already saved
    partial = directory / f"{final.name}.partial"
    team.lead(lambda: _make(partial))
    try:
        learner.save(partial)
        team.lead(lambda: _write(partial / STATE, state | {"version": learner.version, "ranks": team.size}))
        files = sorted(partial.iterdir())
        parts = team.share(lambda: {path.name: _flushed(path) for path in files[team.rank :: team.size]})
        checksums = {name: checksum for part in parts for name, checksum in part.items()}
        team.lead(lambda: _finish(partial, final, dict(sorted(checksums.items())), keep=keep))
    except SafetensorError as error:  # this is how safetensors reports a full disk
        _remove(partial, team)
        raise OSError(f"{partial}: {error}") from error
    except BaseException:
        _remove(partial, team)
        raise
    return final


def _make(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _remove(partial: Path, team: Team) -> None:
    if team.leads:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _flushed(path: Path) -> str:
    """The checksum of a file that is on the disk now."""
    _flush(path)
    return _checksum(path)


def _finish(partial: Path, final: Path, checksums: dict[str, str], *, keep: int) -> None:
    """Give the checkpoint its final name, and remove the oldest ones."""
    (partial / MANIFEST).write_text(json.dumps(checksums, indent=2))
    _flush(partial / MANIFEST)
    partial.rename(final)
    _flush(final.parent)
    for old in available(final.parent)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))


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


def load(path: Path, learner: Learns, *, team: Team = ALONE) -> dict[str, Any]:
    """Restore the learner. Returns the state that was saved with it."""
    team.share(lambda: _verify(path, team))
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        learner.load(path, version=state["version"])
    except BapoError:  # of a cluster, for example: it says what is wrong
        raise
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit this run's model or this version of bapo: {error}. Use the version that wrote it."
        ) from error
    return state


def _verify(path: Path, team: Team) -> None:
    """Check this member's part of the files."""
    try:
        checksums = json.loads((path / MANIFEST).read_text())
        mine = list(checksums.items())[team.rank :: team.size]
        broken = [name for name, expected in mine if _checksum(path / name) != expected]
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
