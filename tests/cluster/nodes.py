"""Machines of a Ray cluster, each in a network namespace of this one, with cables that can be pulled.

Every node has an address of its own on a bridge. What runs in it, and the process ids, can be seen from outside. Needs
root, and the command `ip`.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.driving import RECIPE, Run, gone, options, send

BRIDGE, NET, PORT = "bapo-br", "10.87.0", 6380


def cannot():
    """Why there can be no nodes here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no command `ip` (iproute2)"
    probe = subprocess.run(["ip", "netns", "add", "bapo-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "bapo-probe"], capture_output=True)
    return f"`ip netns add` fails: {probe.stderr.strip()}" if probe.returncode else None


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Node:
    """A machine with its own address, which can be started, cut off and started again."""

    def __init__(self, number, environment, scratch):
        self.number, self.environment, self.scratch = number, environment, scratch
        self.name, self.cable, self.address = f"bapo-n{number}", f"bapo-c{number}", f"{NET}.{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self.cable, "master", BRIDGE, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.connect()
        ip("-n", self.name, "link", "set", "lo", "up")

    def command(self, *words):
        """How to run this on the node."""
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, cpus, *more, **environment):
        """Start Ray here. Node 1 is the head."""
        role = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if self.number != 1:
            role = [f"--address={NET}.1:{PORT}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *more]
        ray += [f"--node-ip-address={self.address}", f"--num-cpus={cpus}", f"--temp-dir={self.scratch}"]
        done = subprocess.run(
            self.command(*ray, "--disable-usage-stats"),
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return self

    def cut(self):
        """Pull the cable. Nobody is told: packets are lost."""
        ip("-n", self.name, "link", "set", "eth0", "down")

    def connect(self):
        ip("-n", self.name, "link", "set", "eth0", "up")

    def isolate(self, on=True):
        """Cut off, or connect again, from the other nodes for which the same was done; node 1 is still in reach."""
        subprocess.run(["bridge", "link", "set", "dev", self.cable, "isolated", "on" if on else "off"], check=True)

    def processes(self, kind="ray::"):
        """Processes of this node whose title begins like this, by id."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split()
        titles = {}
        for pid in map(int, found):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            titles[pid] = title.replace(b"\0", b" ").decode(errors="replace").strip()
        return {pid: title for pid, title in titles.items() if title.startswith(kind)}

    def stop(self):
        """End everything that runs on it."""
        deadline = time.monotonic() + 30
        while (left := self.processes("")) and time.monotonic() < deadline:
            for pid in left:
                send(pid, signal.SIGKILL)
            gone(left, seconds=1)

    def remove(self):
        self.stop()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.cable], capture_output=True)


class Nodes:
    """A few machines, connected by a switch."""

    def __init__(self, count):
        self.scratch = Path(f"/tmp/bapo-nodes-{os.getpid()}")  # short: Ray's sockets have at most 107 characters
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_health_check_initial_delay_ms": "1000",  # a node is dead after about 15 s instead of 60 s
            "RAY_health_check_period_ms": "2000",
            "RAY_health_check_timeout_ms": "4000",
            "RAY_health_check_failure_threshold": "3",
        }
        self.members = []
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number in range(1, count + 1):
            self.members.append(Node(number, self.environment, self.scratch / str(number)))

    def __getitem__(self, number):
        return self.members[number - 1]

    def run(self, path, *command):
        """A command of ours on node 1."""
        return Run(path, *command, before=self[1].command(), environment=self.environment)

    def train(self, path, **recipe):
        recipe = RECIPE | {"cluster.address": f"{NET}.1:{PORT}"} | recipe
        return self.run(path, "train", "--out", str(path), *options(recipe))

    def close(self):
        for node in self.members:
            node.remove()
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
