"""Starts `bapo train` on a Ray cluster of this machine, finds its processes, and does things to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bapo.runs import ledger

RECIPE = {
    "steps": 6,
    "threads": 2,
    "checkpoint_every": 2,
    "rollout.prompts": 8,
    "rollout.responses": 4,
    "rollout.slots": 32,
    "learn.batch_groups": 4,
    "offpolicy.reuse": 2,
    "eval.problems": 8,
    "eval.k": 2,
    "eval.every": 0,
}


def options(recipe):
    return [part for key, value in recipe.items() for part in (f"--{key.replace('_', '-')}", str(value))]


class Run:
    """A command of ours at work."""

    def __init__(self, path, *command, before=(), environment=None, cwd=None):
        """`before`: what comes before our command, such as the place where to run it."""
        self.path = Path(path)
        self.log = self.path.with_name(f"{self.path.name}.log")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "bapo", *command],
                env=environment,
                cwd=cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @classmethod
    def train(cls, path, *, environment=None, cwd=None, **recipe):
        return cls(path, "train", "--out", str(path), *options(RECIPE | recipe), environment=environment, cwd=cwd)

    @classmethod
    def resume(cls, path):
        return cls(path, "resume", str(path))

    def ended(self, seconds=400):
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still at work after {seconds} s:\n{self.said()[-4000:]}") from None

    def said(self):
        return self.log.read_text()

    def finished(self, seconds=400):
        """Wait for an end without an error."""
        assert self.ended(seconds) == 0, self.said()[-4000:]
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()

    def steps(self):
        log = self.path / "timing.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def until(self, condition, seconds=240):
        """Wait until this is true while the run is at work."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.said()[-4000:]}"
            assert time.monotonic() < deadline, f"waited for {seconds} s in vain:\n{self.said()[-4000:]}"
            time.sleep(0.2)
        return found

    def descendants(self):
        """All processes below the controller, by id, with their command lines."""
        parents, names = {}, {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                status = (entry / "stat").read_text()
                names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
        found, edge = {}, {self.process.pid}
        while edge:
            edge = {pid for pid, parent in parents.items() if parent in edge}
            found |= {pid: names[pid] for pid in edge}
        return found

    def actors(self, kind):
        """Process ids of the actors of this class that have started."""
        return [pid for pid, name in self.descendants().items() if name.startswith(f"ray::{kind}")]

    def metrics(self, kind=None):
        lines = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if kind in (None, line["kind"])]

    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    def balance(self, max_staleness=16):
        return ledger.balance(ledger.read(self.path), max_staleness=max_staleness)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=30):
    """Wait until none of these processes is left; returns those that are."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def send(pid, number=signal.SIGKILL):
    """Send a signal to a process that may have ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
