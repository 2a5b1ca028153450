"""What a process has started ends with it, also what does not belong to it any more."""

import os
import subprocess
import sys
import time

from bapo.process.stops import below, processes
from tests.cluster.driving import alive, gone

SLEEPER = "import time; time.sleep(300)"
OWNER = f"""
import os, subprocess, sys, time
inner = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True)
command = [sys.executable, "-m", "bapo.process.stops", str(os.getpid())]
watchdog = subprocess.Popen(command, start_new_session=True)
print(child.pid, watchdog.pid, flush=True)
time.sleep(300)
"""


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_a_killed_owner_leaves_nobody_behind():
    bystander = subprocess.Popen([sys.executable, "-c", SLEEPER])
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        child, watchdog = map(int, owner.stdout.readline().split())
        assert until(lambda: len({pid for pid, _ in below(owner.pid)}) >= 3)  # child, grandchild, watchdog
        time.sleep(2.5)  # the watchdog has looked
        tree = {pid for pid, _ in below(owner.pid)}
        owner.kill()
        owner.wait()
        assert alive(child)  # a session of its own: nobody else would end it
        assert gone(tree) == []
        assert not alive(watchdog)
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()
        owner.stdout.close()


def test_processes_are_known_by_their_beginning():
    found = processes()
    assert any(pid == os.getpid() for pid, _ in found)
    assert all(began >= 0 for _, began in found)
