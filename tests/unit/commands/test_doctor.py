"""What `bapo doctor` finds on a machine."""

import socket
import tomllib
from pathlib import Path

from bapo.cli import run
from bapo.commands.doctor import EXTRAS

ROOT = Path(__file__).parents[3]


def test_the_doctor_finds_what_is_wrong_and_says_what_to_do(here, capsys, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("bapo.commands.doctor.PORTS", {port: "Ray"})
        monkeypatch.setattr(
            "bapo.commands.doctor.EXTRAS", {"x": (("no_such_package",), "something"), "y": (("pydantic",), "keys")}
        )
        assert run(["doctor", "--task.train", "nowhere.jsonl", "--task.test", "test.jsonl"]) == 1
    said = capsys.readouterr().out
    assert f"note port {port}" in said
    assert "join it with cluster.address" in said
    assert "no-such-package not installed" in said
    assert "Needed for something: pip install 'bapo[x]'" in said
    assert "ok   [y]            pydantic 2" in said
    assert "BAD  recipe" in said
    assert "task.train: data source 'nowhere.jsonl' does not exist" in said
    assert "ok   torch" in said
    assert "1 thing must be put right" in said


def test_the_doctor_looks_for_everything_that_an_extra_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys() - {"dev", "docs"}


def test_a_run_directory_that_is_in_use_is_a_note(here, capsys):
    (here / "before").mkdir()
    (here / "before" / "config.json").write_text("{}")
    (here / "before" / "metrics.jsonl").write_text("{}\n")
    (here / "before" / "checkpoints").mkdir()
    (here / "before" / "checkpoints" / "step-000001").mkdir()
    assert run(["doctor", "--out", "before"]) == 0
    said = capsys.readouterr().out
    assert "note run directory  before is in use\n" in said
    assert "Choose another directory, or continue that run with `bapo resume before`." in said
    assert "BAD" not in said
    assert said.endswith("\nA run can start in another directory (--out).\n")
    assert run(["doctor", "--out", "before", "--task.train", "nowhere.jsonl", "--task.test", "test.jsonl"]) == 1
    assert capsys.readouterr().out.endswith("before a run can start in another directory (--out).\n")


def test_a_sound_machine_gets_a_clean_bill(here, capsys):
    assert run(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "BAD" not in said
    assert said.endswith("A run can start.\n")
