"""The directory of a run: one process at a time, files on the disk, logs that notice when somebody changes them."""

import json
import os

import pytest

from bapo.config import placement
from bapo.config.errors import CheckpointError, ConfigError
from bapo.config.run import Config
from bapo.runs import files, history
from bapo.runs.read import Defect, read_run
from bapo.runs.write import Log, RunDirectory, unused, why_not_out


def begun(out):
    with RunDirectory.begun(Config(out=str(out))) as run:
        return run


def test_a_directory_is_held_once_and_free_again_afterwards(tmp_path):
    run = begun(tmp_path / "run")
    with run.held():
        with pytest.raises(ConfigError, match=f"another process is at work on the run in {run.path}"), run.held():
            pass
        assert run.config(Config).out == str(run.path)  # reading needs no lock
    with pytest.raises(RuntimeError), run.held():
        raise RuntimeError
    with run.held():
        pass


def test_two_starts_in_one_second_get_two_directories(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "20300101-000000")
    paths = [begun(f"{tmp_path}/{{time}}").path.name for _ in range(3)]
    assert paths == ["20300101-000000", "20300101-000000-2", "20300101-000000-3"]


def test_only_a_directory_without_a_checkpoint_and_without_logs_is_used_again(tmp_path):
    run = begun(tmp_path / "run")
    (run.path / "checkpoints" / "step-000000.partial").mkdir(parents=True)
    assert unused(run.path)
    assert begun(tmp_path / "run").path == run.path
    assert not list(run.path.rglob("*.partial"))
    with run.held(), pytest.raises(ConfigError, match="another process is at work"):
        begun(tmp_path / "run")
    run.append("metrics.jsonl", {"step": 1})
    run.close()
    with pytest.raises(ConfigError, match="exists already"):
        begun(tmp_path / "run")


def test_an_empty_directory_is_used_and_one_with_something_else_is_not(tmp_path):
    """A power cut can leave an empty one: its name is on the disk, and what was in it is not."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert why_not_out(str(tmp_path / "empty")) is None
    assert begun(tmp_path / "empty").path == tmp_path / "empty"
    with pytest.raises(ConfigError, match="exists already"):
        begun(tmp_path / "other")
    assert "exists already" in why_not_out(str(tmp_path / "other"))
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    inode = lambda descriptor: os.fstat(descriptor).st_ino  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda d: (events.append(("fsync", inode(d))), fsync(d)))
    monkeypatch.setattr(os, "rename", lambda a, b: (rename(a, b), events.append(("rename", os.stat(b).st_ino))))
    RunDirectory(tmp_path).write("config.json", {"a": 1})
    file, directory = (tmp_path / "config.json").stat().st_ino, tmp_path.stat().st_ino
    assert events == [("fsync", file), ("rename", file), ("fsync", directory)]


def test_the_model_is_on_the_disk_before_the_run_says_that_it_is_complete(tmp_path, monkeypatch):
    synced = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: (synced.add(os.fstat(d).st_ino), fsync(d)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    run = RunDirectory(tmp_path)
    run.seal()
    assert {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("model*"))} <= synced
    run.write("summary.json", {"updates": 3})
    assert run.complete() == ({"updates": 3}, None)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    assert run.complete() == (None, "model/model.safetensors is not as it was written")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert run.complete() == (None, "model/model.safetensors is missing")
    (tmp_path / "summary.json").write_bytes(b"")
    assert run.complete() == (None, "summary.json cannot be read: it is empty")


def test_a_model_without_checksums_is_not_complete(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    assert RunDirectory(tmp_path).complete() == (None, "model.sha256 is missing")


def test_a_log_that_is_deleted_during_a_run_is_written_again(tmp_path, capsys):
    log = Log(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    log.path.unlink()
    log.append({"step": 2})
    log.path.unlink()
    log.flush()
    log.close()
    assert log.path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert log.flaw(log.size, log.hash.hexdigest()) is None
    assert capsys.readouterr().err.count("was deleted while the run was at work. It was written again.") == 2


def test_a_log_that_is_cut_or_exchanged_during_a_run_stops_it(tmp_path):
    log = Log(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    os.truncate(log.path, 3)
    with pytest.raises(CheckpointError, match="has 3 bytes, but this run wrote 12"):
        log.append({"step": 2})
    (tmp_path / "other").write_text('{"step": 1}\n')
    (tmp_path / "other").rename(log.path)
    with pytest.raises(CheckpointError, match="was replaced by another file"):
        log.flush()
    log.close()


def test_a_log_goes_on_from_where_it_was_cut(tmp_path):
    log = Log(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    size, digest = log.size, log.hash.hexdigest()
    log.append({"step": 2})
    assert log.flaw(size, digest) is None
    log.cut(size)
    assert (log.size, log.hash.hexdigest()) == (size, digest)
    log.append({"step": 3})
    log.close()
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 3]
    assert log.flaw(log.size, log.hash.hexdigest()) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("\0\0", "it is empty"),
        ("[]", "it is not a JSON object"),
        ('{"a":' * 100_000, "it is nested too deeply"),
    ],
)
def test_a_file_that_holds_no_object_is_told_in_words(text, why, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        files.read_object(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "timing.jsonl", "summary.json"])
def test_reading_does_not_wait_for_a_fifo(name, tmp_path):
    run = begun(tmp_path / "run")
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    assert isinstance(read_run(run.path, finished=False), Defect)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "99"}, 8),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 8),
    ],
)
def test_a_users_cap_on_threads_is_honoured(variables, threads, monkeypatch):
    monkeypatch.setattr(placement, "available_cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert placement.placed("cpu", "float32", 0)[2] == threads
    assert placement.placed("cpu", "float32", 5)[2] == 5


def test_a_line_of_the_history_that_a_kill_cut_does_not_take_the_next_one_with_it(tmp_path):
    history.record(tmp_path, "start")
    with (tmp_path / history.FILE).open("a") as file:
        file.write('{"event": "res')
    history.record(tmp_path, "resume")
    assert [line["event"] for line in history.read(tmp_path)] == ["start", "resume"]
