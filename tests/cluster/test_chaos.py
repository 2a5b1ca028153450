"""A run goes on while its processes are killed, stopped and cut off; nothing is lost and nothing counted twice.

BAPO_CHAOS_SECONDS makes the hard part longer, for example 120.
"""

import os
import random
import signal
import time

import pytest

from tests.cluster.driving import Run, gone, send

pytest.importorskip("ray")

SECONDS = float(os.environ.get("BAPO_CHAOS_SECONDS", "20"))
STEPS = int(10 + SECONDS / 2)
CHAOS = {
    "steps": STEPS,
    "checkpoint_every": 3,
    "cluster.rollouts": 2,
    "cluster.learners": 2,
    "cluster.silence_seconds": 8,
    "offpolicy.max_staleness": 12,
}


def assert_sound(run):
    """Everything that was promised, whatever happened."""
    found = run.balance(max_staleness=12)
    assert found.wrong == []
    assert found.states.keys() <= {"retired", "filtered"}, "a group was lost or is still under way"
    updates = run.metrics("update")
    assert [line["version"] for line in updates] == list(range(1, len(updates) + 1)), "an update was lost or repeated"
    assert max(line["staleness_max"] for line in updates) <= 12
    assert {line["step"] for line in run.metrics("rollout")} == set(range(1, STEPS + 1))
    assert (run.path / "model" / "model.safetensors").exists()
    restarts = run.summary()["restarts"]
    assert restarts["learner"] >= 1
    assert any(who.startswith("rollout") for who in restarts)


def test_deaths_of_every_kind(tmp_path):
    run = Run.train(tmp_path / "chaos", **CHAOS)
    run.until(lambda: run.steps() >= 1)
    chance, began, stopped = random.Random(0), time.monotonic(), None
    while time.monotonic() - began < SECONDS and run.process.poll() is None:
        time.sleep(4)
        living = [pid for pid in run.actors("RolloutHost") if pid != stopped]
        if stopped is None and living:
            stopped = living[0]
            send(stopped, signal.SIGSTOP)  # silent, not dead
        elif living:
            send(chance.choice(living))
    run.until(lambda: len(run.actors("LearnerHost")) == 2)
    send(run.actors("LearnerHost")[0])
    run.until(lambda: "all learner ranks start again" in run.said())
    goes_on(run)
    assert gone([stopped]) == [], "a stopped actor was not ended"
    assert "has not answered" in run.said()
    for daemon, told in (
        ("raylet", "its daemon on this machine (raylet)"),
        ("gcs_server", "its control service (GCS)"),
    ):
        processes = run.descendants()
        send(next(pid for pid, name in processes.items() if name.split(" ")[0].endswith(f"/{daemon}")))
        killed = time.monotonic()
        assert run.ended(60) == 5
        assert time.monotonic() - killed < 30, "Ray itself takes a minute"
        assert f"bapo: Ray is lost: {told}" in run.said()
        assert gone([run.process.pid, *processes]) == [], "processes outlive Ray"
        run = Run.resume(run.path)
        goes_on(run)
    processes = [run.process.pid, *run.descendants()]
    run.kill()  # the controller itself
    assert gone(processes) == [], "processes outlive the controller"
    resumed = Run.resume(run.path).finished(600)
    assert_sound(resumed)


def goes_on(run):
    before = run.steps()
    run.until(lambda: run.steps() > before)
