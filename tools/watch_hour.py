"""A long run under watch: python tools/watch_hour.py --minutes 60.

It starts the default `bapo train` with more steps than fit in the time, and samples what the processes of the run hold:
resident memory, open descriptors, threads, and the disk below the run directory. Logs grow by design, a few kilobytes
per step, so they are counted apart from the rest of the disk. The run is stopped with SIGTERM at the end, and must save
its step and say so.

Memory swings with every step, between sampling and learning, so what counts is its floor. After a warm-up (a quarter of
the time, at most 10 minutes) the rest is cut into 20 equal parts, and a straight line is fitted to the least value in
each part. A curve is flat if the line rises by less than its allowance in an hour: 5% of the mean for memory and for
the disk without logs, half a descriptor, half a thread. The exit code is 1 if a curve is not flat or the run does not
stop as it should. `--judge FILE` only judges samples that were taken before. Other options, such as
`--rollout.max-tokens 16` for more and shorter steps, are passed on to `bapo train`.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from campaign_parts.forks import descendants
from campaign_parts.lines import figure, slope

PAGE = os.sysconf("SC_PAGE_SIZE")
COLUMNS = ("minutes", "rss_mb", "descriptors", "threads", "disk_mb", "logs_mb", "steps")
ALLOWED = {"rss_mb": 0.05, "disk_mb": 0.05}
"""How much a curve may rise in an hour, as a share of its mean."""
ALLOWED_COUNT = 0.5
"""How much the number of descriptors or threads may rise in an hour."""
PARTS = 20
PATIENCE = 300  # seconds, for the last step and its checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between samples")
    parser.add_argument("--out", type=Path, default=Path("runs/watched"), help="a new directory for run and curves")
    parser.add_argument("--judge", type=Path, help="samples.csv of an earlier watch")
    given, keys = parser.parse_known_args()
    if given.judge is not None:
        with given.judge.open(newline="") as file:
            samples = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
        return 0 if verdict(samples, samples[-1]["minutes"]) else 1
    given.out.mkdir(parents=True)
    run = given.out / "run"
    command = [sys.executable, "-m", "bapo.cli", "train", "--steps", "1000000", "--threads", "1", "--out", str(run)]
    command += keys
    with (given.out / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    samples = watch(process, run, minutes=given.minutes, every=given.every, place=given.out / "samples.csv")
    if process.poll() is not None:
        print(f"the run ended by itself with code {process.returncode}: see {given.out / 'log'}")
        return 1
    process.send_signal(signal.SIGTERM)
    code = process.wait(PATIENCE)
    said = (given.out / "log").read_text()
    stopped = code == 130 and f"bapo resume {run}" in said
    print(f"stopped by SIGTERM: exit code {code}, {'saved, as it should be' if stopped else 'NOT as it should be'}")
    (given.out / "curves.svg").write_text(figure(samples, COLUMNS[1:5]))
    return 0 if verdict(samples, given.minutes) and stopped else 1


def watch(
    process: subprocess.Popen[bytes], run: Path, *, minutes: float, every: float, place: Path
) -> list[dict[str, float]]:
    """Sample until the time is over or the process ends. Each sample is written at once."""
    began, samples = time.monotonic(), []
    with place.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        while process.poll() is None and (passed := time.monotonic() - began) < minutes * 60:
            samples.append({"minutes": round(passed / 60, 3)} | held(process.pid) | written(run))
            writer.writerow(samples[-1])
            file.flush()
            time.sleep(every)
    return samples


def held(pid: int) -> dict[str, float]:
    """What a process and all below it hold now."""
    total = {"rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0}
    for one in (pid, *descendants(pid)):
        place = Path("/proc", str(one))
        try:
            pages = int((place / "statm").read_text().split()[1])
            descriptors, threads = len(os.listdir(place / "fd")), len(os.listdir(place / "task"))
        except OSError:  # it has just ended
            continue
        total["rss_mb"] += pages * PAGE / 2**20
        total["descriptors"] += descriptors
        total["threads"] += threads
    return total | {"rss_mb": round(total["rss_mb"], 2)}


def written(run: Path) -> dict[str, float]:
    """What the run has on the disk, in megabytes, and how many steps it has logged."""
    sizes = {"disk_mb": 0.0, "logs_mb": 0.0}
    for path in run.rglob("*"):
        try:
            size = path.stat().st_size if path.is_file() else 0
        except OSError:  # an old checkpoint that is being removed
            continue
        sizes["logs_mb" if path.suffix == ".jsonl" else "disk_mb"] += size / 2**20
    timing = run / "timing.jsonl"
    steps = timing.read_bytes().count(b"\n") if timing.exists() else 0
    return {name: round(size, 3) for name, size in sizes.items()} | {"steps": steps}


def verdict(samples: list[dict[str, float]], minutes: float) -> bool:
    """Print a table of the slopes after the warm-up; whether every curve is flat."""
    warm = min(10.0, minutes / 4)
    kept = [sample for sample in samples if sample["minutes"] >= warm]
    parts = floors(kept)
    print(f"\n{'':<12}  {'first':>9}  {'last':>9}  {'least':>9}  {'most':>9}  {'per hour':>9}  {'allowed':>9}")
    flat = True
    for name in COLUMNS[1:5]:
        values = [sample[name] for sample in kept]
        rise = slope([part["minutes"] / 60 for part in parts], [part[name] for part in parts])
        allowed = ALLOWED[name] * sum(values) / len(values) if name in ALLOWED else ALLOWED_COUNT
        flat &= rise < allowed
        shown = [values[0], values[-1], min(values), max(values), rise, allowed]
        verdict = "flat" if rise < allowed else "NOT FLAT"
        print(f"{name:<12}  " + "  ".join(f"{value:9.2f}" for value in shown) + f"  {verdict}")
    last = samples[-1]
    print(f"{last['steps']:.0f} steps in {last['minutes']:.0f} minutes; logs: {last['logs_mb']:.1f} MB")
    return flat


def floors(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """The least value of each curve in each of equal parts of the time, with the middle of the part."""
    first, last = samples[0]["minutes"], samples[-1]["minutes"]
    length = (last - first) / PARTS or 1.0
    found = []
    for number in range(PARTS):
        inside = [sample for sample in samples if int((sample["minutes"] - first) / length) == number]
        if inside:
            least = {name: min(sample[name] for sample in inside) for name in COLUMNS[1:]}
            found.append({"minutes": first + (number + 0.5) * length} | least)
    return found


if __name__ == "__main__":
    sys.exit(main())
