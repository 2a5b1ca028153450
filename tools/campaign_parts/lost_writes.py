"""A file system that loses what was not synced, as a power cut would.

A recorder inside the process notes what every `fsync` made durable: the content of a file, or the names in a directory.
At a random operation on a file the process kills itself. From what is there now and what was durable, a directory is
built that a power cut could have left:

    a file         has what it had when it was last synced; or all of it; or something between; or zeros at its end. If
                   it was never synced, it may be empty.
    a directory    has the names it had when it was last synced, and of the changes since then each may be lost. A name
                   that was exchanged by a rename leads to the old file or to the new one.

This is harsher than the usual journal, which keeps the order of changes. The run is continued in that directory and
must end as its twin did. If the whole run was lost, the command is started again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path

from campaign_parts import forks
from campaign_parts.kills import Case, finish_case
from campaign_parts.outcomes import Failed, Kind, judge
from campaign_parts.world import check_equal


def lost_writes(case: Case) -> None:
    """Cut the power at a random operation, and continue with what a disk could have kept."""
    store = case.path.with_name(f"{case.path.name}-durable")
    store.mkdir()
    words, operation = case.setting.words, case.choose.randint(1, case.twin.operations)
    case.told.append(f"power cut at operation {operation}")
    process = forks.start(
        words,
        cwd=case.path,
        log=case.log(),
        trap=forks.Trap(operation, kills=True),
        before=lambda: _record(store, case.path),
    )
    if process.wait(case.twin.deadline) is None:
        forks.end(process)
        raise Failed(Kind.HANG, f"`bapo {' '.join(words)}` did not end")
    judge(words, process.code, process.said(), sent=(9,))
    durable = _read(store)
    kept = case.path.with_name(f"{case.path.name}-kept")
    kept.mkdir()
    _build(case.path, kept, durable, case.choose, only={"run"})
    if case.run.exists():
        shutil.rmtree(case.run)
    if (kept / "run").exists():
        (kept / "run").rename(case.run)
    shutil.copytree(case.run, store / "begun-from") if case.run.exists() else None
    finish_case(case)
    check_equal(case.path, case.twin.path)
    shutil.rmtree(store)
    shutil.rmtree(kept)


@dataclass
class Durable:
    """What was synced, by inode: the last content of files, the last names of directories."""

    files: dict[int, Path] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=dict)
    directories: set[int] = field(default_factory=set)


def _record(store: Path, inside: Path) -> None:
    """Note what every fsync makes durable. Runs in the process of the command.

    Every inode that was synced is held open, so that its number is not used again.
    """
    fsync, held, log = os.fsync, [], (store / "log").open("w")

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not path.startswith(str(inside)):
            return
        held.append(os.open(path, os.O_RDONLY))
        about = os.fstat(descriptor)
        line: dict[str, object] = {"inode": about.st_ino}
        if stat.S_ISDIR(about.st_mode):
            line["names"] = {
                entry.name: [entry.inode(), entry.is_dir(follow_symlinks=False)] for entry in os.scandir(path)
            }
        else:
            line["copy"] = f"copy-{len(held)}"
            shutil.copyfile(path, store / str(line["copy"]))
        log.write(json.dumps(line) + "\n")
        log.flush()

    os.fsync = recorded  # type: ignore[assignment]


def _read(store: Path) -> Durable:
    durable = Durable()
    for text in (store / "log").read_text().splitlines():
        line = json.loads(text)
        if "copy" in line:
            durable.files[line["inode"]] = store / line["copy"]
        else:
            durable.names[line["inode"]] = {name: inode for name, (inode, _) in line["names"].items()}
            durable.directories |= {inode for inode, is_directory in line["names"].values() if is_directory}
    return durable


def _build(
    live: Path | None,
    place: Path,
    durable: Durable,
    choose: random.Random,
    *,
    inode: int = 0,
    only: set[str] | None = None,
) -> None:
    """Fill `place` with what a disk could have kept of a directory: `live` is what it was, None if it is gone."""
    here = {entry.name: entry for entry in os.scandir(live)} if live is not None else {}
    before = durable.names.get(live.stat().st_ino if live is not None else inode, {})
    names = {name: entry.inode() for name, entry in here.items()}
    kept = {name: number for name, number in before.items() if names.get(name) == number}
    for name in sorted({*names, *before} - kept.keys()):
        old, new = before.get(name), names.get(name)
        kept_old = old is not None and (old in durable.files or old in durable.directories)
        chosen = choose.choice([old if kept_old else None, new])
        if chosen is not None and chosen not in kept.values():  # a rename leaves one name
            kept[name] = chosen
    for name, number in sorted(kept.items()):
        if only is not None and name not in only:
            continue
        entry = here.get(name) if names.get(name) == number else None
        source = next((Path(found.path) for found in here.values() if found.inode() == number), None)
        is_directory = source.is_dir() if source is not None else number in durable.directories
        if is_directory:
            (place / name).mkdir()
            _build(source, place / name, durable, choose, inode=number)
        elif entry is not None or source is not None or number in durable.files:
            (place / name).write_bytes(_content(source, durable.files.get(number), choose))


def _content(live: Path | None, copy: Path | None, choose: random.Random) -> bytes:
    """What a disk could have kept of a file."""
    synced = copy.read_bytes() if copy is not None else b""
    now = live.read_bytes() if live is not None else synced
    if now == synced:
        return synced
    between = now[: choose.randint(min(len(synced), len(now)), len(now))]
    zeros = synced + bytes(max(0, len(now) - len(synced)))
    return choose.choice([synced, now, between, zeros])
