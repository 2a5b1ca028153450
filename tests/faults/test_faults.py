"""What a user's bad day looks like: killed, interrupted, out of disk, damaged files, wrong keys."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from tests import processes
from tests.processes import bapo, bapo_anew

# All off-policy sources in play: parked responses, replay, reuse.
RUN = [
    *("--device", "cpu", "--steps", "5", "--threads", "1", "--checkpoint-every", "2"),
    *("--rollout.prompts", "4", "--rollout.responses", "4", "--rollout.max-tokens", "48", "--learn.batch-groups", "4"),
    *("--offpolicy.reuse", "2", "--offpolicy.replay-fraction", "0.3", "--offpolicy.partial-budget", "400"),
    *("--objective.name", "brake"),  # a resumed run must know how often each group was used, and the last drift
    *("--eval.problems", "2", "--eval.k", "2", "--eval.every", "3"),
]


def started(out):
    """A run in the background; its output goes to a file beside its directory."""
    return processes.started("train", *RUN, "--out", out, log=out.with_suffix(".log"))


def wait_for_steps(process, out, steps):
    """Until the log shows so many steps (or the process ends)."""
    while process.is_alive():
        log = out / "timing.jsonl"
        if log.exists() and len(log.read_text().splitlines()) >= steps:
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    result = bapo_anew("train", *RUN, "--out", out)
    assert result.returncode == 0, result.stderr
    return out


def assert_same_run(out, expected):
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (out / name).read_bytes() == (expected / name).read_bytes()
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (out, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_run_has_parked_and_replayed_responses(uninterrupted):
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("rollout/parked", 0) > 0 for line in lines)
    assert max(line.get("buffer/replayed", 0) for line in lines) > 0
    assert len({line["step"] for line in lines if line["kind"] == "update"}) > 1


@pytest.mark.parametrize("attempt", [0, 1])
def test_kill_9_at_a_random_moment_then_resume_is_the_uninterrupted_run(attempt, uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = started(out)
    moment = random.Random()
    wait_for_steps(process, out, moment.randint(1, 3))
    time.sleep(moment.random() * 0.5)
    process.kill()
    process.join()
    assert not (out / "summary.json").exists()
    result = bapo("resume", out)
    assert result.returncode == 0, result.stderr
    assert_same_run(out, uninterrupted)
    assert "complete" in bapo("resume", out).stdout


def test_a_run_at_work_is_not_resumed_and_does_not_notice(uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = started(out)
    wait_for_steps(process, out, 1)
    os.kill(process.pid, signal.SIGSTOP)  # at work for as long as the test needs
    result = bapo("resume", out)
    reported = bapo("report", out, "--out", tmp_path / "report.html")
    os.kill(process.pid, signal.SIGCONT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"bapo: another process is at work on the run in {out}. Wait for it, or stop it, then run this command again.\n"
    )
    assert reported.returncode == 0
    process.join()
    assert process.exitcode == 0
    assert_same_run(out, uninterrupted)


def test_a_run_killed_before_its_first_step_or_after_its_export_can_be_completed(uninterrupted, tmp_path):
    early = tmp_path / "early"
    process = started(early)
    while process.is_alive() and not list((early / "checkpoints").glob("step-000000")):
        time.sleep(0.005)
    process.kill()
    process.join()
    assert bapo("resume", early).returncode == 0
    assert_same_run(early, uninterrupted)
    (early / "summary.json").unlink()  # as if killed between writing the model and the summary
    assert bapo("resume", early).returncode == 0
    assert_same_run(early, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_stopped_in_the_evaluation_after_its_first_step_begins_again(uninterrupted, tmp_path, number):
    out = tmp_path / "run"
    process = started(out)
    wait_for_steps(process, out, 1)
    os.kill(process.pid, number)
    process.join(processes.PATIENCE)
    assert process.exitcode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGKILL:  # Ctrl-C may come before the step has quite ended, which is then saved
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000"]
    assert bapo("resume", out).returncode == 0
    assert_same_run(out, uninterrupted)


def test_a_log_shorter_than_its_checkpoint_is_refused(uninterrupted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    (out / "summary.json").unlink()
    os.truncate(out / "metrics.jsonl", 100)
    result = bapo("resume", out)
    assert (result.returncode, "shorter than its checkpoint recorded" in result.stderr) == (3, True)
    (out / "config.json").write_text("{")
    assert bapo("resume", out).returncode == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_run_of_a_gpu_is_not_resumed_without_one(uninterrupted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    (out / "summary.json").unlink()
    config = json.loads((out / "config.json").read_text())
    assert (config["device"], config["model"]["dtype"]) == ("cpu", "float32")
    (out / "config.json").write_text(json.dumps(config | {"device": "cuda"}))
    before = (out / "metrics.jsonl").read_bytes()
    result = bapo("resume", out)
    assert (result.returncode, "torch sees no CUDA device" in result.stderr) == (2, True)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_ctrl_c_saves_the_step_and_exits_130(uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = started(out)
    wait_for_steps(process, out, 2)
    os.kill(process.pid, signal.SIGINT)
    process.join(processes.PATIENCE)
    output = out.with_suffix(".log").read_text()
    assert process.exitcode == 130, output
    assert f"bapo resume {out}" in output
    result = bapo("resume", out)
    assert result.returncode == 0, result.stderr
    assert_same_run(out, uninterrupted)


def test_a_disk_that_fills_up_loses_nothing(uninterrupted, tmp_path):
    # A limit on file size makes the operating system refuse the checkpoint's weights, as a full disk would.
    out = tmp_path / "run"
    result = bapo("train", *RUN, "--out", out, largest_file=1_000_000)
    assert result.returncode == 4, result.stderr
    assert "cannot write" in result.stderr
    assert list((out / "checkpoints").iterdir()) == []  # nothing half-written is left behind
    later = shutil.copytree(uninterrupted, tmp_path / "later")  # as if killed before the checkpoint of its last step
    (later / "summary.json").unlink()
    shutil.rmtree(later / "checkpoints" / "step-000005")
    full = bapo("resume", later, largest_file=1_000_000)
    assert full.returncode == 4, full.stderr
    assert bapo("resume", later).returncode == 0
    assert_same_run(later, uninterrupted)


def test_damaged_and_missing_checkpoints_are_named(uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    (out / "summary.json").unlink()
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    weights = newest / "shard-00001.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    result = bapo("resume", out)
    assert result.returncode == 3
    assert "shard-00001.safetensors changed since it was written" in result.stderr
    assert f"bapo resume {out} --from step-" in result.stderr
    (newest / "manifest.json").unlink()
    assert bapo("resume", out).returncode == 3
    for path in (out / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    missing = bapo("resume", out)
    assert (missing.returncode, "holds no checkpoint" in missing.stderr) == (3, True)
    nowhere = bapo("resume", tmp_path / "nowhere")
    assert (nowhere.returncode, "not a run directory" in nowhere.stderr) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "usage: bapo COMMAND"),
        ([], 2, "usage: bapo COMMAND"),
        (["--version"], 0, "0."),
        (["trian"], 2, "Did you mean 'train'"),
        (["train", "--offpolicy.resue", "2"], 2, "resue"),
        (["train", "--offpolicy.reuse", "0"], 2, "offpolicy.reuse = 0: give 1 or more"),
        (["train", "--offpolicy.reuse", "40"], 2, "max_staleness >= 39"),
        (["train", "--objective.name", "bappo"], 2, "Did you mean 'bapo'"),
        (["train", "nowhere.toml"], 2, "cannot read nowhere.toml"),
        (["train", "--model.path", "/nowhere", "--out", "unused"], 2, "model.path='/nowhere': there is no such file"),
        (["train", "--out", "/"], 2, "exists already. Choose another directory; this one holds no run."),
        (["train", "--out", "a" * 300], 2, "give a path that a file system can hold"),
        (["train", "--model.path", "a" * 5000], 2, "give a path that a file system can hold"),
        (["train", "--out", "/proc/nowhere"], 2, "cannot create /proc/nowhere"),
        (["train", "--eval.problems", "513"], 2, "the task holds out only 512 problems"),
        (["train", "--rollout.max-tokens", "120"], 2, "positions. Set rollout.max_tokens <="),
        (["train", "--rollout.max-tokens", "400"], 2, "leaves no room for a prompt: 'demo' has 128 positions"),
        (["train", "--device", "gpu"], 2, "device"),
        (
            ["train", "--objective.name", "grpo", "--objective.options", "hgih", "1.3"],
            2,
            "objective.options.hgih is not an option of 'grpo'",
        ),
        (["resume"], 2, "usage: bapo resume RUN"),
        (["train", "--help"], 0, "--offpolicy.partial-budget"),
    ],
)
def test_usage_and_exit_codes(arguments, code, message, tmp_path):
    result = bapo(*arguments, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})
    assert result.returncode == code, result.stderr
    assert message in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
