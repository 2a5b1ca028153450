"""The campaign finds what it looks for: mismatches, tracebacks, hangs and silent ends. And a short one passes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaign_parts import fuzz, lines, lost_writes, outcomes, world
from hypothesis import strategies as st

from tests.processes import PATIENCE

ROOT = Path(__file__).parents[2]
WORDS = ("train", "recipe.toml")


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        (None, "step 1", "HANG"),
        (1, "Traceback (most recent call last):\nKeyError: 1", "FOREIGN TRACEBACK"),
        (0, "Exception ignored\nTraceback (most recent call last):", "FOREIGN TRACEBACK"),
        (0, " \n", "SILENT EXIT"),
        (1, "something broke", "SILENT EXIT"),
        (70, "bapo: it broke", "SILENT EXIT"),
        (-11, "step 1", "SILENT EXIT"),
        (-15, "step 1", "SILENT EXIT"),
    ],
)
def test_every_bad_end_of_a_command_is_a_failure(code, said, kind):
    with pytest.raises(outcomes.Failed) as failed:
        outcomes.judge(WORDS, code, said)
    assert failed.value.kind == kind


def test_good_ends_are_a_result_an_error_of_ours_or_our_own_signal():
    assert outcomes.judge(WORDS, 0, "run directory   run") is None
    assert outcomes.judge(WORDS, 3, "bapo: it is damaged. Do that.") is outcomes.Kind.OUR_ERROR
    assert outcomes.judge(WORDS, -signal.SIGKILL, "", sent=(signal.SIGKILL,)) is None


def write(run, **files):
    (run / "model").mkdir(parents=True)
    for name, content in files.items():
        (run / name.replace("__", "/").replace("_", ".")).write_bytes(content)


def test_one_different_byte_or_one_missing_file_is_a_mismatch_and_times_are_not(tmp_path):
    case, twin, other, less = (tmp_path / name for name in ("case", "twin", "other", "less"))
    write(case / "run", model__w=b"abc", summary_json=b'{"a": 1, "training_seconds": 2}', timing_jsonl=b"1")
    write(twin / "run", model__w=b"abc", summary_json=b'{"a": 1, "training_seconds": 9}', timing_jsonl=b"2")
    write(other / "run", model__w=b"abd", summary_json=b'{"a": 1}', timing_jsonl=b"2")
    write(less / "run", summary_json=b'{"a": 1}')
    world.check_equal(case, twin)
    with pytest.raises(outcomes.Failed, match=r"model/w differs from the twin's: 3 and 3 bytes, the first .* is 2"):
        world.check_equal(case, other)
    with pytest.raises(outcomes.Failed, match="only the twin has model/w"):
        world.check_equal(less, twin)


def test_a_damaged_checkpoint_may_stay_if_it_is_an_older_one(tmp_path):
    for name in ("case", "twin"):
        for step in (1, 2):
            place = tmp_path / name / "run" / "checkpoints" / f"step-00000{step}"
            place.mkdir(parents=True)
            (place / "state.json").write_text('{"a": 1}')
    damaged = tmp_path / "case" / "run" / "checkpoints"
    (damaged / "step-000001" / "state.json").write_bytes(bytes(8))
    world.check_equal(tmp_path / "case", tmp_path / "twin")
    (damaged / "step-000002" / "state.json").write_bytes(bytes(8))
    with pytest.raises(outcomes.Failed, match=r"step-000002/state\.json differs"):
        world.check_equal(tmp_path / "case", tmp_path / "twin")


def planted(case, _inside):
    """What a defect could do with a number."""
    if case == 0:
        raise KeyError("somebody else's error in some words")
    if case == 1:
        raise fuzz.Refused("an error of ours, with advice")
    if case == 2:
        int("12a")  # a ValueError, but not one of our own
    if case == 3:
        time.sleep(30)
    if case == 4:
        os._exit(3)
    while case == 5:
        pass


@pytest.mark.parametrize(
    ("case", "counted"),
    [
        (0, (0, 0, "FOREIGN TRACEBACK")),
        (1, (0, 1, None)),
        (2, (0, 0, "FOREIGN TRACEBACK")),
        (3, (0, 0, "HANG")),
        (4, (0, 0, "SILENT EXIT")),
        (5, (0, 0, "HANG")),
        (6, (1, 0, None)),
    ],
)
def test_fuzzing_tells_results_and_errors_of_ours_from_every_kind_of_failure(case, counted, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "CASE_SECONDS", 1)
    monkeypatch.setattr(fuzz, "WALL_SECONDS", 2)
    tally = outcomes.Tally(0)
    family = fuzz.Family(1, st.just(case), planted)
    other = subprocess.Popen(["sleep", "60"])
    fuzz.fuzz({"numbers": family}, 1, tally, tmp_path, until=time.monotonic() + 60, only="")
    row = tally.row("fuzz numbers")
    results, ours, kind = counted
    assert (row.tries, row.equal, row.our_errors) == (1, results, ours)
    assert [failure["kind"] for failure in tally.failed] == ([kind] if kind else [])
    assert tally.end(None) == (1 if kind else 0)
    assert other.poll() is None  # a process that the fuzzing did not start lives on
    other.kill()
    other.wait()


def test_a_power_cut_keeps_what_was_synced_and_may_lose_the_rest(tmp_path):
    live, store = tmp_path / "live", tmp_path / "store"
    live.mkdir()
    store.mkdir()
    (live / "synced").write_bytes(b"abcdef")
    (live / "fresh").write_bytes(b"xyz")
    (store / "copy").write_bytes(b"abc")
    durable = lost_writes.Durable(
        files={(live / "synced").stat().st_ino: store / "copy"},
        names={live.stat().st_ino: {"synced": (live / "synced").stat().st_ino}},
    )
    seen = set()
    for seed in range(200):
        place = tmp_path / f"kept-{seed}"
        place.mkdir()
        lost_writes._build(live, place, durable, random.Random(seed))
        seen.add(tuple(sorted((path.name, path.read_bytes()) for path in place.iterdir())))
    contents = {dict(files)["synced"] for files in seen}
    assert {b"abc", b"abcdef", b"abc\0\0\0"} <= contents
    assert all(content.startswith(b"abc") for content in contents)
    assert {"fresh" in dict(files) for files in seen} == {True, False}
    assert b"" in {dict(files).get("fresh") for files in seen}


def test_a_rename_leads_to_the_old_file_or_to_the_new_one_but_never_to_none(tmp_path):
    live, store = tmp_path / "live", tmp_path / "store"
    live.mkdir()
    store.mkdir()
    (live / "config").write_bytes(b"new")
    (store / "old").write_bytes(b"old")
    (store / "new").write_bytes(b"new")
    number = (live / "config").stat().st_ino
    gone = number + 1_000_000
    durable = lost_writes.Durable(
        files={gone: store / "old", number: store / "new"}, names={live.stat().st_ino: {"config": gone}}
    )
    seen = set()
    for seed in range(50):
        place = tmp_path / f"kept-{seed}"
        place.mkdir()
        lost_writes._build(live, place, durable, random.Random(seed))
        seen |= {(path.name, path.read_bytes()) for path in place.iterdir()}
        assert len(list(place.iterdir())) == 1
    assert seen == {("config", b"old"), ("config", b"new")}


def test_the_slope_of_a_line_is_its_slope():
    assert lines.slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert lines.slope([0, 1, 2], [4, 4, 4]) == 0
    assert lines.slope([1], [4]) == 0


def test_a_short_campaign_of_real_kills_passes(tmp_path):
    table = tmp_path / "table.json"
    given = ("--minutes", "0.2", "--seed", "1", "--only", "sft: ", "--out", tmp_path / "cases", "--json", table)
    command = [sys.executable, ROOT / "tools" / "campaign.py", *given]  # it forks, so it begins without threads
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(table.read_text())["rows"]
    assert rows["all"]["tries"] == rows["all"]["equal"] > 0
    assert rows["all"]["failures"] == 0
    assert not (tmp_path / "cases").exists()
