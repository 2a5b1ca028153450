"""A Ctrl-C is never lost."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bapo import cli
from bapo.process.stops import below, processes
from tests.processes import bapo, started


class Destructed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # Python drops what is raised here


def test_a_ctrl_c_during_a_destructor_still_stops_the_command(monkeypatch, capsys):
    def command(_name, _words):
        Destructed()
        time.sleep(2)
        return 0

    monkeypatch.setitem(cli.COMMANDS, "eval", replace(cli.COMMANDS["eval"], long=False))
    monkeypatch.setattr(cli, "carry_out", command)
    assert cli.run(["eval"]) == 130
    said = capsys.readouterr().err
    assert "The same command continues: bapo eval" in said
    assert "Traceback" not in said


def test_a_ctrl_c_after_the_work_is_done_ends_in_no_traceback(tmp_path):
    # A library that tidies up at the end of the process is interrupted. The command itself has said all it has to say.
    late = "import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT)"
    script = f"{late}\nfrom bapo.cli import main\nmain(['--version'])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert result.stdout.startswith("0.")
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


REWARDS = """
import itertools
import os
import sys
import time

calls = itertools.count()

def never_returns(response, answer):
    from pathlib import Path
    Path(__file__).with_name("asked").touch()
    while response != answer:
        try:
            time.sleep(1)
        except BaseException:
            pass
    return 1.0

def slow(response, answer):
    if response != answer:
        with open(os.environ["CALLS"], "a") as file:
            file.write(answer + "\\n")
        if next(calls) >= int(os.environ.get("SLOW_FROM", "1000000")):
            time.sleep(float(os.environ.get("EACH", "1")))
    return float(len(response) % 2)

async def slow_async(response, answer):
    return slow(response, answer)

def moves(response, answer):
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return float(next(calls) % 2)

def closes(response, answer):
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)
    return float(next(calls) % 2)

def switches_off(response, answer):
    import torch
    torch.set_grad_enabled(False)
    sys.stdout = None
    return float(next(calls) % 2)
"""


def write(path):
    path = path / "here"  # the data set's name, which is in the logs
    path.mkdir()
    (path / "rewards_of_stops.py").write_text(REWARDS)
    for name, first in (("train", 2), ("test", 70)):
        rows = [{"prompt": f"{n},7,2={n + 9}:", "answer": name} for n in range(first, first + 8)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def place(tmp_path):
    return write(tmp_path)


SMALL = {
    **{
        "steps": 1,
        "threads": 1,
        "device": "cpu",
        "rollout.prompts": 2,
        "rollout.responses": 4,
        "rollout.max-tokens": 8,
    },
    **{"learn.batch-groups": 2, "eval.problems": 2, "eval.k": 1, "eval.every": 0, "offpolicy.reuse": 1},
    **{"task.name": "data", "task.train": "train.jsonl", "task.test": "test.jsonl", "out": "run"},
}


def words(**more):
    keys = SMALL | {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}
    return [str(part) for key, value in keys.items() for part in (f"--{key}", value)]


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_second_signal_ends_a_run_whose_reward_never_returns(place):
    log = place / "said"
    process = started("train", *words(task__reward="rewards_of_stops:never_returns"), log=log, cwd=place)
    until(lambda: (place / "run/checkpoints/step-000000").exists() and (place / "asked").exists())
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    until(lambda: "press Ctrl-C again to stop at once" in log.read_text())
    children = below(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    process.join(3)
    assert process.exitcode == 130
    assert log.read_text().endswith("bapo: stopped. Continue with: bapo resume run\n")
    assert not children & processes().keys()


PARTIAL = {"task.reward": "rewards_of_stops:slow", "steps": 3, "checkpoint-every": 100, "rollout.prompts": 4}
PARTIAL |= {"eval.every": 1, "eval.k": 8, "offpolicy.partial-budget": 120, "offpolicy.max-staleness": 12}
LOGS = ("metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "model/model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Three steps that leave responses parked, with evaluations on the way. The file `calls` says who was scored."""
    path = write(tmp_path_factory.mktemp("undisturbed"))
    done = bapo("train", *words(**PARTIAL), cwd=path, env=os.environ | {"CALLS": str(path / "calls")})
    assert done.returncode == 0, done.stderr
    rollouts = [line for line in (path / "run/metrics.jsonl").read_text().splitlines() if '"kind": "rollout"' in line]
    assert [json.loads(line)["rollout/parked"] > 0 for line in rollouts] == [True] * 3
    return path


def first_call(calls, *, of_step):
    """Which call of the reward scores the first response of this step, of three with an evaluation after each."""
    found = [at for at in range(1, len(calls)) if (calls[at - 1], calls[at]) == ("test", "train")]
    assert len(found) == 2, calls
    return found[of_step - 2]


@pytest.mark.parametrize("where", ["rewards", "evaluation"])
def test_a_stop_acts_between_two_slow_rewards_and_the_run_goes_on_bit_for_bit(undisturbed, place, where):
    calls = (undisturbed / "calls").read_text().split()
    at = first_call(calls, of_step=2) - (16 if where == "evaluation" else 0)
    log, env = place / "said", os.environ | {"CALLS": str(place / "calls"), "SLOW_FROM": str(at)}
    process = started("train", *words(**PARTIAL), log=log, cwd=place, env=env)
    until(lambda: (place / "calls").exists() and len((place / "calls").read_text().split()) > at)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 130, log.read_text()
    assert time.monotonic() - began < 5
    assert len((place / "calls").read_text().split()) <= at + 3
    stopped = {
        "rewards": "while the rewards of step 2 were computed; step 1 is saved",
        "evaluation": "while step 1 was evaluated; the step is saved",
    }
    assert log.read_text().endswith(f"bapo: stopped {stopped[where]}. Continue with: bapo resume run\n")
    assert [path.name for path in sorted((place / "run/checkpoints").iterdir())] == ["step-000000", "step-000001"]
    again = bapo("resume", "run", cwd=place, env=os.environ | {"CALLS": str(place / "calls")})
    assert again.returncode == 0, again.stderr
    for name in LOGS:
        assert (place / "run" / name).read_bytes() == (undisturbed / "run" / name).read_bytes(), name


def test_a_stop_in_the_first_step_lets_the_weights_before_it_be_measured(undisturbed, place):
    """They are in the learner's place meanwhile, and may not be saved as those after the step."""
    last = (undisturbed / "calls").read_text().split().index("test") - 1
    log, env = place / "said", os.environ | {"CALLS": str(place / "calls"), "SLOW_FROM": str(last), "EACH": "0.3"}
    process = started("train", *words(**PARTIAL), log=log, cwd=place, env=env)
    until(lambda: (place / "calls").exists() and len((place / "calls").read_text().split()) > last)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 130, log.read_text()
    again = bapo("resume", "run", cwd=place, env=os.environ | {"CALLS": str(place / "calls")})
    assert again.returncode == 0, again.stderr
    for name in LOGS:
        assert (place / "run" / name).read_bytes() == (undisturbed / "run" / name).read_bytes(), name


def test_checkpoints_by_time_change_nothing_and_are_resumed_from(undisturbed, place):
    env = os.environ | {"CALLS": str(place / "calls")}
    keys = words(**PARTIAL | {"checkpoint_minutes": 1e-9, "checkpoint_keep": 9})
    for command in (("train", *keys), ("resume", "run", "--from", "step-000002")):
        done = bapo(*command, cwd=place, env=env)
        assert done.returncode == 0, done.stderr
        saved = [path.name for path in sorted((place / "run/checkpoints").iterdir()) if "aside" not in path.name]
        assert saved == [f"step-00000{step}" for step in range(4)]
        for name in LOGS:
            assert (place / "run" / name).read_bytes() == (undisturbed / "run" / name).read_bytes(), name


def test_a_stop_waits_for_quick_rewards_so_that_the_step_counts(place):
    env = os.environ | {"CALLS": str(place / "calls"), "SLOW_FROM": "15"}  # the last one of the first step
    keys = words(task__reward="rewards_of_stops:slow", rollout__prompts=4, steps=9)
    process = started("train", *keys, log=place / "said", cwd=place, env=env)
    until(lambda: (place / "calls").exists() and len((place / "calls").read_text().split()) == 16)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 130
    assert "stopped after step 1, which was saved. Continue with: bapo resume run" in (place / "said").read_text()


@pytest.mark.parametrize("reward", ["moves", "closes", "switches_off"])
def test_what_a_reward_does_to_the_process_ends_with_its_call(place, reward):
    done = bapo("train", *words(task__reward=f"rewards_of_stops:{reward}"), cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run directory   run\n" in done.stdout
    assert (place / "run/summary.json").exists()
    assert '"update"' in (place / "run/metrics.jsonl").read_text()


def test_memory_that_runs_out_is_told_with_what_to_make_smaller(place):
    keys = words(task__reward="rewards_of_stops:moves", rollout__prompts=512, learn__batch_groups=512)
    done = bapo("train", *keys, cwd=place, most_memory=200 * 2**20)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("bapo: out of memory (")
    assert "rollout.slots smaller" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_exit_of_a_library_is_not_taken_for_the_parser(monkeypatch, capsys):
    monkeypatch.setattr(cli, "carry_out", lambda _name, _words: sys.exit(0))
    assert cli.run(["eval"]) == 1
    assert "sys.exit(0)" in capsys.readouterr().err
