"""Real `bapo` commands in processes of their own, without the seconds that each would take to import torch.

`start` forks a process that has imported everything already and calls `bapo.cli.main` in the fork. The fork has its own
session, signals, limits, working directory, output and exit code, and it can be killed like any other process. Nothing
here runs torch in the parent, because a process with threads cannot be forked safely.

The parent adopts what a killed command leaves behind (PR_SET_CHILD_SUBREAPER), so that nothing outlives a case unseen.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
PRELOADED = (
    *("bapo.cli", "bapo.train.run", "bapo.train.sft", "bapo.evaluate.evaluation", "bapo.evaluate"),
    *("bapo.report", "bapo.compare", "bapo.diagnose"),
    *("transformers.generation.utils", "transformers.models.llama.modeling_llama"),
    *("transformers.convert_slow_tokenizer", "tyro._backends._tyro_backend"),
)
WATCHED = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
"""Audit events of operations on files. `fsync` and the end of a `write` have none, and are counted by hand."""


@dataclass(frozen=True)
class Trap:
    """A place in the process: its n-th operation on a file of its run. The process stops there and tells the parent."""

    operation: int
    """0: nowhere. The process only counts its operations, and writes their number beside its log."""
    kills: bool = False
    """Whether the process kills itself there. If not, it only tells, and goes on."""


@dataclass
class Running:
    """A command at work."""

    pid: int
    words: tuple[str, ...]
    log: Path
    bell: int
    """A descriptor that becomes readable when the process reaches its trap or ends."""
    code: int | None = None
    """The exit code; negative for a signal."""
    cpu: float = 0.0
    """Seconds of CPU that it used, once it has ended."""

    def poll(self) -> int | None:
        """The exit code, if the process has ended."""
        if self.code is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.code, self.cpu = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
                os.close(self.bell)
        return self.code

    def wait(self, seconds: float) -> int | None:
        """Wait for the end; None if it does not come in time. Time in which it waits for a free CPU does not count."""
        began, queued = time.monotonic(), self._queued()
        while self.poll() is None:
            passed = time.monotonic() - began
            if passed >= seconds and passed - (self._queued() - queued) >= seconds:
                break
            time.sleep(0.01)
        return self.code

    def _queued(self) -> float:
        """For how many seconds it was ready to run and had no CPU. 0 where the system does not say."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def rings(self, seconds: float) -> bool:
        """Wait for the trap. False: it was not reached in time."""
        return bool(select.select([self.bell], [], [], seconds)[0]) and bool(os.read(self.bell, 1))

    def signal(self, number: int) -> bool:
        """Send a signal to the whole process group. False if the process had ended before."""
        if self.poll() is not None:
            return False
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it is so young that it has no group of its own yet
            os.kill(self.pid, number)
        return True

    def said(self) -> str:
        """All that it has written so far."""
        return self.log.read_text(errors="replace")


def prepare() -> None:
    """Import what the commands need, and adopt what they leave behind."""
    for name in PRELOADED:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    alone = len(os.listdir("/proc/self/task")) == 1
    assert alone, "an import has started threads, so forks would not be safe"


def start(
    words: tuple[str, ...],
    *,
    cwd: Path,
    log: Path,
    trap: Trap | None = None,
    largest_file: int | None = None,
    before: Callable[[], None] | None = None,
) -> Running:
    """Start `bapo WORDS` in a directory. All that it says goes to the file `log`.

    `before`: called in the new process before the command.
    """
    sys.stdout.flush()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _become(words, cwd, log, trap, theirs, largest_file, before)
    os.close(theirs)
    return Running(pid, words, log, ours)


def finish(words: tuple[str, ...], *, cwd: Path, log: Path, seconds: float, **options: object) -> Running:
    """Run a command to its end. If it does not end in time, it is killed, and its code is None."""
    process = start(words, cwd=cwd, log=log, **options)  # type: ignore[arg-type]
    if process.wait(seconds) is None:
        end(process)
        process.code = None
    return process


def end(process: Running) -> None:
    """Kill a process and wait until it is gone."""
    process.signal(signal.SIGKILL)
    process.wait(30)


def call(work: Callable[[], None], *, seconds: float = 300) -> int | None:
    """Call a function in a fork; the exit code, or None if it took too long. Its output is ours."""
    sys.stdout.flush()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        os.setsid()
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(theirs)
    process = Running(pid, (), Path(os.devnull), ours)
    if process.wait(seconds) is None:
        end(process)
        return None
    return process.code


def children() -> dict[int, str]:
    """The processes whose parent we are, living or dead, with their state."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            parent, state = _parent_and_state(int(name))
        except (ValueError, OSError):
            continue
        if parent == os.getpid():
            found[int(name)] = state
    return found


def orphans(spared: Collection[int] = ()) -> list[int]:
    """Living processes that commands left behind, which are our children now. Dead ones are reaped here.

    `spared`: children that are not the campaign's.
    """
    ours = {pid: state for pid, state in children().items() if pid not in spared}
    for pid, state in ours.items():
        if state == "Z":
            os.waitpid(pid, os.WNOHANG)
    return [pid for pid, state in ours.items() if state != "Z"]


def descendants(pid: int) -> list[int]:
    """Every process below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        try:
            parents[int(name)] = _parent_and_state(int(name))[0]
        except (ValueError, OSError):
            continue
    below, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        below += new
    return below


def clear_orphans(seconds: float, spared: Collection[int] = ()) -> list[str]:
    """Wait for the processes that were left behind, and kill what stays. Returns the command lines of those killed."""
    until = time.monotonic() + seconds
    while (left := orphans(spared)) and time.monotonic() < until:
        time.sleep(0.05)
    names = []
    for pid in left:
        try:
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (OSError, ChildProcessError):
            continue
    return names


def _parent_and_state(pid: int) -> tuple[int, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), fields[0]


def _become(
    words: tuple[str, ...],
    cwd: Path,
    log: Path,
    trap: Trap | None,
    bell: int,
    largest_file: int | None,
    before: Callable[[], None] | None,
) -> None:
    """Be the command, in a fork. Does what the interpreter does around a program, and never returns."""
    code = 70
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGPIPE else signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, flags, path in ((0, os.O_RDONLY, os.devnull), (1, os.O_WRONLY, log), (2, os.O_WRONLY, log)):
            opened = os.open(path, flags | (os.O_CREAT | os.O_APPEND if flags else 0), 0o666)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        sys.path.insert(0, str(cwd))
        sys.argv = ["bapo", *words]
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        if before is not None:
            before()
        if trap is not None:
            _set(trap, bell, cwd, log)
        code = _program(words)
    finally:
        os._exit(code)


def _program(words: tuple[str, ...]) -> int:
    """The exit code of the command. An exception is shown as the interpreter shows it."""
    from bapo.cli import main

    code: object = 0
    try:
        main(list(words))
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(code, int) or code is None:
        return code or 0
    print(code, file=sys.stderr)
    return 1


def operations(log: Path) -> Path:
    """Where a process with a trap nowhere writes how many operations it made."""
    return log.with_suffix(".operations")


def _set(trap: Trap, bell: int, cwd: Path, log: Path) -> None:
    """Count the operations on files below the working directory, and act at the n-th."""
    inside, seen = str(cwd), 0
    fsync = os.fsync

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == trap.operation:
            os.write(bell, b"!")
            if trap.kills:
                os.killpg(0, signal.SIGKILL)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event not in WATCHED:
            return
        path = arguments[0]
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if isinstance(path, str) and (not path.startswith("/") or path.startswith(inside)):
            count()

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)
        count()

    if not trap.operation:
        atexit.register(lambda: operations(log).write_text(str(seen)))
    os.fsync = counted  # type: ignore[assignment]
    sys.addaudithook(audit)
