"""The lock on a run directory: one process at a time, and none where files cannot be locked."""

import errno
import fcntl

import pytest

from bapo.config import Config, ConfigError
from bapo.train.directory import RunDirectory


def test_a_directory_is_held_once_and_free_again_afterwards(tmp_path):
    run = RunDirectory.create(Config(out=str(tmp_path / "run")))
    with run.held():
        with pytest.raises(ConfigError, match=f"another process is at work on the run in {run.path}"), run.held():
            pass
        assert run.config(Config).out == str(run.path)  # reading needs no lock
    with pytest.raises(RuntimeError), run.held():
        raise RuntimeError
    with run.held():
        pass


def test_without_locks_a_note_stands_in_for_them(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run, worked = RunDirectory(tmp_path), False
    with run.held():
        worked = True
    assert worked
    assert f"{tmp_path} is in a file system without locks (No locks available)" in capsys.readouterr().err
