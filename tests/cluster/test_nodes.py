"""Runs on many machines, while machines are cut off, are full, or differ. Needs root, `ip` and Ray.

    sudo BAPO_NODES=1 $(which pytest) tests/cluster/test_nodes.py

Every machine is a network namespace of this one, with a Ray node of its own. Here a node counts as dead after about
15 s; with Ray's defaults it takes about a minute.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import bapo
from tests.cluster.driving import gone
from tests.cluster.nodes import Nodes, cannot

pytest.importorskip("ray")
WHY_NOT = (
    cannot() if os.environ.get("BAPO_NODES") else "set BAPO_NODES=1: these take ten minutes and change the network"
)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
BOUND = 12
FEW = {"threads": 1, "cluster.start_seconds": 120, "offpolicy.max_staleness": BOUND}


@pytest.fixture
def make_nodes():
    made = []

    def make(count):
        made.append(Nodes(count))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def measured(what, since):
    print(f"{time.monotonic() - since:6.1f} s  {what}")


def until_said(run, words, since):
    run.until(lambda: words in run.said())
    measured(words, since)


def until_steps(run, more, since):
    wanted = run.steps() + more
    run.until(lambda: run.steps() >= wanted)
    measured(f"{more} more steps", since)


def assert_sound(run, steps):
    found = run.balance(max_staleness=BOUND)
    assert found.wrong == []
    assert found.states.keys() <= {"retired", "filtered"}
    updates = run.metrics("update")
    assert [line["version"] for line in updates] == list(range(1, len(updates) + 1))
    assert max(line["staleness_max"] for line in updates) <= BOUND
    assert {line["step"] for line in run.metrics("rollout")} == set(range(1, steps + 1))


def test_rollout_actors_are_cut_off_and_come_back(make_nodes, tmp_path):
    nodes = make_nodes(2)
    nodes[1].start(cpus=2)
    run = nodes.train(tmp_path / "run", **FEW | {"steps": 60, "cluster.rollouts": 3, "cluster.silence_seconds": 6})
    time.sleep(10)  # the learner has its place, so two rollout actors are for node 2
    nodes[2].start(cpus=2)
    run.until(lambda: run.steps() >= 2 and len(nodes[2].processes("ray::RolloutHost")) == 2)
    nodes[2].cut()
    cut = time.monotonic()
    until_said(run, "is replaced: rollout", cut)
    until_said(run, f"({nodes[2].address}) has not answered for", cut)
    until_steps(run, 3, cut)  # those that take their place find no room, or are put on the lost node and die there
    nodes[2].stop()
    nodes[2].connect()
    nodes[2].start(cpus=2)
    back = time.monotonic()
    run.until(lambda: len(nodes[2].processes("ray::RolloutHost.work")) > 0)
    measured("a rollout actor samples on node 2 again", back)
    assert run.finished(600).process.returncode == 0
    assert_sound(run, 60)


def test_learner_ranks_lose_their_cable_and_then_a_node(make_nodes, tmp_path):
    nodes = make_nodes(4)
    nodes[1].start(cpus=0)
    nodes[2].start(cpus=1)
    nodes[3].start(cpus=1)
    recipe = FEW | {"steps": 14, "cluster.rollouts": 1, "cluster.learners": 2, "cluster.update_seconds": 30}
    run = nodes.train(tmp_path / "run", **recipe)
    run.until(lambda: all(nodes[number].processes("ray::") for number in (2, 3)))
    time.sleep(10)
    nodes[4].start(cpus=1)
    run.until(lambda: run.steps() >= 3)
    for number in (2, 3):
        assert nodes[number].processes("ray::LearnerHost")
        nodes[number].isolate()
    cut = time.monotonic()
    until_said(run, "all learner ranks start again", cut)
    assert "can they reach each other?" in run.said() or "cannot reach each other" in run.said()
    for number in (2, 3):
        nodes[number].isolate(on=False)
    until_steps(run, 2, cut)
    nodes[3].cut()
    cut = time.monotonic()
    run.until(lambda: run.said().count("all learner ranks start again") >= 2)
    measured("all learner ranks start again", cut)
    assert f"({nodes[3].address}) died while it was asked to" in run.said()
    nodes[3].stop()
    nodes[3].connect()
    nodes[3].start(cpus=1)
    until_steps(run, 2, cut)
    run.finished(600)
    assert_sound(run, 14)


def test_all_actors_are_lost_with_the_weights_they_share(make_nodes, tmp_path):
    """The learner, the rollout actors and all copies of the weights are lost together; another node has room."""
    nodes = make_nodes(3)
    nodes[1].start(cpus=0)
    nodes[2].start(cpus=3)
    run = nodes.train(tmp_path / "run", **FEW | {"steps": 8, "cluster.rollouts": 2})
    run.until(lambda: run.steps() >= 3)
    nodes[2].cut()
    cut = time.monotonic()
    nodes[3].start(cpus=3)
    until_said(run, "all learner ranks start again", cut)
    until_steps(run, 1, cut)
    run.finished(600)
    assert run.said().count("is replaced") >= 2
    assert_sound(run, 8)


def test_other_code_on_a_node_is_refused(make_nodes, tmp_path):
    nodes = make_nodes(2)
    source = Path(bapo.__file__).parent
    shutil.copytree(source, tmp_path / "src" / "bapo", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "bapo" / "buffer.py").open("a") as changed:
        changed.write("# changed\n")
    nodes[1].start(cpus=1)
    nodes[2].start(cpus=1, PYTHONPATH=str(tmp_path / "src"))
    run = nodes.train(tmp_path / "mixed", **FEW | {"cluster.rollouts": 1})
    assert run.ended() == 5, run.said()
    said = run.said().splitlines()[-1]
    assert f"({nodes[2].address}) runs bapo {bapo.__version__} (" in said
    assert f" instead of {bapo.__version__} (" in said
    assert "learner 0" in said or "rollout 0" in said
    print(said)


def test_a_node_without_bapo_says_so(make_nodes, tmp_path):
    nodes = make_nodes(2)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "bapo.py").write_text("raise ModuleNotFoundError(\"No module named 'bapo'\", name='bapo')\n")
    nodes[1].start(cpus=1)
    nodes[2].start(cpus=1, PYTHONPATH=str(tmp_path / "src"))
    run = nodes.train(tmp_path / "without", **FEW | {"cluster.rollouts": 1})
    assert run.ended() == 5, run.said()
    said = run.said().splitlines()[-1]
    assert nodes[2].address in said
    assert "failed 3 times while starting" in said or "learner 0 cannot start" in said
    assert "No module named 'bapo'" in said
    print(said)


def test_a_full_disk_names_the_rank_and_the_path(make_nodes, small_disk):
    nodes = make_nodes(1)
    nodes[1].start(cpus=3)
    run = nodes.train(small_disk / "run", **FEW | {"steps": 8, "cluster.rollouts": 1, "cluster.learners": 2})
    run.until(lambda: run.steps() >= 2 and (run.path / "checkpoints" / "step-000002").exists())
    filler, left = small_disk / "filler", shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(left - 2**20))  # the logs still fit, a checkpoint does not
    filled = time.monotonic()
    assert run.ended() == 4, run.said()
    measured("ended", filled)
    said = run.said().splitlines()[-1]
    assert "learner " in said or "rank " in said
    assert str(run.path / "checkpoints") in said
    assert "No space left on device" in said
    print(said)
    filler.unlink()
    nodes.run(run.path, "resume", str(run.path)).finished()
    assert_sound(run, 8)


def test_no_room(make_nodes, tmp_path):
    nodes = make_nodes(1)
    nodes[1].start(cpus=2)
    asked = time.monotonic()
    run = nodes.train(tmp_path / "crowded", **FEW | {"cluster.rollouts": 4, "cluster.start_seconds": 5})
    assert run.ended(60) == 5, run.said()
    measured("ended", asked)
    said = run.said().splitlines()[-1]
    assert "no room for 4 rollout actors with 1 CPU" in said
    assert "after 5 s Ray has 1 CPU free of 2 CPU" in said
    assert gone(list(nodes[1].processes("ray::RolloutHost"))) == []
    print(said)
