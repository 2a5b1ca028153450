"""Whole runs with learn.kl: they stay near their start, resume bit for bit, and know what their start was."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from bapo.config.errors import CheckpointError, ConfigError
from bapo.config.recipe import parse
from bapo.config.run import Config
from bapo.demo import model_path
from bapo.train.build import build
from bapo.train.machine import resolve
from bapo.train.run import resume, start
from bapo.train.torchrun import Team
from tests.tiny.runs import configured

OFF_POLICY = {"reuse": 2, "replay_fraction": 0.3, "partial_budget": 600}
GENTLE = {"lr": 5e-5, "warmup_updates": 8}


def run(out, **sections):
    start(configured(out, **sections), plain=True)
    return out


def updates(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "update"]


def state_of(out, step):
    return json.loads((out / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())


def settings(out):
    return json.loads((out / "config.json").read_text())


def reference_of(out, step):
    """The weights of a reference that moves, in the checkpoint after this step."""
    kept = load_file(out / "checkpoints" / f"step-{step:06d}" / "shard-00001.safetensors")
    return {name: weight for name, weight in kept.items() if name.startswith("reference.")}


def killed_after(run, step, out):
    """A copy of a run, as if it had been killed after the checkpoint of this step."""
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    for path in (out / "checkpoints").iterdir():
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    return out


MOVES = {"kl_reference": "every 3"}
TERMS = {"kl_mix": 0.6, "kl_in_reward": 0.02, "entropy": 0.01, "entropy_target": 2.0}


@pytest.fixture(
    scope="module",
    params=[(0, {}), (4, {}), (0, {**MOVES, **TERMS, "truncated": "mask"}), (4, {**MOVES, "truncated": "drop"})],
    ids=["all weights", "additions", "all weights, moving", "additions, moving"],
)
def whole(request, tmp_path_factory):
    """A run with every off-policy source, from a model in a directory of its own."""
    place, (rank, more) = tmp_path_factory.mktemp("kl"), request.param
    shutil.copytree(model_path(), place / "model")
    return run(
        place / "run",
        model={"path": str(place / "model"), "lora": {"rank": rank}},
        offpolicy=OFF_POLICY,
        learn={"kl": 0.1, **GENTLE, **more},
        checkpoint_every=2,
    )


def test_a_run_resumes_bit_for_bit_with_the_log_probs_of_its_reference(whole, tmp_path):
    held, learn = state_of(whole, 2)["buffer"]["held"], settings(whole)["learn"]
    kept = [t for each in held for t in each["group"]["trajectories"]]
    kept = [t for t in kept if learn["truncated"] != "drop" or t["status"] == "stopped"]
    assert kept
    assert all(len(t["reference_logprobs"]) == len(t["tokens"]) for t in kept)
    out = killed_after(whole, 2, tmp_path / "killed")
    resume(out, plain=True)
    for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    fixed = [state_of(out, 4), state_of(whole, 4), state_of(whole, 2)]
    if learn["kl_reference"] == "initial":
        assert fixed[0]["reference"] == fixed[1]["reference"] == fixed[2]["reference"]
    else:
        assert not any("reference" in state for state in fixed)
        ours, theirs, before = reference_of(out, 4), reference_of(whole, 4), reference_of(whole, 2)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert any(not torch.equal(before[name], theirs[name]) for name in theirs)  # it has moved once more
    found = [line["kl_reference"] for line in updates(whole)]
    assert found[0] < 1e-6  # at first the policy is its reference
    assert found[-1] > 1e-6 if learn["kl_reference"] == "initial" else max(found) > 100 * found[0]
    assert state_of(whole, 4)["buffer"]["totals"]["replayed"] or learn["truncated"] == "drop"  # which leaves few groups


def test_a_run_does_not_go_on_with_another_reference(whole, tmp_path):
    """Its weights are all in the checkpoint, or its additions are, so only the reference would change.

    If that moves and all weights are trained, all of it is in the checkpoint, so the run is the same.
    """
    out = killed_after(whole, 2, tmp_path / "killed")
    other = tmp_path / "other"
    shutil.copytree(settings(whole)["model"]["path"], other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    config = settings(out)
    moved = parse(Config, config | {"model": config["model"] | {"path": str(other)}}, source="test")
    if config["learn"]["kl_reference"] != "initial" and not config["model"]["lora"]["rank"]:
        resume(out, config=moved, plain=True)
        for name in ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors"):
            assert (out / name).read_bytes() == (whole / name).read_bytes(), name
        return
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"model.path.* holds (other weights|another model) now"):
        resume(out, config=moved, plain=True)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {path for path in before if after[path] != before[path]} == set()


def test_a_large_weight_keeps_the_policy_near_its_start(tmp_path):
    """The control has a weight that changes nothing but the log."""
    far, near, plain = (run(tmp_path / str(kl), learn={"kl": kl, **GENTLE}, steps=3) for kl in (1e-9, 10.0, 0.0))
    moved, stayed = (sum(line["kl_reference"] for line in updates(out) if line["step"] == 3) for out in (far, near))
    assert 0 < stayed < 0.2 * moved
    assert "kl_reference" not in updates(plain)[0]
    assert "reference" not in state_of(plain, 3)
    assert "reference_logprobs" not in (plain / "checkpoints" / "step-000003" / "state.json").read_text()
    ours, theirs = (updates(out)[0] for out in (far, plain))
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    assert "KL penalty to the initial weights 10" in (near / "model" / "README.md").read_text()
    assert "KL penalty" not in (plain / "model" / "README.md").read_text()


def test_several_processes_are_refused(tmp_path):
    for key in ("kl", "kl_in_reward"):
        with pytest.raises(ConfigError, match=rf"learn.{key}=0.1 is for one process, but cluster.rollouts=1 starts a"):
            configured(tmp_path, learn={key: 0.1}, cluster={"rollouts": 1})
    ranks = Team(torch.distributed.group.WORLD, 0, 2, 2)
    with pytest.raises(ConfigError, match=r"learn.kl=0.1 is for one process, but torchrun started 2 ranks"):
        build(resolve(configured(tmp_path, learn={"kl": 0.1})), ranks)
