"""SIGTERM in every phase of a run: what Slurm and Kubernetes send, at a random moment of the phase.

    python benchmarks/stops.py DIR [--kind alone cluster] [--phase start learning …] [--times 10]

Each trial starts a run in a process of its own, waits for the phase, sends one SIGTERM and waits for the end. It is
right if the exit code is 130, or 0 where the summary is there, the last line says what to do next, every line is one of
ours, and no process is left. Results are appended to DIR/trials.jsonl, and trials that are there are not repeated, so
the same command continues. `--kind cluster` needs Ray.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

PHASES = ("start", "evaluation before", "sampling", "learning", "saving", "evaluation after", "export")
ADVICE = r"bapo: stopped(\.| after step| while) .*((begins again: bapo train|Continue with: bapo resume) .*)$"
OURS = (ADVICE, "stopping after this step, .*Ctrl-C again to stop at once", "  sample  reward ", r"step +\d+/\d+ ")
OURS += (r"  (rollout \d+|learner): ", " *scoring: ")
"""Our lines that a run which nobody stops does not print, or prints with other words every time."""
PATIENCE = 240.0
REWARD = """
import time
from pathlib import Path

def reward(response, answer):
    with Path(__file__).with_name("asked").open("a") as file:
        file.write(f"{answer}\\n")
    time.sleep(0.02)
    return float(len(response) % 2)
"""
RECIPE = {
    "steps": 2,
    "threads": 1,
    "checkpoint_every": 1,
    "rollout.prompts": 4,
    "rollout.responses": 4,
    "rollout.max_tokens": 32,
    "learn.batch_groups": 4,
    "learn.micro_tokens": 64,
    "eval.problems": 4,
    "eval.k": 4,
    "eval.every": 0,
    "task.name": "data",
    "task.reward": "rewards_of_stops:reward",
}
CLUSTER = {"cluster.rollouts": 1, "cluster.ahead": 1, "offpolicy.max_staleness": 8}


def prepared(place):
    """Write a task whose reward says when it is asked."""
    place.mkdir(parents=True)
    (place / "rewards_of_stops.py").write_text(REWARD)
    for name, first, count in (("train", 2, 64), ("test", 70, 8)):
        rows = [{"prompt": f"{n},7,2={n + 9}:", "answer": name} for n in range(first, first + count)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def begun(place, kind):
    recipe = RECIPE | {"task.train": "train.jsonl", "task.test": "test.jsonl", "out": "run"}
    recipe |= CLUSTER if kind == "cluster" else {}
    words = [part for key, value in recipe.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with (place / "said").open("w") as said:
        command = [sys.executable, "-m", "bapo", "train", *words]
        streams = {"stdout": said, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=place, start_new_session=True, **streams)  # noqa: S603


def shape(line):
    """A line without its numbers."""
    return re.sub(r"\d[\d.,:e-]*", "0", line)


def known_lines(place, kind):
    """The lines of a run that nobody stops, without their numbers."""
    kept = place / f"{kind}-undisturbed"
    if not (kept / "run" / "summary.json").exists():
        shutil.rmtree(kept, ignore_errors=True)
        prepared(kept)
        assert begun(kept, kind).wait(PATIENCE) == 0, (kept / "said").read_text()
    return {shape(line) for line in (kept / "said").read_text().splitlines()}


def listens(process):
    """Whether the process handles SIGTERM. Before that it ends the interpreter, and no line of ours is reached."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1)


def reached(phase, place, kind, step, process):
    """Whether the run is in this phase, and for about how long it will be. `step`: which checkpoint, of saving."""
    run = place / "run"
    said = (place / "said").read_text()
    asked = (place / "asked").read_text() if (place / "asked").exists() else ""
    match phase:
        case "start":
            return listens(process), 14.0 if kind == "cluster" else 4.0
        case "evaluation before":
            return "evaluating on" in said or "evaluating the weights" in said, 0.5
        case "sampling":
            return asked.count("test") >= 16, 0.4
        case "learning":
            return asked.count("train") >= 16, 0.4
        case "saving":
            return (run / "checkpoints" / f"step-00000{step}.partial").exists(), 0.05
        case "evaluation after":
            return "after training" in said, 0.5
        case "export":
            return any(run.glob("model*")), 0.05
    raise ValueError(phase)


def members(session):
    """The ids of the processes of a session."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                found.add(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def tree(pid):
    from bapo.process.stops import below

    return below(pid)


def left(known, session, seconds=12.0):
    """What does not end by itself: of these processes, and of the session. The first words of their command lines."""
    from bapo.process.stops import processes

    until = time.monotonic() + seconds
    while (alive := {pid for pid, _ in known & processes().keys()} | members(session)) and time.monotonic() < until:
        time.sleep(0.1)
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in sorted(alive)}
    return [f"{pid} {line.read_text()[:80]}".replace("\0", " ") for pid, line in lines.items() if line.exists()]


def trial(place, kind, phase, chance, usual):
    prepared(place)
    step = chance.randrange(3)
    process = begun(place, kind)
    known, until, wait = set(), time.monotonic() + PATIENCE, 0.002
    while process.poll() is None and time.monotonic() < until:
        there, length = reached(phase, place, kind, step, process)
        if there:
            time.sleep(length * chance.random())
            break
        time.sleep(wait)
    known |= tree(process.pid)
    sent = time.monotonic()
    missed = process.poll() is not None
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        code = "does not end"
    seconds = time.monotonic() - sent
    said = (place / "said").read_text()
    complete = (place / "run" / "summary.json").exists()
    lines = [line for line in said.splitlines() if line.strip()]
    foreign = [line for line in lines if shape(line) not in usual and not any(re.match(ours, line) for ours in OURS)]
    advice = bool(lines) and re.match(ADVICE, lines[-1]) is not None
    remain = left(known, process.pid)
    right = not foreign and ((code == 0 and complete) or (code == 130 and advice))
    return {
        **{"kind": kind, "phase": phase, "code": code, "missed": missed, "seconds": round(seconds, 2)},
        **{"right": right and not remain, "foreign": foreign, "left": remain, "last": lines[-1:] and lines[-1]},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    parser.add_argument("--kind", nargs="+", default=["alone", "cluster"], choices=["alone", "cluster"])
    parser.add_argument("--phase", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args()
    log = given.place / "trials.jsonl"
    given.place.mkdir(parents=True, exist_ok=True)
    done = Counter(
        (t["kind"], t["phase"]) for t in map(json.loads, log.read_text().splitlines() if log.exists() else ())
    )
    chance = random.Random(os.getpid())  # noqa: S311
    usual = {kind: known_lines(given.place, kind) for kind in given.kind}
    for _ in range(given.times):
        for kind in given.kind:
            for phase in given.phase:
                number = done[kind, phase]
                if number >= given.times:
                    continue
                name = f"{kind}-{phase.replace(' ', '-')}-{number}-{os.getpid()}-{time.monotonic_ns()}"
                found = trial(given.place / name, kind, phase, chance, usual[kind])
                if found["missed"]:
                    print(f"{kind}, {phase}: the run ended before the signal", flush=True)
                    continue
                done[kind, phase] += 1
                with log.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(json.dumps(found), flush=True)
    trials = [json.loads(line) for line in log.read_text().splitlines()]
    for kind in given.kind:
        for phase in given.phase:
            mine = [t for t in trials if (t["kind"], t["phase"]) == (kind, phase)]
            codes = dict(Counter(str(t["code"]) for t in mine))
            print(f"{kind:8} {phase:18} {sum(t['right'] for t in mine)} of {len(mine)} right, exit codes {codes}")
    sys.exit(not all(t["right"] for t in trials))


if __name__ == "__main__":
    main()
