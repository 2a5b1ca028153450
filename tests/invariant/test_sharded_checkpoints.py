"""A checkpoint of two ranks continues on two, on four and on one, and that of a learner alone continues on ranks."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from tests.processes import in_ranks, opens_no_pickle
from tests.rounding import carried
from tests.sharded import CPU, alone, gradients, groups, joined, leave, sharded, weights

CASES = ("bfloat16", "low rank", "brake, previous")
BATCHES = groups(5), groups(6), groups(7)


def saved_by(learner, directory):
    """Save before the first update and after the second, and tell how the third one ends."""
    states = []
    for name, batches in (("new", ()), ("old", BATCHES[:2])):
        for batch in batches:
            learner.step(batch)
        place = directory / name
        if not learner.ranks or learner.ranks.rank() == 0:
            place.mkdir(parents=True)
        if learner.ranks:
            torch.distributed.barrier(learner.ranks)
        learner.save(place)
        if learner.ranks:
            saves_the_same_bytes(learner, place)
        states.append(learner.fingerprint())
    learner.step(BATCHES[2])
    return states, weights(learner), gradients(learner)


def saves_the_same_bytes(learner, place):
    shard = f"shard-{learner.ranks.rank() + 1:05d}.safetensors"
    (first,) = [path.read_bytes() for path in place.glob(shard)]
    for _ in range(4):
        learner.save(place)
        assert [path.read_bytes() for path in place.glob(shard)] == [first]


def continued(learner, directory):
    """Load both, the older one last, and take the third update."""
    states = []
    for name, version in (("new", 0), ("old", 2)):
        learner.load(directory / name, version=version)
        states.append(learner.fingerprint())
    assert learner.step(BATCHES[2]).version == 3
    return states, weights(learner), gradients(learner)


def save_and_load(rank, size, directory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        opens_no_pickle(monkeypatch)
        save_and_load_all(rank, size, directory)


def save_and_load_all(rank, size, directory):
    ranks = joined(rank, size, directory, name=f"meeting{size}")
    found = {}
    for case in CASES:
        if size == 2:
            found[case] = saved_by(sharded(ranks, case), directory / f"2/{case}")
        found[case, "sharded"] = continued(sharded(ranks, case), directory / f"2/{case}")
        found[case, "whole"] = continued(sharded(ranks, case), directory / f"1/{case}")
    torch.save(found, directory / f"{size}-{rank}.pt")
    leave(ranks)


def same(ours, theirs, limits=None):
    """Bit for bit, or within these limits."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert_close(ours[name].to(tensor.dtype), tensor, rtol=0, atol=limits[name] if limits else 0)


def alone_at(case, directory):
    learner = alone(case, CPU)
    learner.load(directory, version=2)
    return learner


def third_update(learner):
    learner.step(BATCHES[2])
    return gradients(learner)


@pytest.mark.numeric
def test_checkpoints_continue_on_other_numbers_of_ranks(tmp_path):
    wholes = {case: saved_by(alone(case), tmp_path / f"1/{case}") for case in CASES}
    for size in (2, 4):
        in_ranks(save_and_load, size, size, tmp_path)
    two, four = (torch.load(tmp_path / f"{size}-0.pt", weights_only=False) for size in (2, 4))
    for case in CASES:
        states, expected, moments = two[case]
        assert two[case, "sharded"][0] == states
        same(two[case, "sharded"][1], expected)  # the same number of ranks: bit for bit
        same(two[case, "sharded"][2], moments)
        # On others, the sums of the third update are taken in another order. Its gradients are compared, because AdamW
        # makes a whole step of what rounding leaves of a gradient of nearly zero.
        limits = carried(third_update, given=partial(alone_at, case, tmp_path / f"2/{case}/old"), draws=2)
        assert four[case, "sharded"][0] == states
        same(four[case, "sharded"][2], moments, limits)
        on_one = continued(alone(case), tmp_path / f"2/{case}")
        assert on_one[0] == states
        same(moments, on_one[2], limits)

        states, _, moments = wholes[case]
        for ranks in (two, four):
            assert ranks[case, "whole"][0] == states
            same(ranks[case, "whole"][2], moments, limits)

    with pytest.raises(KeyError, match="are missing"):
        alone("searched").load(tmp_path / "2/low rank/old", version=2)
    other = alone("low rank")
    with torch.no_grad():
        next(p for p in other.model.parameters() if not p.requires_grad)[0, 0] += 1
    with pytest.raises(KeyError, match="frozen weights below the trained ones have changed"):
        other.load(tmp_path / "2/low rank/old", version=2)
