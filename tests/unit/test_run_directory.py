"""The lock on a run directory: one process at a time."""

import pytest

from bapo.config.errors import ConfigError
from bapo.config.run import Config
from bapo.runs.write import RunDirectory


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
