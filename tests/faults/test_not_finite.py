"""Updates whose numbers are not finite: skipped, recorded, and after a limit the end of the run with a dump."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from bapo.cli import run
from bapo.learn import supervised
from bapo.learn.learner import Learner
from bapo.runs import ledger
from bapo.runs.read import Run, read_run
from bapo.train.run import resume
from tests.supervised import saved_model, sums, write_rows

SMALL = {
    **{"device": "cpu", "steps": 2, "checkpoint_every": 1, "checkpoint_keep": 9},
    **{"rollout.prompts": 4, "rollout.responses": 4, "rollout.max_tokens": 24, "learn.batch_groups": 4},
    **{"offpolicy.reuse": 3, "eval.problems": 2, "eval.k": 2, "eval.every": 0},
}


def train(out, **more):
    return run(["train", "--out", str(out), *(w for k, v in (SMALL | more).items() for w in (f"--{k}", str(v)))])


@pytest.fixture
def spoil(monkeypatch):
    """Makes the gradients of updates at these versions NaN."""

    def at(versions):
        whole = Learner._backward

        def spoiled(self, *given):
            output = whole(self, *given)
            if self.version in versions:
                next(iter(self.optimizer.masters)).grad *= float("nan")
            return output

        monkeypatch.setattr(Learner, "_backward", spoiled)

    return at


def lines(out, kind):
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def test_a_run_goes_on_after_skipped_updates_and_is_resumed_bit_for_bit(tmp_path, spoil, capsys):
    spoil({1, 2, 4})
    assert train(tmp_path / "run") == 0
    assert "3 updates were skipped, because the loss or the gradient was not finite" in capsys.readouterr().out
    skipped = lines(tmp_path / "run", "skipped")
    assert [(line["version"], line["skipped/in_a_row"]) for line in skipped] == [(2, 1), (3, 2), (5, 1)]
    assert all(line["skipped/cause"].startswith("the gradient norm is nan") for line in skipped)
    assert [line["version"] for line in lines(tmp_path / "run", "update")] == [1, 4, 6]
    found = read_run(tmp_path / "run")
    assert isinstance(found, Run)
    assert (len(found.updates), len(found.skipped), found.summary["skipped"]) == (3, 3, 3)
    trained = [line for line in ledger.read(tmp_path / "run") if line["event"] == "trained"]
    # three passes over each of two rollouts, of one update each; those at 1, 2 and 4 use nothing
    assert [(line["version"], set(line["uses"])) for line in trained] == [
        *((0, {0}), (1, {1}), (2, {1})),
        *((3, {0}), (4, {1}), (5, {1})),
    ]
    balanced = ledger.of_run(tmp_path / "run")
    assert balanced.wrong == []
    assert balanced.uses == sum(len(line["groups"]) for line in trained if line["version"] in (0, 3, 5))
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for done in ("model", "checkpoints/step-000002"):
        shutil.rmtree(tmp_path / "again" / done)
    (tmp_path / "again/summary.json").unlink()
    resume(tmp_path / "again")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "run" / name).read_text()
    one, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_only_skips_stops_with_its_batch_for_diagnose(tmp_path, spoil, capsys):
    spoil(range(1, 99))
    out = tmp_path / "run"
    assert train(out, **{"learn.skip_limit": 2, "steps": 9}) == 1
    told = capsys.readouterr().err
    assert "2 updates in a row were skipped, up to update 3: the gradient norm is nan although" in told
    assert "Lower learn.lr (now 3e-05)" in told
    dump = out / "skipped/update-000003.safetensors"
    assert f"`bapo diagnose {dump}`" in told
    assert "Traceback" not in told
    assert len(lines(out, "skipped")) == 2
    assert run(["diagnose", str(dump)]) == 0
    assert "push once" in capsys.readouterr().out
    for file in (out / "checkpoints").glob("*/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_the_limit_counts_within_a_step_and_across_steps(tmp_path, spoil):
    """Three updates per step. The fourth skipped one ends the run in the middle of the second step."""
    spoil(range(99))
    assert train(tmp_path / "run", **{"learn.skip_limit": 4, "steps": 9}) == 1
    found = [(line["step"], line["skipped/in_a_row"]) for line in lines(tmp_path / "run", "skipped")]
    assert found == [(1, 1), (1, 2), (1, 3), (2, 4)]


def test_a_supervised_run_that_only_skips_keeps_what_is_known_of_its_tokens(tmp_path, monkeypatch, capsys):
    whole = supervised.sft_loss
    monkeypatch.setattr(supervised, "sft_loss", lambda *given, **more: float("nan") * whole(*given, **more))
    source = ["--model.path", str(saved_model(tmp_path / "model")), "--device", "cpu", "--learn.batch-sequences", "4"]
    data = write_rows(tmp_path / "sums.jsonl", sums()[:12])
    out = tmp_path / "run"
    assert run(["sft", *source, "--task.train", str(data), "--learn.skip-limit", "2", "--out", str(out)]) == 1
    dump = out / "skipped/update-000002.safetensors"
    assert f"see logprobs in {dump}" in capsys.readouterr().err
    kept = load_file(dump)
    assert kept.keys() == {"logprobs", "entropy", "targets", "sequence_ids", "update"}
    assert int(kept["sequence_ids"].max()) == 3
    assert kept["logprobs"].isfinite().all()  # the loss was at fault
