"""vLLM's processes end with the one that holds the engine, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM's environment: make test-integrations")

from bapo.rollout.vllm.start import sockets
from tests.traps import laid
from tests.vllm.engines import tree

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_killing_the_holder_ends_all_its_processes_within_seconds():
    memory = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "tests.vllm.hold_engine"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    try:
        assert any(line.strip() == "ready" for line in holder.stdout), "the engine did not start"
        family = tree(holder.pid)
        titles = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in family]
        assert {title.split("::")[1] for title in titles if title.startswith("VLLM::")} == {"EngineCore", "Worker"}
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in family if alive(pid)] == []
    assert set(Path("/dev/shm").iterdir()) <= memory

    left = list(Path(tempfile.gettempdir()).glob(f"bapo-vllm-{holder.pid}-*"))
    assert len(left) == 1, "a killed process cannot remove its sockets"
    with sockets() as directory:
        assert not left[0].exists()
        assert Path(directory).stat().st_mode & 0o077 == 0, "only this user may connect"
        assert str(os.getpid()) in directory
    assert not Path(directory).exists()


def test_no_file_of_the_current_directory_runs(tmp_path):
    ran = laid(tmp_path, "functools", "collections", "types", "warnings")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "tests.vllm.hold_engine"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    assert holder.stdout is not None
    try:
        assert any(line.strip() == "ready" for line in holder.stdout), f"the engine did not start: {ran()}"
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert ran() == []
