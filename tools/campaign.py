"""Attack `bapo` and compare with what an undisturbed run gives: python tools/campaign.py --minutes 10.

    --minutes N      kills, signals and damage to files, for that long (kills, damage and lost_writes of
                     campaign_parts)
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
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests.tiny makes the models

from campaign_parts import damage, forks, fuzz, fuzz_data, fuzz_files, fuzz_settings, kills, lost_writes
from campaign_parts.outcomes import Failed, Tally
from campaign_parts.world import SETTINGS, Setting, Twin, make_case, make_twin, make_world

ATTACKS: dict[str, tuple[Callable[[kills.Case], None], int, Callable[[Setting], bool]]] = {
    "kills": (kills.attack, 12, lambda setting: True),
    "full disk": (damage.full_disk, 2, lambda setting: setting.name != "compare"),
    "damaged file": (damage.damaged_file, 3, lambda setting: setting.name != "compare"),
    "jumping clock": (damage.jumping_clock, 1, lambda setting: setting.name != "compare"),
    "lost writes": (lost_writes.lost_writes, 4, lambda setting: setting.name != "compare"),
}
"""What is done to a command, how often, and to which commands. A comparison writes through processes of its own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--fuzz", type=int, metavar="CASES", help="fuzz with this many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a new directory for twins and cases (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    parser.add_argument("--only", default="", help="only attacks whose name, such as 'sft: kills', contains this")
    parser.add_argument("--case", type=int, help="only the case with this number")
    given = parser.parse_args()
    if given.minutes is None and given.fuzz is None:
        parser.error("give --minutes N or --fuzz CASES")
    if given.fuzz is not None and given.case is not None:
        parser.error("--case repeats a case of --minutes. To repeat cases of --fuzz, give the same --seed and --only.")
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
    chosen = {
        (setting, name): setting.weight * weight
        for setting in SETTINGS
        for name, (_, weight, suits) in ATTACKS.items()
        if only in f"{setting.name}: {name}" and suits(setting)
    }
    if not chosen:
        raise SystemExit(f"--only {only!r} names no attack. Attacks are named SETTING: ATTACK, such as 'sft: kills'.")
    twins: dict[str, Twin] = {}
    until = time.monotonic() + 60 * minutes
    number = (case or 1) - 1
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda received, _frame: asked.append(received))
    while time.monotonic() < until and not asked:
        number += 1
        choose = random.Random(f"{tally.seed}/{number}")  # noqa: S311
        setting, attack = choose.choices(list(chosen), list(chosen.values()))[0]
        if setting.name not in twins:
            twins[setting.name] = make_twin(setting, root)
        path = make_case(root / f"case-{number:05d}")
        _attack(tally, number, attack, kills.Case(setting, twins[setting.name], path, choose))
        tally.progress(f"case {number}: {setting.name}, {attack}")
        if case is not None:
            return
    tally.notes.append("a cluster was not run: tests/cluster/test_chaos.py kills its parts")


def _attack(tally: Tally, number: int, attack: str, case: kills.Case) -> None:
    """Run one case and count what came of it."""
    name = case.setting.name
    try:
        ATTACKS[attack][0](case)
    except Failed as error:
        forks.clear_orphans(0)
        case.path.with_name(f"{case.path.name}-what").write_text("\n".join([*case.told, "", str(error)]) + "\n")
        tally.fail(f"{name}: {attack}", error, f"seed {tally.seed}, case {number}, {case.path}")
        return
    if attack == "kills":
        for sent, times in case.hit.items():
            tally.add(f"{name}: {sent}", tries=times, equal=times)
        tally.add(f"{name}: errors on the way", tries=0, our_errors=case.our_errors)
    else:
        tally.add(f"{name}: {attack}", equal=1, our_errors=case.our_errors)
    shutil.rmtree(case.path, ignore_errors=True)


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


if __name__ == "__main__":
    sys.exit(main())
