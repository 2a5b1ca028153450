"""Whole runs whose sampler and learner do not mean the same policy: told once, or ended before the update is taken."""

import json
from dataclasses import replace

import pytest

from bapo.cli import run
from bapo.train import build
from tests.faults.test_not_finite import lines, train


@pytest.fixture
def learn_at(monkeypatch):
    """Makes the learner compute its log-probs at another temperature than the sampler's."""
    whole = build.learner_settings

    def at(temperature):
        monkeypatch.setattr(build, "learner_settings", lambda config: replace(whole(config), temperature=temperature))

    return at


def test_a_run_tells_of_drift_once_and_goes_on(tmp_path, learn_at, capsys):
    learn_at(0.7)
    assert train(tmp_path / "run", **{"learn.anchor_limit": 0.9}) == 0
    out = capsys.readouterr().out
    told = "update 1: on "
    assert out.count(told) == 2  # when it was found, and again at the end
    assert "Likely cause: temperature;" in out
    fresh = [line for line in lines(tmp_path / "run", "update") if "anchor_gap" in line]
    assert len(fresh) == 2  # of both steps, the first update alone
    assert all(0.02 < line["anchor_gap"] < 0.9 for line in fresh)
    state = json.loads((tmp_path / "run/checkpoints/step-000002/state.json").read_text())
    assert state["progress"]["drift"].startswith(told)


def test_a_run_ends_before_an_update_whose_ratios_mean_nothing(tmp_path, learn_at, capsys):
    learn_at(0.3)
    out = tmp_path / "run"
    assert train(out) == 1
    told = capsys.readouterr().err
    assert "update 1 was not taken, because its ratios would mean nothing: on " in told
    assert "Traceback" not in told
    assert lines(out, "update") == []
    (line,) = lines(out, "skipped")  # no second pass over the same groups
    assert line["anchor_gap"] > 0.2
    dump = out / "skipped/update-000001.safetensors"
    assert f"`bapo diagnose {dump}`" in told
    assert run(["diagnose", str(dump)]) == 0
    assert "fresh tokens, both log-probs" in " ".join(capsys.readouterr().out.split())
    again = told[told.index("`bapo resume") + 1 :].split("`")[0].split()
    assert run(again[1:]) == 0  # the advice works
    assert len(lines(out, "update")) == 6


def test_parked_and_replayed_responses_are_no_drift(tmp_path, capsys):
    """Responses are continued under newer weights, and groups come back after their own passes."""
    more = {
        "offpolicy.partial_budget": 200,
        "offpolicy.replay_fraction": 0.3,
        "learn.lr": 1e-3,
        "learn.warmup_updates": 0,
    }
    assert train(tmp_path / "run", steps=5, **more) == 0
    assert "sampler and learner differ" not in capsys.readouterr().out
    rollouts, updates = lines(tmp_path / "run", "rollout"), lines(tmp_path / "run", "update")
    assert sum(line["rollout/resumed"] for line in rollouts) > 0
    assert rollouts[-1]["buffer/replayed"] > 0
    fresh = [line for line in updates if "anchor_gap" in line]
    assert any(line["anchor_tokens"] < line["tokens"] for line in fresh)  # some of an update's tokens are older
    assert any(line["anchor_tokens"] >= 64 for line in fresh)  # and some updates are judged
    # 1e-3: four times what rounding may do here (`logprob_limit` of this model in tests/unit/core/test_anchor.py)
    assert all(line["anchor_gap_max"] < 1e-3 for line in fresh)
    assert lines(tmp_path / "run", "skipped") == []
