"""One process at a time, children included, and a note where files cannot be locked."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from bapo.config.errors import ConfigError, PlaceError
from bapo.runs.files import held


def test_only_one_at_a_time_and_free_again_afterwards(tmp_path):
    path = tmp_path / "lock"
    with held(path, busy="first"), pytest.raises(ConfigError, match="taken"), held(path, busy="taken"):
        pass
    with pytest.raises(RuntimeError), held(path, busy="free"):
        raise RuntimeError
    with held(path, busy="free"):
        pass


def test_a_child_that_inherits_the_descriptor_keeps_the_lock(tmp_path):
    path, wait = tmp_path / "lock", "import sys; sys.stdin.read()"
    with held(path, busy="first") as descriptor:
        child = subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE, pass_fds=(descriptor,))
    with pytest.raises(ConfigError, match="a child is left"), held(path, busy="a child is left"):
        pass
    child.communicate()
    with held(path, busy="free"):
        pass


def test_without_locks_a_note_stands_in_for_them(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "lock", busy="never") as descriptor:
        assert descriptor > 0
    assert f"{tmp_path} is on a file system without locks (No locks available)" in capsys.readouterr().err


def test_a_deleted_lock_file_does_not_let_a_second_process_in(tmp_path):
    path = tmp_path / "lock"
    with held(path, busy="first"):
        path.unlink()
        with pytest.raises(ConfigError, match="taken"), held(path, busy="taken"):
            pass


def test_a_fifo_is_not_a_lock(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(PlaceError, match="is a FIFO and not a regular file"), held(tmp_path / "lock", busy="never"):
        pass
