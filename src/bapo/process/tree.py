"""The processes below a process: who they are, and how all of them end.

A process is known by its id and the time it began, so a later process with the same id is safe. Where there is no
/proc, nobody is found; the children of ours then end because their connections to us do.

    python -P -m bapo.process.tree PID

is a watchdog: it ends everything that a process has started when that process ends, even by SIGKILL. A Ray that we
start has some twenty processes below ours. Most of them notice when it is killed; some do not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SETTLE_SECONDS = 0.02
"""How long the kernel may take to hand the children of a killed process to us."""
LOOK_SECONDS = 1.0
"""How often the watchdog looks who is below its owner."""
GRACE_SECONDS = 5.0
"""How long the processes below a lost owner may take to end by themselves."""
_PR_SET_CHILD_SUBREAPER = 36

Process = tuple[int, int]
"""An id, and when the process began, in the kernel's clock ticks."""


def processes() -> dict[Process, int]:
    """Every process of this machine, with the id of its parent."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(entry.name), int(fields[19])] = int(fields[1])
    return found


def below(owner: int) -> set[Process]:
    """All processes below this one, except the process that asks."""
    parents = processes()
    found: set[Process] = set()
    edge = {owner}
    while edge := {process[0] for process, parent in parents.items() if parent in edge and process not in found}:
        found |= {process for process in parents if process[0] in edge}
    return {process for process in found if process[0] != os.getpid()}


def end_all_below(*, seconds: float) -> None:
    """Kill every process below this one, and those that they start meanwhile; gives up after so many seconds."""
    with suppress(OSError, AttributeError):  # not on Linux
        import ctypes  # here: it imports struct, and the current directory may still be on the path when bapo begins

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # children of the killed become ours
    until = time.monotonic() + seconds
    while (left := below(os.getpid())) and time.monotonic() < until:
        _kill(left)
        time.sleep(SETTLE_SECONDS)


def _kill(found: Iterable[Process]) -> None:
    for pid, _ in found:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def watch(owner: int) -> None:
    """Wait for the end of this process, then end everybody that it had started."""
    itself = [process for process in processes() if process[0] == owner]
    known: set[Process] = set()
    while itself and itself[0] in processes():
        known |= below(owner)
        known &= processes().keys()
        time.sleep(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    _kill(known & processes().keys())


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its owner hears them, too, and ends first
    watch(int(sys.argv[1]))
