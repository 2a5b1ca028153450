"""Attack `bapo` and compare with what an undisturbed run gives: python benchmarks/campaign.py --minutes 10.

    --minutes N      kills, signals and damage to files, for that long (campaign_parts/kills.py, damage.py, lost.py)
    --fuzz CASES     random recipes, grids, data, models, checkpoints, dumps and answers (campaign_parts/fuzz.py); with
                     --minutes, at most for that long

Every case is a function of the seed and its number. A case that fails is named with both, and its directory is kept;
`--case NUMBER` repeats one (what depends on time cannot be repeated exactly). docs/reliability.md says what counts as a
failure. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.tiny makes the models

from campaign_parts import forks, fuzz, fuzz_data, fuzz_files, fuzz_settings, kills
from campaign_parts.outcomes import Failed, Tally
from campaign_parts.world import SETTINGS, Setting, Twin, make_case, make_twin, make_world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--fuzz", type=int, metavar="CASES", help="fuzz with this many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a new directory for twins and cases (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    parser.add_argument("--only", default="", help="only settings and attacks whose name contains this")
    parser.add_argument("--case", type=int, help="only the case with this number")
    given = parser.parse_args()
    if given.minutes is None and given.fuzz is None:
        parser.error("give --minutes N or --fuzz CASES")
    if given.out is not None and given.out.exists():
        parser.error(f"--out {given.out} exists already. Choose a new directory.")
    root = (given.out or Path(tempfile.mkdtemp(prefix="bapo-campaign-")) / "cases").resolve()
    forks.prepare()
    make_world(root)
    print(f"seed {given.seed}, cases in {root}", flush=True)
    tally = Tally(given.seed)
    minutes = given.minutes if given.minutes is not None else float("inf")
    if given.fuzz is not None:
        fuzzing(root, tally, given.fuzz, minutes=minutes, only=given.only)
    else:
        campaign(root, tally, minutes=minutes, only=given.only, case=given.case)
    code = tally.end(given.json)
    if not tally.failed:
        shutil.rmtree(root)
    return code


def campaign(root: Path, tally: Tally, *, minutes: float, only: str, case: int | None) -> None:
    """Case after case, until the time is over. Ctrl-C ends it after the table."""
    settings = [setting for setting in SETTINGS if only in setting.name]
    twins: dict[str, Twin] = {}
    until = time.monotonic() + 60 * minutes
    number = case or 0
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda received, _frame: asked.append(received))
    while time.monotonic() < until and not asked:
        number += 1
        choose = random.Random(f"{tally.seed}/{number}")  # noqa: S311
        setting = choose.choices(settings, [setting.weight for setting in settings])[0]
        if setting.name not in twins:
            twins[setting.name] = make_twin(setting, root)
        _kill(root, tally, number, setting, twins[setting.name], choose)
        tally.progress(f"case {number}: {setting.name}")
        if case is not None:
            return


def fuzzing(root: Path, tally: Tally, cases: int, *, minutes: float, only: str) -> None:
    """Cases of every family that `only` names, a chunk of each in turn."""
    named = {setting.name: setting for setting in SETTINGS}
    run, evaluation = (make_twin(named[name], root).path / "run" for name in ("train", "eval"))
    families = {
        **fuzz_settings.families(),
        **fuzz_data.families(),
        **fuzz_files.families(root / "world" / "model", run, evaluation),
    }
    until = time.monotonic() + 60 * minutes
    fuzz.fuzz(families, cases, tally, root, until=until, only=only)


def _kill(root: Path, tally: Tally, number: int, setting: Setting, twin: Twin, choose: random.Random) -> None:
    path = make_case(root / f"case-{number:05d}")
    case = kills.Case(setting, twin, path, choose)
    try:
        kills.attack(case)
    except Failed as error:
        forks.clear_orphans(0)
        (path / "what").write_text("\n".join([*case.told, "", str(error)]) + "\n")
        place = f"seed {tally.seed}, case {number}, {path}"
        tally.fail(f"{setting.name}: {', '.join(case.hit) or 'no signal'}", error, place)
        return
    for name, times in case.hit.items():
        tally.add(f"{setting.name}: {name}", tries=times, equal=times)
    if case.our_errors:
        tally.add(f"{setting.name}: errors on the way", tries=0, our_errors=case.our_errors)
    shutil.rmtree(path)


if __name__ == "__main__":
    sys.exit(main())
