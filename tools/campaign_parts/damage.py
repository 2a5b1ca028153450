"""What happens to files and clocks: full disks, truncation, flipped bits, a wall clock that jumps.

full disk    the case lives on a small tmpfs (without the right to mount one, under a limit of the size of a file). The
             command must end in an error of ours. Then there is room again, and it is continued.
damage       one file of a run that has not ended is cut, emptied, filled with zeros, or has a bit flipped. Resuming it
             must give the twin's result, or an error of ours. If the error names another checkpoint, that one must
             work; if not, the run must go on once the file is put back.
clock        the wall clock that Python shows jumps by up to ten years in both directions, again and again.
"""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from campaign_parts import forks
from campaign_parts.kills import Case, finish_case
from campaign_parts.outcomes import Failed, Kind, judge
from campaign_parts.world import check_equal

DECADE = 10 * 365 * 24 * 3600
ROOM = "256m"
NOT_DAMAGED = {"lock", "campaign_reward.py"}


def full_disk(case: Case) -> None:
    """Run a command where there is too little room, then where there is enough."""
    written = sum(path.stat().st_size for path in (case.twin.path / "run").rglob("*") if path.is_file())
    size = int(case.choose.uniform(0.02, 1.1) * written)
    mounted = _mount(case.path, size)
    case.told.append(f"a disk of {size} bytes" if mounted else f"files of at most {size // 4} bytes")
    logs = case.path.with_name(f"{case.path.name}-logs")
    logs.mkdir()
    case.logs = logs
    try:
        if mounted:
            shutil.copy(case.twin.path / "campaign_reward.py", case.path)
        words, limit = case.setting.words, None if mounted else size // 4
        process = forks.finish(words, cwd=case.path, log=case.log(), seconds=case.twin.deadline, largest_file=limit)
        if judge(words, process.code, process.said()) is Kind.OUR_ERROR:
            case.our_errors += 1
        if mounted:
            _call("mount", "-o", f"remount,size={ROOM}", str(case.path))
        finish_case(case)
        check_equal(case.path, case.twin.path)
    finally:
        if mounted:
            _call("umount", "--lazy", str(case.path))
        shutil.rmtree(logs, ignore_errors=True)


def damaged_file(case: Case) -> None:
    """Damage one file of a run that was killed before its end, then continue it."""
    shutil.copytree(case.twin.path / "run", case.run)
    (case.run / case.setting.result).unlink()
    files = sorted(path for path in case.run.rglob("*") if path.is_file() and path.name not in NOT_DAMAGED)
    path = case.choose.choice(files)
    before = path.read_bytes()
    how = case.choose.choice(sorted(WAYS))
    path.write_bytes(WAYS[how](before, case.choose))
    case.told.append(f"{path.relative_to(case.run)}: {how}")
    words = ("resume", "run") if case.setting.resumes else case.setting.words
    process = forks.finish(words, cwd=case.path, log=case.log(), seconds=case.twin.deadline)
    if judge(words, process.code, process.said()) is Kind.OUR_ERROR:
        case.our_errors += 1
        if "--from" in process.said():
            finish_case(case)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(before)
            again = forks.finish(words, cwd=case.path, log=case.log(), seconds=case.twin.deadline)
            if judge(words, again.code, again.said()) is not None:
                raise Failed(Kind.MISMATCH, f"the file was put back, but `{shlex.join(words)}` says:\n{again.said()}")
    if not case.complete:
        raise Failed(Kind.SILENT, f"there is no {case.setting.result}")
    check_equal(case.path, case.twin.path)


def jumping_clock(case: Case) -> None:
    """Run a command under a clock that jumps, kill it once on the way, and continue it under another such clock."""
    seed = case.choose.random()
    case.told.append(f"a clock that jumps, with the seed {seed}")
    words, seconds = case.setting.words, case.choose.uniform(0, case.twin.seconds)
    process = forks.start(words, cwd=case.path, log=case.log(), before=lambda: _jump(seed))
    process.wait(seconds)
    forks.end(process)
    judge(words, process.code, process.said(), sent=(9,))
    finish_case(case, before=lambda: _jump(seed + 1))
    check_equal(case.path, case.twin.path)


def _flipped(data: bytes, choose: random.Random) -> bytes:
    if not data:
        return b"\1"
    place = choose.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << choose.randrange(8))]) + data[place + 1 :]


WAYS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda data, choose: data[: choose.randrange(len(data) + 1)],
    "empty": lambda data, choose: b"",
    "zeros": lambda data, choose: bytes(len(data)),
    "a flipped bit": _flipped,
}


def _jump(seed: float) -> None:
    """Make the wall clock jump. Runs in the process of the command."""
    choose, true_time, true_localtime = random.Random(seed), time.time, time.localtime  # noqa: S311
    true_strftime = time.strftime

    def now() -> float:
        return true_time() + choose.uniform(-DECADE, DECADE)

    time.time = now
    time.time_ns = lambda: int(now() * 1e9)
    time.localtime = lambda seconds=None: true_localtime(now() if seconds is None else seconds)
    time.strftime = lambda form, moment=None: true_strftime(form, moment or true_localtime(now()))  # type: ignore[assignment]


def _mount(path: Path, size: int) -> bool:
    """Whether a tmpfs of that size is mounted there now."""
    return _call("mount", "-t", "tmpfs", "-o", f"size={max(size, 4096)}", "tmpfs", str(path)) == 0


def _call(*command: str) -> int:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode  # noqa: S603
    except OSError:
        return 127
