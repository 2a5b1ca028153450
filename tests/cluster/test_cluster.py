"""Runs on a real Ray cluster of this machine. Needs Ray: `make test-integrations` has it."""

import json
import os
from pathlib import Path

import pytest

from bapo.runs import history, ledger
from tests.cluster.driving import Run, gone, send
from tests.traps import laid

pytest.importorskip("ray")

ALONE = ("rollout/probe_gap",)
"""Metrics that only a cluster has."""


def without(lines, keys=ALONE):
    return [{key: value for key, value in line.items() if key not in keys} for line in lines]


def weights(run):
    return (run.path / "model" / "model.safetensors").read_bytes()


def listening(pids):
    """The addresses on which these processes listen, as the kernel writes them."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                name = str(descriptor.readlink())
            except OSError:
                continue
            if name.startswith("socket:["):
                sockets.add(name[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_sampling_and_learning_in_turns_repeat_a_single_process_bit_for_bit(tmp_path):
    alone = Run.train(tmp_path / "alone", threads=1)
    strange = tmp_path / "strange"
    strange.mkdir()
    ran = laid(strange)
    apart = Run.train(tmp_path / "apart", cwd=strange, **{"cluster.rollouts": 1, "cluster.ahead": 0})
    apart.until(lambda: apart.steps() >= 1)
    processes = apart.descendants()
    assert len(processes) > 4
    assert listening([apart.process.pid, *processes]) <= LOOPBACK
    alone.finished()
    apart.finished()
    assert without(apart.metrics()) == alone.metrics()
    assert weights(apart) == weights(alone)
    assert apart.balance() == alone.balance()  # the order within it depends on time
    assert gone(processes) == []
    assert ran() == []
    assert all(line["rollout/probe_gap"] < 1e-4 for line in apart.metrics("rollout"))


def test_a_learner_rank_that_dies_costs_nothing_but_time(tmp_path):
    recipe = {"cluster.rollouts": 1, "cluster.learners": 2, "cluster.ahead": 0, "checkpoint_every": 4}
    undisturbed = Run.train(tmp_path / "undisturbed", **recipe).finished()
    disturbed = Run.train(tmp_path / "disturbed", **recipe)
    disturbed.until(lambda: disturbed.steps() >= 2)
    ranks = disturbed.actors("LearnerHost")
    assert len(ranks) == 2
    assert send(ranks[1])
    disturbed.finished()
    assert "all learner ranks start again" in disturbed.said()
    assert "restarts: learner (1); history.jsonl says when and why" in disturbed.said()
    assert disturbed.summary()["restarts"] == {"learner": 1}
    (restart,) = [line for line in history.read(disturbed.path) if line["event"] == "restart"]
    assert "died while it was asked to" in restart["why"]
    assert restart["step"] >= 2
    assert "restarts: none" in undisturbed.said()
    assert weights(disturbed) == weights(undisturbed)
    assert disturbed.metrics() == undisturbed.metrics()
    assert "has other bits" not in disturbed.said()
    assert "Unhandled error" not in disturbed.said()


REWARD = """
def reward(response, answer):
    right = float(len(response) % 2)
    return 1e30 * right if answer == "too much" else right
"""


def test_ranks_skip_updates_together_and_the_ledger_balances(tmp_path):
    """Some rewards are so large that the gradient norm of their update overflows."""
    (tmp_path / "rewards_of_test.py").write_text(REWARD)
    for name, first, count in (("train", 2, 64), ("test", 70, 8)):
        problems = [
            {"prompt": f"{number},7,2={number + 9}:", "answer": "fine" if number % 8 else "too much"}
            for number in range(first, first + count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe = {
        **{"task.name": "data", "task.train": tmp_path / "train.jsonl", "task.test": tmp_path / "test.jsonl"},
        **{"task.reward": "rewards_of_test:reward", "learn.advantages": "dr_grpo", "learn.skip_limit": 99},
        **{"steps": 5, "cluster.rollouts": 1, "cluster.learners": 2},
    }
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = Run.train(tmp_path / "run", environment=os.environ | {"PYTHONPATH": paths}, **recipe).finished()
    updates, skipped = run.metrics("update"), run.metrics("skipped")
    assert updates
    assert skipped
    assert all(line["skipped/cause"].startswith("the gradient norm is ") for line in skipped)
    versions = [line["version"] for line in run.metrics() if line["kind"] in ("update", "skipped")]
    assert versions == list(range(1, len(versions) + 1))
    assert (run.summary()["skipped"], run.summary()["restarts"]) == (len(skipped), {})
    found = ledger.of_run(run.path)
    assert found.wrong == []
    trained = [line for line in ledger.read(run.path) if line["event"] == "trained"]
    not_taken = {line["version"] - 1 for line in skipped}
    assert found.uses == sum(len(line["groups"]) for line in trained if line["version"] not in not_taken)
    assert {line["version"] for line in ledger.read(run.path) if line["event"] == "skipped"} == not_taken


def test_what_cannot_run_says_why(tmp_path):
    cramped = Run.train(tmp_path / "cramped", **{"cluster.rollouts": 1, "cluster.address": "127.0.0.1:1"})
    assert cramped.ended() == 5
    assert "cannot connect to Ray" in cramped.said()
    assert not (tmp_path / "cramped").exists()
