"""Checkpoints: all or nothing.

A checkpoint is a directory `checkpoints/step-000040` with the trained weights and the optimizer's moments
(`learn/state.py`), a copy of the run's `config.json`, and `state.json`: the run's identity, the learner's version,
length and checksum of the logs, and everything else the loop must remember, such as parked responses and the data
cursor. It is written under another name, every file is flushed to disk and its checksum is kept in
`manifest.json`, and the directory is renamed last. So a directory with the final name is complete, whatever kills the
process. Loading verifies every checksum, and that of `config.json` is the digest of the configuration.

The ranks of a team (`torchrun.py`) write one checkpoint together, into a directory that all of them see: each writes
its shards of the weights and moments, and the first one writes the rest. They divide the checksums among them.

The random state needs no file: every draw is a function of a seed and a counter that is saved here.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from bapo.config.errors import BapoError, CheckpointError
from bapo.learn.learner import Learns
from bapo.runs import files
from bapo.runs.write import LOGS
from bapo.train.torchrun import ALONE, Team

CONFIG, MANIFEST, STATE = "config.json", "manifest.json", "state.json"
NEEDED = ("version", "ranks", "run", "vocabulary", "logs", "log_digests")
"""What the state of every run has."""


class _Flaw(Exception):  # noqa: N818
    """What is wrong with a checkpoint; becomes a CheckpointError with advice, or the answer that it is not sound."""


def save(
    directory: Path,
    step: int,
    learner: Learns,
    state: dict[str, Any],  # everything besides the learner that the next step depends on, as plain JSON data
    *,
    config: dict[str, Any],  # the configuration of the run
    keep: int,
    team: Team = ALONE,
) -> Path:
    """Write the checkpoint of the step just completed, then remove all but the newest `keep`."""
    final = directory / name_of(step)
    if team.lead(final.exists):
        return final  # a step is a function of what came before it, so this one is already saved
    partial = directory / f"{final.name}{files.PARTIAL}"
    team.lead(lambda: _make(partial))
    try:
        learner.save(partial)
        kept = state | {"version": learner.version, "ranks": team.size}
        team.lead(lambda: _write(partial, {STATE: kept, CONFIG: config}))
        written = team.lead(lambda: sorted(path.name for path in partial.iterdir()))
        parts = team.share(lambda: {name: _flushed(partial / name) for name in written[team.rank :: team.size]})
        checksums = {name: checksum for part in parts for name, checksum in part.items()}
        team.lead(lambda: _finish(partial, final, dict(sorted(checksums.items())), keep=keep))
    except BaseException as error:
        if team.leads:
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, SafetensorError):  # this is how safetensors reports a full disk
            raise OSError(f"{partial}: {error}") from error
        raise
    return final


def _make(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    files.folder(partial.parent)
    partial.mkdir()
    files.flush(partial.parent.parent)  # the directory of all checkpoints may be new


def _write(partial: Path, values: dict[str, Any]) -> None:
    for name, value in values.items():
        with files.made(partial / name) as file:
            file.write(json.dumps(value).encode())


def _flushed(path: Path) -> str:
    """The checksum of a file that is on the disk now."""
    files.flush(path)
    return files.checksum(path)


def _finish(partial: Path, final: Path, checksums: dict[str, str], *, keep: int) -> None:
    """Give the checkpoint its final name, and remove the oldest ones."""
    files.write(partial / MANIFEST, json.dumps(checksums, indent=2))
    partial.rename(final)
    files.flush(final.parent)
    for old in files.checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f"{old.name}{files.PARTIAL}")))


def chosen(directory: Path, name: str | None) -> Path:
    """The checkpoint to resume from: the one of this name, or the newest."""
    found = files.checkpoints(directory)
    if not found:
        raise CheckpointError(
            f"{directory} holds no checkpoint, so there is nothing to resume, though the run has logs. Put the "
            f"checkpoints back, or start a new run with the recipe {directory.parent / CONFIG}."
        )
    by_name = {path.name: path for path in found}
    if name is not None and name not in by_name:
        raise CheckpointError(f"--from {name}: {directory} has no such checkpoint. It has {', '.join(by_name)}.")
    return found[-1] if name is None else by_name[name]


def set_aside_newer(path: Path) -> list[str]:
    """Rename the checkpoints that are newer than this one, so that their steps are taken and saved again."""
    aside, found = [], files.checkpoints(path.parent)
    for other in found[found.index(path) + 1 :]:
        place = other.with_name(f"{other.name}.aside")
        shutil.rmtree(place, ignore_errors=True)
        aside.append(other.rename(place).name)
    return aside


def name_of(step: int) -> str:
    """The name of the checkpoint that is written after this step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(path.name.rpartition("-")[2])


def read_state(path: Path) -> dict[str, Any]:
    """The state in a checkpoint. Its manifest and its small files are verified; `load` verifies all."""
    try:
        manifest = _manifest(path)
        _compare(path, {name: manifest[name] for name in (STATE, CONFIG)})
        return _state(path)
    except _Flaw as flaw:
        raise _damaged(path, flaw) from None


def load(path: Path, learner: Learns, *, team: Team = ALONE) -> dict[str, Any]:
    """Restore the learner. Returns the state that was saved with it."""
    team.share(lambda: _verify(path, team))
    try:
        state = read_state(path)
        learner.load(path, version=state["version"])
    except BapoError:  # of a cluster, for example: it says what is wrong
        raise
    except (SafetensorError, RuntimeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path} does not fit this run's model or this version of bapo: {error}. Use the version that wrote it."
        ) from error
    return state


def advice(path: Path, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> str:
    """What to do about a checkpoint that cannot be resumed from: the newest other one that is sound, if there is one.

    `fits`: whether the run can go on from such a state.
    """
    run = path.parent.parent
    for other in reversed(files.checkpoints(path.parent)):
        if other != path and is_sound(other) and fits(files.read_object(other / STATE)):
            return f"The newest sound one is {other.name}. To resume from it: `bapo resume {run} --from {other.name}`."
    return f"No other one is sound: start a new run with the recipe {run / CONFIG}."


def is_sound(path: Path) -> bool:
    """Whether every file of a checkpoint is as it was written."""
    try:
        _compare(path, _manifest(path))
        _state(path)
    except _Flaw:
        return False
    return True


def _verify(path: Path, team: Team) -> None:
    """Check this member's part of the files."""
    try:
        _compare(path, dict(list(_manifest(path).items())[team.rank :: team.size]))
    except _Flaw as flaw:
        raise _damaged(path, flaw) from None


def _manifest(path: Path) -> dict[str, str]:
    """The checksum of every file in a checkpoint. A manifest that does not name them all is a flaw."""
    try:
        checksums = files.read_object(path / MANIFEST)
        present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")} - {MANIFEST}
    except (OSError, ValueError) as error:
        raise _Flaw(f"cannot read {MANIFEST}: {error}") from None
    if strange := [name for name in checksums if Path(name).name != name or "\0" in name]:
        raise _Flaw(f"{MANIFEST} names {strange[0]!r}, which is no file of a checkpoint")
    if unnamed := sorted((present | {STATE, CONFIG}) - checksums.keys()):
        raise _Flaw(f"{MANIFEST} has no checksum of {', '.join(unnamed)}")
    return checksums


def _state(path: Path) -> dict[str, Any]:
    try:
        state = files.read_object(path / STATE)
    except (OSError, ValueError) as error:
        raise _Flaw(f"cannot read {STATE}: {error}") from None
    if missing := [key for key in NEEDED if key not in state]:
        raise _Flaw(f"{STATE} does not say {' and '.join(missing)}")
    if not _counts(state["version"]):
        raise _Flaw(f"{STATE} has a version that is no number of updates: {state['version']!r:.60}")
    logs, digests = state["logs"], state["log_digests"]
    if not isinstance(logs, dict) or set(logs) != set(LOGS) or not all(map(_counts, logs.values())):
        raise _Flaw(f"{STATE} has sizes of logs that are none of this version: {logs!r:.60}")
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise _Flaw(f"{STATE} has checksums of logs that are none: {digests!r:.60}")
    return state


def _counts(value: Any) -> bool:
    """Whether it is a number of something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _compare(path: Path, checksums: dict[str, str]) -> None:
    try:
        broken = [name for name, expected in checksums.items() if files.checksum(path / name) != expected]
    except OSError as error:
        raise _Flaw(f"cannot read it: {error}") from None
    if broken:
        raise _Flaw(f"{', '.join(broken)} changed since it was written")


def _damaged(path: Path, flaw: _Flaw) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {flaw}. Nothing was changed. {advice(path)}")
