"""Ends everything that a process has started when the process ends, even by SIGKILL.

It is started with `python -m bapo.train.cluster.watchdog PID`. A Ray that we start has some twenty processes below
ours. Most of them notice when it is killed; some do not. This process remembers, every second, who is below its owner.
When the owner is gone, it kills those who are left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from bapo.process.tree import Process, below, processes

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""How long the processes may take to end by themselves."""


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
