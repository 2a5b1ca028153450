"""The updates of several ranks are those of one process, though ranks have different numbers of micro-batches.

Sums over ranks are taken in another order, so gradients agree up to rounding, and `carried` derives how far. Weights do
not agree so: AdamW divides a gradient by its own size, so where it is nearly zero, rounding decides which way a whole
step of the learning rate goes. Therefore gradients are compared, as AdamW's first moment keeps them. A weight after the
first update is compared as well as its gradient lets it be: g / |g| changes by at most min(2, 2 d / |g|) if g
does by d.
"""

from functools import cache

import pytest
import torch
from torch.testing import assert_close

from bapo.learn.supervised import measure_fit, sft_step
from tests.processes import in_ranks
from tests.rounding import carried, rounding
from tests.sharded import CASES, CPU, ROUNDED, alone, gradients, groups, joined, leave, sharded, weights

pytestmark = pytest.mark.numeric

UPDATES = (groups(5), groups(7, count=1))  # the second has fewer responses than four ranks
BOUNDS = ("clip_low", "clip_high", "stop")
CONTEXTS = [[5, 6], [7, 8, 9, 10, 11], [4]]
PAIRS = [([5], [7, 8, 9]), ([5, 6], [8] * 30), ([4], [11, 12])]
ON = {2: list(CASES), 4: ["searched", "tied head", "low rank", "one micro-batch"]}


def updated(learner):
    """What a learner tells while it takes the updates."""
    first = learner.step(UPDATES[0]).metrics
    told = {"weights": weights(learner), "first": gradients(learner)}
    told |= {"metrics": [first, learner.step(UPDATES[1]).metrics], "version": learner.version}
    told |= {"both": gradients(learner), "next": learner.next_logprobs(CONTEXTS).exp()}
    return told | {"fingerprint": learner.fingerprint()}


def taught(learner):
    """The same for supervised updates."""
    before = measure_fit(learner, PAIRS)
    metrics = [sft_step(learner, PAIRS).metrics for _ in range(2)]
    fits = [before, measure_fit(learner, PAIRS)]
    return {"metrics": metrics, "losses": [fit.loss for fit in fits], "fits": fits, "both": gradients(learner)}


def take_part(rank, size, directory):
    ranks = joined(rank, size, directory)
    found = {case: updated(sharded(ranks, case)) for case in ON[size]}
    found["taught"] = taught(sharded(ranks))
    torch.save(found, f"{directory}/{rank}.pt")
    leave(ranks)


@pytest.fixture(scope="module")
def found_on(tmp_path_factory):
    """What every rank found, of two and of four."""

    @cache
    def found(size):
        directory = tmp_path_factory.mktemp("ranks")
        in_ranks(take_part, size, size, str(directory))
        return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(size)]

    return found


@cache
def told_alone(compute, case, *names):
    """What a learner alone tells, and how far rounding may take these parts of it."""

    def told(learner):
        return {name: value for name, value in compute(learner).items() if name in names}

    draws = 8 if case in ROUNDED else 2  # in bfloat16, rounding may also decide the last step of the search for bounds
    return compute(alone(case)), carried(told, given=lambda: alone(case, CPU), draws=draws)


def same(ours, theirs, limits):
    """Numbers and tensors by name, each within its limit, and what is no more than a few roundings of itself."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (ours[name], value))
        limit = limits[name] + rounding(4, float(expected.nan_to_num().abs().max()))
        assert_close(found, expected, rtol=0, atol=limit, equal_nan=True, msg=lambda said, name=name: f"{name}: {said}")


def same_after_one_step(ours, theirs, limits, dtype):
    """Weights after AdamW's first step, within what the limit of their gradients leaves."""
    lr = theirs["metrics"][0].get("lr", 0.0)  # none where the update was refused
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name in theirs["weights"]:
        found, expected = (told["weights"][name].double() for told in (ours, theirs))
        if name not in theirs["first"]:  # frozen, or the update was refused
            assert torch.equal(found, expected), name
            continue
        gradient = theirs["first"][name]
        turned = (2 * limits["first"][name] / gradient.double().abs()).clamp(max=2)
        allowed = 1.01 * lr * turned + rounding(4, dtype=dtype) * expected.abs()  # 1.01: decay of weights
        assert ((found - expected).abs() <= allowed + rounding(4, lr)).all(), name


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in ON.items() for case in cases])
def test_ranks_take_the_updates_of_one_process(size, case, found_on):
    ranks = found_on(size)
    expected, limits = told_alone(updated, case, "metrics", "first", "both", "next")
    dtype = torch.bfloat16 if case in ROUNDED else torch.float32
    if case == "searched":
        assert expected["metrics"][0]["stop"] in (1, 2)  # the search ended inside its path, so a wrong table would show
        assert expected["metrics"][0]["lr"] < 0.9e-2  # the effective sample size is below 1, so a rank's own would show
    largest = max((float(gradient.abs().max()) for gradient in expected["first"].values()), default=1.0)
    assert max(limits["first"].values(), default=0.0) < (0.5 if case in ROUNDED else 1e-3) * largest  # it can fail
    for found in (rank[case] for rank in ranks):
        assert found["version"] == 2
        ours, theirs = found["metrics"][0], expected["metrics"][0]
        if case in ROUNDED:  # a log-prob may fall into another bin
            names = ("tokens", "entropy", "grad_norm", "clip_low", "clip_high")
            ours, theirs = ({name: metrics[name] for name in names} for metrics in (ours, theirs))
        same(ours, theirs, limits["metrics"][0])
        if case not in ROUNDED:
            assert [ours.get(name) for name in BOUNDS] == [theirs.get(name) for name in BOUNDS]  # not only close
        same(found["first"], expected["first"], limits["first"])
        if case not in ROUNDED:  # in bfloat16, steps of AdamW that turned leave nothing to compare
            same(found["both"], expected["both"], limits["both"])
        same_after_one_step(found, expected, limits, dtype)
        same({"next": found["next"]}, {"next": expected["next"]}, limits)
        assert found["metrics"] == ranks[0][case]["metrics"]  # not only close: the ranks decide alike
        assert found["fingerprint"] == ranks[0][case]["fingerprint"]


@pytest.mark.parametrize("size", ON)
def test_ranks_take_the_supervised_updates_of_one_process(size, found_on):
    expected, limits = told_alone(taught, "searched", "metrics", "losses", "both")
    for found in (rank["taught"] for rank in found_on(size)):
        for at, (ours, theirs) in enumerate(zip(found["metrics"], expected["metrics"], strict=True)):
            same(ours, theirs, limits["metrics"][at])
        for ours, theirs in zip(found["fits"], expected["fits"], strict=True):
            assert ours.tokens == theirs.tokens == 35
            assert abs(ours.loss - theirs.loss) <= limits["losses"]
            assert ours.accuracy == theirs.accuracy
        same(found["both"], expected["both"], limits["both"])
