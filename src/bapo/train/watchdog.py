"""Ends everything that a process has started when the process ends, even by SIGKILL: python -m bapo.train.watchdog PID.

A Ray that we start has some twenty processes below ours. Most of them notice when it is killed; some do not. This
process remembers, every second, who is below its owner. When the owner is gone, it kills those who are left. A process
is known by its id and the time it began, so a later process with the same id is safe.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""How long the processes may take to end by themselves."""

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
    """All processes below this one, except this process itself."""
    parents = processes()
    found: set[Process] = set()
    edge = {owner}
    while edge := {process[0] for process, parent in parents.items() if parent in edge and process not in found}:
        found |= {process for process in parents if process[0] in edge}
    return {process for process in found if process[0] != os.getpid()}


def watch(owner: int) -> None:
    """Wait for the end of this process, then end everybody that it had started."""
    itself = [process for process in processes() if process[0] == owner]
    known: set[Process] = set()
    while itself and itself[0] in processes():
        known |= below(owner)
        known &= processes().keys()
        time.sleep(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    for pid, _ in known & processes().keys():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its owner hears them, too, and ends first
    watch(int(sys.argv[1]))
