"""What stops a run on a cluster: SIGTERM while it starts and while it measures, and the second signal at any time."""

import json
import os
import signal
import time

import pytest

from tests.cluster.driving import Run, gone

pytest.importorskip("ray")

REWARD = """
import time
from pathlib import Path

def never_returns(response, answer):
    while answer != "test" and response != answer:
        Path(__file__).with_name("asked").touch()
        time.sleep(1)
    return 1.0
"""


@pytest.fixture
def begun(tmp_path):
    (tmp_path / "rewards_of_stops.py").write_text(REWARD)
    for name, first in (("train", 2), ("test", 70)):
        rows = [{"prompt": f"{n},7,2={n + 9}:", "answer": name} for n in range(first, first + 32)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task.name": "data", "task.train": tmp_path / "train.jsonl", "task.test": tmp_path / "test.jsonl"}
    recipe = data | {"task.reward": "rewards_of_stops:never_returns", "cluster.rollouts": 1}
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = Run.train(tmp_path / "run", environment=os.environ | {"PYTHONPATH": paths}, **recipe)
    yield run
    run.kill()


def stopped(run, seconds):
    """Send SIGTERM and wait for the end. Returns the last line."""
    processes = run.descendants()
    run.process.send_signal(signal.SIGTERM)
    assert run.ended(seconds) == 130, run.said()
    assert gone(processes) == []
    return run.said().splitlines()[-1]


def test_sigterm_while_ray_starts(begun):
    begun.until(lambda: len(begun.descendants()) >= 4)
    assert stopped(begun, 10).startswith("bapo: stopped. No step was taken. The same command begins again: bapo train")


def test_the_second_signal_ends_a_run_whose_reward_never_returns(begun):
    begun.until((begun.path.parent / "asked").exists)
    begun.process.send_signal(signal.SIGTERM)
    begun.until(lambda: "press Ctrl-C again to stop at once" in begun.said())
    time.sleep(0.5)
    sent = time.monotonic()
    assert stopped(begun, 5) == f"bapo: stopped. Continue with: bapo resume {begun.path}"
    assert time.monotonic() - sent < 35  # of which 2 s are the run's, and the rest what `gone` may take
    assert "Traceback" not in begun.said()
