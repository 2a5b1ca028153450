"""Stop asynchronous runs at random moments while a verifier fails, and go on: python benchmarks/async_stops.py.

Runs on a Ray cluster of this machine, with engines on the CPU. A check takes 20 ms and raises for a quarter of the
problems, so that a step often ends while groups are being scored. A run is asked to stop (SIGINT or SIGTERM) or killed
(SIGKILL, one time in four) at a random moment after its first step, resumed, stopped again …, until it is complete;
then the next run begins, until there were `--stops` of them. A run saves after each step and keeps all checkpoints.

What must hold, and is counted at the end:

    stops         a run that is asked to stop ends with 130, or 0 if it was complete before it heard
    resumes       every one goes on, and every run ends with 0
    checkpoints   the ledger has every group where the state has it, in each checkpoint that was ever written
    ledgers       balance
    rollouts      every step has one line, and every failure that a line counts is in failures.jsonl

The exit code is 1 if something does not hold; the directory is kept then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.cluster drives the runs

from bapo.config.errors import CheckpointError
from bapo.runs import files, ledger
from bapo.train.checkpoint import STATE, step_of
from bapo.train.continuing import check_ledger
from tests.cluster.driving import Run, gone

REWARD = """
import hashlib
import time

def coin(response, answer):
    time.sleep(0.02)
    if answer == "broken":
        raise ValueError("this problem cannot be checked")
    return float(hashlib.sha256(response.encode()).digest()[0] % 2)
"""
STALENESS = 16
RECIPE = {
    **{"task.name": "data", "task.train": "train.jsonl", "task.test": "test.jsonl", "task.reward": "coin:coin"},
    **{"steps": 40, "checkpoint_every": 1, "checkpoint_keep": 1000, "threads": 1, "offpolicy.max_staleness": STALENESS},
    **{"rollout.prompts": 8, "rollout.responses": 4, "rollout.max_tokens": 24, "learn.batch_groups": 4},
    **{"offpolicy.reuse": 1, "eval.problems": 2, "eval.k": 1, "eval.every": 0},
    **{"cluster.rollouts": 1, "cluster.ahead": 1},
}


def make_world(where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    os.chdir(where)
    Path("coin.py").write_text(REWARD)
    for name, numbers in (("train", range(200)), ("test", range(200, 204))):
        rows = [{"prompt": f"{n % 13}+{n}=", "answer": "broken" if n % 4 == 1 and n < 200 else "0"} for n in numbers]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def saved_steps(path: Path) -> int:
    """The step of the newest checkpoint; -1 before there is one."""
    found = files.checkpoints(path / "checkpoints")
    return step_of(found[-1]) if found else -1


class Campaign:
    """Stops, and what came of them."""

    def __init__(self, seed: int, stops: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.stops = stops
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def live(self, path: Path) -> None:
        """One run from its beginning to its end, with the stops on the way."""
        run = Run.train(path, **RECIPE)
        while self.counts["stops"] < self.stops and self._stopped(run):
            run = Run.resume(path)
        code = run.ended(900)
        self.counts["runs"] += 1
        if code:
            self.wrong.append(f"{path} ended with {code}: {run.said()[-600:]}")

    def _stopped(self, run: Run) -> bool:
        """Stop the run at a random moment after its first step. Returns whether it is to be resumed."""
        before = saved_steps(run.path)
        while run.process.poll() is None and saved_steps(run.path) <= max(before, 0):
            time.sleep(0.02)
        time.sleep(self.chance.uniform(0, 3))
        if run.process.poll() is not None:
            return False
        sent = self.chance.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        processes = [run.process.pid, *run.descendants()]
        run.process.send_signal(sent)
        code = run.ended(300)
        gone(processes)
        self.counts.update(["stops", sent.name])
        print(f"stop {self.counts['stops']}: {run.path.name}, {sent.name} after step {run.steps()}", flush=True)
        if code not in ((-9,) if sent == signal.SIGKILL else (130, 0)):
            self.wrong.append(f"{run.path}: {sent.name} ended it with {code}: {run.said()[-600:]}")
        return code != 0

    def look(self, path: Path) -> None:
        """What the files of a complete run say."""
        for checkpoint in files.checkpoints(path / "checkpoints"):
            state = files.read_object(checkpoint / STATE)
            self.counts["checkpoints"] += 1
            self.counts["while groups were being scored"] += bool(state.get("scoring"))
            try:
                check_ledger(path, state, max_staleness=STALENESS)
            except CheckpointError as error:
                self.wrong.append(str(error))
        found = ledger.of_run(path)
        self.counts["groups without rewards"] += found.states.get("unscored", 0)
        self.wrong += [f"{path}: {wrong}" for wrong in found.wrong]
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rollouts = [line for line in lines if line["kind"] == "rollout"]
        failures = len((path / "failures.jsonl").read_text().splitlines())
        told = sum(line["reward_failures"] for line in rollouts)
        if [line["step"] for line in rollouts] != list(range(1, RECIPE["steps"] + 1)) or told != failures:
            self.wrong.append(f"{path}: {len(rollouts)} rollouts count {told} failures, and failures.jsonl {failures}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    where = Path(tempfile.mkdtemp(prefix="async-stops-"))
    make_world(where)
    campaign, began = Campaign(given.seed, given.stops), time.monotonic()
    while campaign.counts["stops"] < given.stops:
        path = where / f"run-{campaign.counts['runs']}"
        campaign.live(path)
        campaign.look(path)
    for what, count in campaign.counts.items():
        print(f"{what:<32}{count:>6}")
    print(f"{'does not hold':<32}{len(campaign.wrong):>6}")
    print(f"seed {given.seed}, {(time.monotonic() - began) / 60:.0f} minutes")
    print("\n".join(campaign.wrong))
    if not campaign.wrong:
        shutil.rmtree(where)
    return bool(campaign.wrong)


if __name__ == "__main__":
    sys.exit(main())
