"""A run tells trackers what its own files say, and goes on when one fails: read back with the real libraries."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict

import pytest

from bapo.config.errors import ConfigError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.preflight import examine
from bapo.train.trackers import MAKERS, Points, Sender, Tracked, Trackers, points, tracking
from tests.processes import bapo

NAMES = ("tensorboard", "wandb", "trackio", "mlflow")
SMALL = [
    *("--device", "cpu", "--threads", "1", "--rollout.prompts", "8", "--rollout.responses", "4"),
    *("--rollout.max-tokens", "56", "--eval.problems", "4", "--eval.k", "2", "--eval.every", "0"),
    *("--offpolicy.reuse", "2", "--objective.name", "bapo"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run of two steps that all trackers followed, then resumed after the first one for three in all."""
    root = tmp_path_factory.mktemp("told")
    env = {**os.environ, "TRACKIO_DIR": str(root / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{root / 'mlflow.db'}"}
    out = root / "run"
    words = [*SMALL, "--steps", "2", "--checkpoint-every", "1", "--log.to", *NAMES, "--log.project", "mine"]
    first = bapo("train", *words, "--out", out, env=env)
    assert first.returncode == 0, first.stderr
    again = bapo("resume", out, "--steps", "3", "--from", "step-000001", env=env)  # the second step is repeated
    assert again.returncode == 0, again.stderr
    for said in (first, again):
        assert "wandb:" not in said.stdout + said.stderr
        assert "Trackio" not in said.stdout + said.stderr
        assert "mlflow" not in said.stdout + said.stderr
    return root


@pytest.fixture(scope="module")
def expected(told):
    """The curves in the files of the run: name -> place -> value. A literal reading of them."""
    curves = defaultdict(dict)
    for line in map(json.loads, (told / "run" / "metrics.jsonl").read_text().splitlines()):
        kind = line["kind"]
        at = line["version"] if kind == "update" else line["step"]
        for key, value in line.items():
            if key in ("kind", "step", "version", "eval/temperature") or isinstance(value, list):
                continue
            if kind == "eval":
                curves[f"eval/{line['eval/temperature']:g}/{key[5:]}"][at] = value
            else:
                curves[key if "/" in key else f"{kind}/{key}"][at] = value
    for line in map(json.loads, (told / "run" / "timing.jsonl").read_text().splitlines()):
        for key in line.keys() - {"step"}:
            curves[f"timing/{key}"][line["step"]] = line[key]
    assert list(curves["rollout/reward"]) == [1, 2, 3]
    assert len(curves["update/loss"]) >= 3
    assert len(curves) > 60
    return curves


def assert_curves(found, expected, *, rel=1e-12):
    """`found`: name -> (place, value), in the order in which they were sent.

    The evaluation after the second step was sent, too. The resumed run has cut it from its log, because it takes a
    third step; TensorBoard hides it.
    """
    assert set(found) == set(expected)
    for name, curve in expected.items():
        sent = dict(found[name])
        more = {2} if name.startswith("eval/") else set()
        assert set(curve) <= set(sent) <= set(curve) | more, name
        assert {at: sent[at] for at in curve} == pytest.approx(curve, rel=rel), name


def printed(script, **env):
    """What a program of its own prints: trackio looks for its store when it is imported, and MLflow warns."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_tensorboard_has_every_curve_once(told, expected):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for axis in ("step", "update"):
        events = EventAccumulator(str(told / "run" / "tensorboard" / axis), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            found[name] = [(event.step, event.value) for event in events.Scalars(name)]
    assert_curves(found, expected, rel=1e-6)  # its values are 32-bit
    for name in ("rollout/reward", "timing/seconds", "update/loss"):
        assert [at for at, _ in found[name]] == sorted(expected[name]), name  # each once


def test_wandb_has_every_curve_under_one_identity_and_offline(told, expected):
    found, runs = defaultdict(list), set()
    files = sorted((told / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # the start and the resume
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                runs.add((record.run.project, record.run.run_id, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                axis = "update" if "update" in values else "step"
                at = values[axis]
                for name, value in values.items():
                    if not name.startswith("_") and name not in ("step", "update"):
                        found[name].append((at, value))
    (identity,) = runs
    assert identity[0] == "mine"
    assert identity[1] == json.loads((told / "run" / "history.jsonl").read_text().splitlines()[0])["id"]
    assert_curves(found, expected)


def wandb_records(path):
    """The records of W&B's file: a header of seven bytes, then LevelDB's log format with a protobuf in each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


WANDB = """
import json, os, sys
os.chdir(sys.argv[1])
from pathlib import Path
from bapo.train.trackers import MAKERS, Points, Tracked
tracker = MAKERS["wandb"](Tracked(Path(sys.argv[2]), "id", "mine", {}, step=0, version=0))
tracker.send(Points("step", 1, {"a": 1.0}))
tracker.close(True)
"""


def test_wandb_runs_nothing_of_a_repository_in_the_current_directory(tmp_path):
    here, mark, hook = tmp_path / "here", tmp_path / "ran", tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    (here / "wandb").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (here / "wandb/settings").write_text("[default]\nsave_code = true\ndisable_git = false\n")
    (here / "main.py").write_text(WANDB)
    git = ["git", "-C", str(here), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "main.py"], ["commit", "-qm", "a"], ["config", "core.fsmonitor", str(hook)]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "diff"], check=True)
    assert mark.exists()  # so it would be seen
    mark.unlink()
    subprocess.run([sys.executable, here / "main.py", here, tmp_path / "run"], check=True)
    assert sorted((tmp_path / "run/wandb").glob("offline-run-*/run-id.wandb"))
    assert not mark.exists()


TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("mine")
print(json.dumps(SQLiteStorage.get_logs("mine", name)))
"""
MLFLOW = """
import json
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
curves = {
    name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
    for name in run.data.metrics
}
print(json.dumps([run.info.status, run.data.params, curves]))
"""


def test_trackio_has_every_curve_in_one_run(told, expected):
    found = defaultdict(list)
    for line in printed(TRACKIO, TRACKIO_DIR=str(told / "trackio")):
        for name, value in line.items():
            if name in expected:
                found[name].append((line["step"], value))
    assert_curves(found, expected)


def test_mlflow_has_every_curve_in_one_run_with_its_settings(told, expected):
    status, settings, found = printed(MLFLOW, MLFLOW_TRACKING_URI=f"sqlite:///{told / 'mlflow.db'}")
    assert (status, settings["offpolicy.reuse"], settings["log.project"]) == ("FINISHED", "2", "mine")
    assert_curves(found, expected)


def test_only_finite_numbers_become_points_and_updates_have_an_axis_of_their_own():
    line = {
        "kind": "update",
        "step": 3,
        "version": 9,
        "loss": 0.5,
        "low": [0.8],
        "grad_norm": float("nan"),
        "tokens": 7,
    }
    assert points(line) == Points("update", 9, {"update/loss": 0.5, "update/tokens": 7.0})
    assert points({"kind": "timing", "step": 3, "seconds": 2.0}) == Points("step", 3, {"timing/seconds": 2.0})
    cold = {"kind": "eval", "step": 0, "version": 0, "eval/avg": 0.25, "eval/temperature": 0.0}
    assert points(cold) == Points("step", 0, {"eval/0/avg": 0.25})


class Breaks:
    """A tracker whose disk is full after one line."""

    def __init__(self):
        self.taken = 0

    def send(self, points):
        self.taken += 1
        if self.taken > 1:
            raise OSError(28, "No space left on device")

    def close(self, ok):
        raise AssertionError("it was left alone")


def sent(trackers, *numbers):
    trackers.send(*({"kind": "timing", "step": step, "seconds": 1.0} for step in numbers))


def test_a_tracker_that_fails_is_named_once_and_the_others_go_on():
    said, broken, sound = [], Breaks(), Breaks()
    sound.taken = -10
    sound.close = lambda ok: said.append(f"closed, {ok}")
    trackers = Trackers([Sender("wandb", broken, said.append), Sender("mlflow", sound, said.append)])
    sent(trackers, 1, 2, 3)
    trackers.close(True, 60)
    assert (broken.taken, sound.taken) == (2, -7)
    assert sorted(said)[0] == "closed, True"
    (told,) = sorted(said)[1:]
    assert told.startswith("log.to: wandb failed, so it gets nothing more: OSError: [Errno 28] No space left")


class Slow:
    """A tracker whose server answers when it is told to."""

    def __init__(self):
        self.answers, self.taken, self.closed = threading.Event(), [], None

    def send(self, points):
        assert self.answers.wait(60)
        self.taken.append(points.at)

    def close(self, ok):
        self.closed = ok


def test_a_slow_server_keeps_nobody_waiting_and_gets_all_lines_in_order():
    said, slow = [], Slow()
    trackers = Trackers([Sender("mlflow", slow, said.append)])
    began = time.monotonic()
    sent(trackers, *range(50))
    assert time.monotonic() - began < 1
    assert slow.taken == []
    threading.Timer(0.2, slow.answers.set).start()
    trackers.close(True, 60)
    assert (slow.taken, slow.closed, said) == ([*range(50)], True, [])


def test_what_a_server_did_not_take_in_time_is_counted(monkeypatch):
    said, slow = [], Slow()
    monkeypatch.setattr("bapo.train.trackers.MOST_WAITING", 3)
    trackers = Trackers([Sender("mlflow", slow, said.append)])
    sent(trackers, *range(10))
    began = time.monotonic()
    trackers.close(False, 0.3)
    assert time.monotonic() - began < 5
    assert said == ["log.to: mlflow is too slow, so 10 lines did not reach it. The run's own files have everything."]
    slow.answers.set()  # what it does from now on is no news
    until = time.monotonic() + 10
    while slow.closed is None and time.monotonic() < until:
        time.sleep(0.01)
    assert (slow.closed, len(said)) == (False, 1)
    assert 3 <= len(slow.taken) <= 4  # one was taken out of the queue before it was full


def test_a_run_whose_tracker_cannot_start_goes_on_without_it(tmp_path):
    out, env = tmp_path / "run", {**os.environ, "MLFLOW_TRACKING_URI": "nonsense://x"}
    words = [*SMALL, "--steps", "1", "--log.to", "tensorboard", "mlflow", "--out", out]
    refused = bapo("train", *words, env=env)
    assert refused.returncode == 2
    assert "log.to: mlflow cannot start: " in refused.stderr
    assert f"`bapo resume {out}` goes on" in refused.stderr
    resumed = bapo("resume", out, "--log.to", "tensorboard")
    assert resumed.returncode == 0, resumed.stderr
    assert (out / "summary.json").exists()


def test_no_message_about_a_tracker_holds_a_password(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:pass%40word@host/db")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2hunter2")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    said = []

    def failing(_run):
        raise RuntimeError(
            "postgresql://me:pass%40word@host/db: login of pass@word failed; hunter2hunter2, 0123456789abcdef; "
            "http://a:b:c/d@e@f:80/x and http://host:80/y"
        )

    monkeypatch.setitem(MAKERS, "mlflow", failing)
    run = Tracked(tmp_path, "id", "bapo", {}, 0, 0)
    with pytest.raises(ConfigError) as refused, tracking(["mlflow"], run, said.append):
        pass

    class Fails:
        def send(self, points):
            failing(None)

        def close(self, ok):
            failing(None)

    trackers = Trackers([Sender("wandb", Fails(), said.append)])
    sent(trackers, 1)
    trackers.close(True, 60)
    for text in (str(refused.value), *said):
        for secret in ("pass%40word", "pass@word", "hunter2", "0123456789abcdef", ":b", "c/d"):
            assert secret not in text, text
        assert "postgresql://me:***@host/db" in text
        assert "http://host:80/y" in text
    assert said


def test_the_lock_of_mlflow_is_in_a_directory_of_this_user_alone(tmp_path, monkeypatch):
    from bapo.train.trackers import _one_at_a_time

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    with _one_at_a_time("mlflow"):
        (place,) = (path for path in tmp_path.iterdir() if path != outside)
        assert place.stat().st_mode & 0o777 == 0o700
    (place / "mlflow.lock").unlink()
    (place / "mlflow.lock").symlink_to(outside)
    with pytest.raises(OSError, match="is a link"), _one_at_a_time("mlflow"):
        pass
    (place / "mlflow.lock").unlink()
    place.chmod(0o777)
    with pytest.raises(OSError, match="not a directory of this user alone"), _one_at_a_time("mlflow"):
        pass
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a directory of this user alone"), _one_at_a_time("mlflow"):
        pass
    assert outside.read_bytes() == b"mine"


def test_a_run_that_does_not_come_to_its_end_is_not_called_finished(tmp_path):
    said, sound = [], Breaks()
    sound.close = said.append
    run = Tracked(tmp_path, "id", "mine", {}, step=0, version=0)

    def stopped():
        with tracking([], run, print) as trackers:
            trackers.senders.append(Sender("mlflow", sound, print))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with tracking([], run, print) as trackers:
        trackers.senders.append(Sender("mlflow", sound, print))
    assert said == [False, True]


def test_ctrl_c_ends_the_wait_for_a_slow_server():
    slow = Slow()
    trackers = Trackers([Sender("mlflow", slow, print)])
    sent(trackers, 1)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trackers.close(True, 60)
    assert time.monotonic() - began < 30
    slow.answers.set()


def test_what_is_not_installed_is_said_before_anything_is_loaded(monkeypatch):
    config = parse(Config, {"log": {"to": ["wandb", "mlflow", "wandb"]}}, source="recipe")
    monkeypatch.setattr(examine, "find_spec", lambda name: None)
    wrong = examine.examine(config).wrong
    assert "log.to='wandb' needs wandb, which is not installed. Install it with: pip install 'bapo[wandb]'" in wrong
    assert any(line.startswith("log.to='mlflow' needs mlflow") for line in wrong)
    assert "log.to names 'wandb' twice. Name it once." in wrong
    with pytest.raises(ConfigError, match=r"log\.to.*choose 'tensorboard', 'wandb', 'trackio' or 'mlflow'"):
        parse(Config, {"log": {"to": ["tensorbord"]}}, source="recipe")
    assert set(MAKERS) == set(NAMES)
