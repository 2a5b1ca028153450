"""What a run may go on from: its own checkpoints, with its own settings and logs; and what is done about the rest."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bapo as bapo_package
from bapo.config.errors import CheckpointError
from bapo.config.run import Config
from bapo.train.run import Training, resume, start
from tests.processes import bapo

RUN = [
    *("--device", "cpu", "--steps", "4", "--threads", "1", "--checkpoint-every", "2"),
    *("--rollout.prompts", "4", "--rollout.responses", "4", "--rollout.max-tokens", "48", "--learn.batch-groups", "4"),
    *("--offpolicy.reuse", "2", "--eval.problems", "2", "--eval.k", "2", "--eval.every", "3"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    result = bapo("train", *RUN, "--out", out)
    assert result.returncode == 0, result.stderr
    assert json.loads((out / "summary.json").read_text())["updates"] > 4
    return out


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """The same run again, under another name, with all its checkpoints."""
    out = tmp_path_factory.mktemp("twin") / "run"
    result = bapo("train", *RUN, "--checkpoint-keep", "9", "--out", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def stopped(whole, tmp_path):
    """A run that was killed after its last checkpoint."""
    out = shutil.copytree(whole, tmp_path / "run")
    (out / "summary.json").unlink()
    return out


def change(path, **values):
    config = json.loads(path.read_text())
    for key, value in values.items():
        table, _, name = key.rpartition("__")
        (config[table] if table else config)[name] = value
    path.write_text(json.dumps(config))


def contents(run):
    """Every file of a run but its lock."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}


def refused(run, *words):
    """The message of a resume that fails with exit code 3 and changes nothing."""
    before = contents(run)
    result = bapo("resume", run, *words)
    assert (result.returncode, "Traceback" in result.stderr) == (3, False), result.stderr
    assert contents(run) == before
    return result.stderr


def assert_same_run(out, expected):
    for name in ("metrics.jsonl", "rollouts.jsonl", "ledger.jsonl"):
        assert (out / name).read_bytes() == (expected / name).read_bytes()
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (out, expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_screen_shows_the_step_of_the_checkpoint_before_it_is_loaded(stopped, monkeypatch):
    shown = []
    watched = Training.watched

    def look(job, log):
        shown.append((log.view.current, job.done))
        watched(job, log)

    monkeypatch.setattr(Training, "watched", look)
    resume(stopped, plain=True, source="step-000002")
    assert shown == [(2, 0)]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"learn__lr": 0.5}, "learn.lr is 0.5 now, and was "),
        ({"seed": 3}, "seed is 3 now, and was 0"),
        ({"objective__name": "gspo"}, "objective.name is 'gspo' now, and was 'brake'"),
    ],
)
def test_an_edited_setting_is_refused_by_name(edit, message, stopped):
    change(stopped / "config.json", **edit)
    told = refused(stopped)
    assert message in told
    assert "start a new run with them" in told
    assert "What may change on the way: steps, " in told


def test_settings_that_are_meant_to_change_are_accepted_and_recorded(stopped):
    result = bapo("resume", stopped, "--steps", "5", "--eval.every", "2")
    assert result.returncode == 0, result.stderr
    assert "changed for the steps to come: eval.every from 3 to 2, steps from 4 to 5" in result.stdout
    assert json.loads((stopped / "config.json").read_text())["steps"] == 5
    lines = [json.loads(line) for line in (stopped / "history.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "resume"]
    assert lines[1]["changed"] == {"eval.every": [3, 2], "steps": [4, 5]}
    assert lines[0]["id"] == lines[1]["id"]
    card = (stopped / "model" / "README.md").read_text()
    assert "- after 4: eval.every from 3 to 2, steps from 4 to 5" in card
    assert len((stopped / "timing.jsonl").read_text().splitlines()) == 5
    assert "learn.lr is 0.5 now" in refused_with_summary(stopped, "--learn.lr", "0.5")


def refused_with_summary(run, *words):
    result = bapo("resume", run, *words)
    assert result.returncode == 3, result.stderr
    assert (run / "summary.json").exists()
    return result.stderr


def test_fewer_steps_than_were_taken_are_refused(stopped):
    assert "steps=3, but step-000004 has taken 4 already" in refused(stopped, "--steps", "3")


def test_a_checkpoint_of_another_run_is_refused_and_the_logs_stay(stopped, twin):
    shutil.rmtree(stopped / "checkpoints" / "step-000004")
    shutil.copytree(twin / "checkpoints" / "step-000004", stopped / "checkpoints" / "step-000004")
    told = refused(stopped)
    assert "step-000004 belongs to another run" in told
    assert f"bapo resume {stopped} --from step-000002" in told


@pytest.mark.parametrize("manifest", ["{}", "[]", "", '{"state.json": "0"}'])
def test_a_manifest_that_does_not_name_all_files_is_refused(manifest, stopped):
    (stopped / "checkpoints" / "step-000004" / "manifest.json").write_text(manifest)
    told = refused(stopped)
    assert "step-000004 is damaged" in told
    assert f"To resume from it: `bapo resume {stopped} --from step-000002`." in told


@pytest.mark.parametrize("missing", [("run", "log_digests"), ("vocabulary",), ("ranks",)])
def test_a_checkpoint_whose_state_says_too_little_is_refused(stopped, missing):
    newest = stopped / "checkpoints" / "step-000004"
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps({key: state[key] for key in state if key not in missing}))
    seal(newest)
    assert f"is damaged: state.json does not say {' and '.join(missing)}" in refused(stopped)


def test_a_checkpoint_without_a_configuration_is_refused(stopped):
    newest = stopped / "checkpoints" / "step-000004"
    (newest / "config.json").unlink()
    seal(newest)
    assert "is damaged: manifest.json has no checksum of config.json" in refused(stopped)


def test_a_state_of_another_version_is_refused_in_words(stopped):
    newest = stopped / "checkpoints" / "step-000004"
    state = json.loads((newest / "state.json").read_text())
    del state["progress"]["failing"]
    (newest / "state.json").write_text(json.dumps(state))
    seal(newest)
    assert (
        "is not the state of such a run in this version of bapo: ValueError: progress.failing: Field required"
        in refused(stopped)
    )


def seal(checkpoint):
    from hashlib import sha256

    files = [path for path in sorted(checkpoint.iterdir()) if path.name != "manifest.json"]
    (checkpoint / "manifest.json").write_text(
        json.dumps({path.name: sha256(path.read_bytes()).hexdigest() for path in files})
    )


def damage_line(path):
    data = bytearray(path.read_bytes())
    data[1] = ord("#")
    path.write_bytes(data)


def reorder(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damage_line, "is damaged: line 1 is not a JSON object"),
        (reorder, "was changed: its lines are not those that the run wrote"),
        (os.unlink, "is missing"),
    ],
)
def test_a_log_that_is_not_what_the_run_wrote_is_noticed_at_resume(name, spoil, message, stopped):
    spoil(stopped / name)
    told = refused(stopped)
    assert f"{stopped / name} {message}" in told
    assert "Put the file back as it was" in told


@pytest.mark.parametrize("text", ["", None])
def test_a_lost_configuration_is_restored_from_a_checkpoint(text, stopped, whole):
    path = stopped / "config.json"
    path.unlink() if text is None else path.write_text(text)
    result = bapo("resume", stopped)
    assert result.returncode == 0, result.stderr
    assert "config.json was lost or damaged, and was restored from a checkpoint" in result.stdout
    assert json.loads(path.read_text()) == json.loads((whole / "config.json").read_text())
    assert_same_run(stopped, whole)


@pytest.mark.parametrize("name", ["summary.json", "model/model.safetensors"])
def test_an_empty_summary_or_model_is_not_a_complete_run(name, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    (out / name).write_bytes(b"")
    result = bapo("resume", out)
    assert result.returncode == 0, result.stderr
    assert "so what follows the last step is done again" in result.stdout
    assert_same_run(out, whole)
    assert json.loads((out / "summary.json").read_text()) == json.loads((whole / "summary.json").read_text())
    assert "is complete" in bapo("resume", out).stdout


def test_an_older_checkpoint_is_one_flag_away(stopped, whole):
    weights = stopped / "checkpoints" / "step-000004" / "shard-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"bapo resume {stopped} --from step-000002" in refused(stopped)
    assert "has no such checkpoint. It has step-000002, step-000004" in refused(stopped, "--from", "step-000003")
    result = bapo("resume", stopped, "--from", "step-000002")
    assert result.returncode == 0, result.stderr
    assert "newer checkpoints were set aside: step-000004.aside" in result.stdout
    assert_same_run(stopped, whole)


def test_litter_of_killed_writes_is_removed(stopped, whole):
    litter = [
        stopped / "config.json.partial",
        stopped / "model.partial" / "x",
        stopped / "checkpoints/step-000009.partial/x",
    ]
    for path in litter:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{")
    assert bapo("resume", stopped).returncode == 0
    assert not list(stopped.rglob("*.partial"))
    assert_same_run(stopped, whole)


def test_a_run_that_goes_on_says_from_where(whole, stopped, twin, tmp_path):
    assert "resumed after step 4" in bapo("resume", stopped).stdout
    out = shutil.copytree(twin, tmp_path / "kept")
    resumed = bapo("resume", out, "--from", "step-000000")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed before the first step" in resumed.stdout
    assert_same_run(out, whole)


def test_a_run_killed_before_its_first_checkpoint_can_be_resumed_and_started_again(whole, tmp_path):
    early = tmp_path / "early"
    (early / "checkpoints" / "step-000000.partial").mkdir(parents=True)
    shutil.copy(whole / "config.json", early)
    (early / "history.jsonl").write_text('{"event": "start", "id": "of a run that never was"}\n')
    again = shutil.copytree(early, tmp_path / "again")
    resumed = bapo("resume", early)
    assert resumed.returncode == 0, resumed.stderr
    assert "there is no checkpoint yet, so the run begins anew" in resumed.stdout
    assert_same_run(early, whole)
    (early / "summary.json").unlink()
    assert bapo("resume", early).returncode == 0
    started = bapo("train", *RUN, "--out", again)
    assert started.returncode == 0, started.stderr
    assert_same_run(again, whole)


@pytest.mark.parametrize(
    "name", ["config.json", "summary.json", "metrics.jsonl", "lock", "checkpoints/step-000004/state.json"]
)
def test_a_fifo_in_place_of_a_file_does_not_hang(name, stopped):
    (stopped / name).unlink(missing_ok=True)
    os.mkfifo(stopped / name)
    result = bapo("resume", stopped)
    assert result.returncode in (0, 2, 3), result.stderr
    assert "Traceback" not in result.stderr


def test_changed_surroundings_are_told(stopped):
    result = bapo("resume", stopped, env={**os.environ, "OMP_NUM_THREADS": "7"})
    assert result.returncode == 0, result.stderr
    assert (
        "the run may not go on bit for bit, because the surroundings changed: OMP_NUM_THREADS is 7 and was"
        in result.stdout
    )


def test_a_deleted_lock_file_does_not_let_a_second_process_in(stopped):
    directory = os.open(stopped, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    (stopped / "lock").unlink(missing_ok=True)
    result = bapo("resume", stopped)
    os.close(directory)
    assert (result.returncode, "another process is at work" in result.stderr) == (2, True)


def test_a_log_that_is_damaged_during_a_run_does_not_cost_the_model(whole, tmp_path, monkeypatch):
    out, sound, measure = tmp_path / "run", [], Training.measure

    def spoil(job, log, when):
        measure(job, log, when)
        if when == "after":
            sound.append((out / "metrics.jsonl").read_bytes())
            damage_line(out / "metrics.jsonl")

    monkeypatch.setattr(Training, "measure", spoil)
    values = json.loads((whole / "config.json").read_text()) | {"out": str(out), "steps": 1}
    with pytest.raises(
        CheckpointError, match=r"line 1 is not a JSON object, so the run cannot be summarised\. The trained"
    ):
        start(Config(**values), plain=True)
    assert load_file(out / "model" / "model.safetensors")
    assert not (out / "summary.json").exists()
    monkeypatch.undo()
    (out / "metrics.jsonl").write_bytes(sound[0])
    assert resume(out, plain=True)["updates"] >= 0
    assert "## Scores" in (out / "model" / "README.md").read_text()


def test_a_model_that_moved_must_still_read_the_same_tokens(stopped, tmp_path):
    """The weights come from the checkpoint, so only the tokenizer can tell that the model is another one."""
    moved = shutil.copytree(Path(bapo_package.__file__).parent / "demo/model", tmp_path / "moved")
    tokenizer = moved / "tokenizer.json"
    before = tokenizer.read_text()
    rules = json.loads(before)
    vocabulary = rules["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    tokenizer.write_text(json.dumps(rules))
    told = refused(stopped, "--model.path", str(moved))
    assert f"model.path={str(moved)!r} has another tokenizer" in told
    tokenizer.write_text(before)
    assert bapo("resume", stopped, "--model.path", str(moved)).returncode == 0
