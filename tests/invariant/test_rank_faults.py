"""An error on one rank ends the update on all of them at once, with an error that says whose it was."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.processes import in_ranks
from tests.rounding import carried, rounding
from tests.sharded import CPU, alone, groups, joined, leave, overflowing, sharded, weights

PATIENCE = 50.0  # seconds; a rank that waits for its end has failed the test


def tell(work, directory, rank):
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        work()
    seconds = time.monotonic() - began
    Path(directory, f"{rank}.txt").write_text(f"{type(caught.value).__name__}: {caught.value}")
    assert seconds < PATIENCE / 2


def bad_input(rank, directory):
    """Rank 0 has got other groups than the rest, with a NaN."""
    ranks = joined(rank, 2, directory, patience=PATIENCE)
    learner, mine = sharded(ranks), groups()
    if rank == 0:
        mine[0].trajectories[1].behavior_logprobs[3] = math.nan
    tell(lambda: learner.step(mine), directory, rank)
    assert learner.version == 0
    assert learner.step(groups()).version == 1  # nothing is broken: the next update can be taken
    leave(ranks)


def test_bad_input_on_one_rank_ends_the_update_on_all_of_them(tmp_path):
    in_ranks(bad_input, 2, str(tmp_path))
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert "behavior_logprobs is nan" in told[0]
    assert "another rank cannot take part" in told[1]


def spoiled_weight(rank, directory):
    """A weight in the shard of rank 0 is infinite: no rank takes the update, and both take the next one."""
    ranks = joined(rank, 2, directory, patience=PATIENCE)
    learner, twin = sharded(ranks), sharded(ranks)
    weight = next(iter(learner.model.parameters())).to_local().detach()
    sound = weight.clone()
    if rank == 0:
        weight.view(-1)[0] = math.inf
    with pytest.raises(FloatingPointError, match="holds a NaN or an infinity, so this state is not saved"):
        learner.save(Path(directory))
    update = learner.step(groups())
    assert "weights of the model are not finite" in update.skipped.cause
    assert len(update.skipped.tokens["logprobs"]) == sum(len(t.tokens) for g in groups() for t in g.trajectories)
    assert learner.version == 1
    weight.copy_(sound)
    twin.version = 1
    assert learner.step(groups()).metrics == twin.step(groups()).metrics
    leave(ranks)


def test_ranks_skip_an_update_together(tmp_path):
    in_ranks(spoiled_weight, 2, str(tmp_path))
    assert not list(tmp_path.glob("*.safetensors"))


def overflowing_response(rank, directory):
    """A response in the part of one rank is too much for float32: both skip the update, and say the same about it."""
    ranks = joined(rank, 2, directory, patience=PATIENCE)
    learner = sharded(ranks)
    learner.settings = replace(learner.settings, advantages="dr_grpo")
    before = learner.fingerprint()
    update = learner.step(overflowing())
    assert learner.version == update.version == 1
    assert learner.fingerprint() == before
    Path(directory, f"{rank}.txt").write_text(f"{update.metrics} {update.skipped.cause}")
    assert learner.step(groups()).skipped is None
    leave(ranks)


def test_ranks_agree_on_an_update_that_only_one_of_them_cannot_take(tmp_path):
    in_ranks(overflowing_response, 2, str(tmp_path))
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert "the gradient norm is inf although all log-probs are finite" in told[0]
    learner = alone()
    learner.settings = replace(learner.settings, advantages="dr_grpo")
    single = learner.step(overflowing())
    assert told[0].startswith(str(single.metrics))


def drifted(rank, directory):
    """Nothing sampled these tokens, so the log-probs that stand with them are far from the learner's."""
    ranks = joined(rank, 2, directory, patience=PATIENCE)
    learner = sharded(ranks, "limited")
    before = weights(learner)
    update = learner.step(groups())
    assert learner.version == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())
    kept = {name: tensor.tolist() for name, tensor in update.skipped.tokens.items()}
    Path(directory, f"{rank}.json").write_text(json.dumps([update.drift, update.metrics, kept]))
    leave(ranks)


@pytest.mark.numeric
def test_ranks_refuse_an_update_together_and_say_what_one_process_says(tmp_path):
    in_ranks(drifted, 2, str(tmp_path))
    ours, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert ours == theirs
    expected = alone("limited").step(groups())
    assert expected.skipped.drifted
    words, metrics, kept = ours
    assert words == expected.drift
    limits = carried(lambda learner: learner.step(groups()).metrics, given=lambda: alone("limited", CPU))
    assert metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=rounding(4), abs=limits[name], nan_ok=True), name
    assert sorted(kept["targets"]) == sorted(expected.skipped.tokens["targets"].tolist())


def failing_pass(rank, directory):
    """A layer fails on rank 2 in the middle of a pass, as it does where memory is short."""
    ranks = joined(rank, 4, directory, patience=PATIENCE)
    learner = sharded(ranks)
    if rank == 2:
        layer = learner.model.model.layers[1]
        layer.mlp.forward = lambda states: (_ for _ in ()).throw(RuntimeError("out of memory"))
    tell(lambda: learner.step(groups()), directory, rank)


def test_an_error_in_a_pass_reaches_all_ranks_and_names_its_own(tmp_path):
    in_ranks(failing_pass, 4, str(tmp_path))
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)]
    assert told[2] == "RuntimeError: out of memory"
    for rank in (0, 1, 3):
        assert "another rank failed first. rank 2: RuntimeError: out of memory" in told[rank]
