"""Supervised updates: the loss by hand, updates that do not depend on the cut, and what is measured."""

import copy
import math
import re

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from bapo.learn.head import TokenHead
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.packing import pack_demonstrations
from bapo.learn.supervised import measure_fit, sft_loss, sft_step
from tests.rounding import carried
from tests.tiny.models import tiny
from tests.unit.learn.test_learner import gradients_kept, same_update

CPU = torch.device("cpu")
PAIRS = [([3, 4], [5, 6, 1]), ([7], [8, 1]), ([9, 2, 11, 12], [13, 14, 15, 16, 17, 1]), ([3], [1])] * 2


def packed(pairs, micro_tokens=10**6):
    return pack_demonstrations(pairs, micro_tokens=micro_tokens, device=CPU)


def test_loss_and_gradient_by_hand():
    logprobs = tensor([math.log(0.5), math.log(0.25)], requires_grad=True)
    loss = sft_loss(logprobs, denominator=4)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(8) / 4)
    assert_close(logprobs.grad, tensor([-0.25, -0.25]))


def test_packed_demonstrations_by_hand():
    (batch,) = packed([([5], [7, 1]), ([5, 6], [8, 9, 1])])
    assert batch.input_ids.tolist() == [5, 6, 8, 9, 1, 5, 7, 1]  # longest first
    assert batch.predicts.tolist() == [1, 2, 3, 5, 6]
    assert batch.targets.tolist() == [8, 9, 1, 7, 1]  # responses only, each with its end
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.numeric
def test_an_update_does_not_depend_on_how_it_is_cut():
    start = tiny()

    def learner_of(micro_tokens=10**6):
        return Learner(copy.deepcopy(start), LearnerSettings(lr=1e-3, micro_tokens=micro_tokens))

    def updated(learner):
        update = sft_step(learner, PAIRS)
        assert (update.version, update.tokens) == (1, sum(len(response) for _, response in PAIRS))
        return update.metrics, gradients_kept(learner)

    cuts = (10**6, 20, 1)
    assert [len(packed(PAIRS, cut)) for cut in cuts] == [1, 3, 8]  # 1 x 8, and 8 x 1
    limits, whole = carried(updated, given=learner_of), updated(learner_of())
    for cut in cuts[1:]:
        same_update(updated(learner_of(cut)), whole, limits)


@pytest.mark.numeric
def test_the_update_is_that_of_torchs_own_cross_entropy():
    start = tiny("qwen2")

    def learner():
        return Learner(copy.deepcopy(start), LearnerSettings(lr=1e-3, clip_norm=1e9))

    def told(learner):
        return sft_step(learner, PAIRS).metrics

    metrics, limits = told(learner()), carried(told, given=learner)
    losses = []
    for prompt, response in PAIRS:
        logits = start(input_ids=tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, tensor(response), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in start.parameters() if p.grad is not None])
    assert metrics["imitation/loss"] == pytest.approx(float(loss.detach()), rel=0, abs=limits["imitation/loss"])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=0, abs=limits["grad_norm"])
    assert limits["grad_norm"] < 1e-3 * float(norm)
    assert metrics["tokens"] == sum(len(response) for _, response in PAIRS)


@pytest.mark.numeric
def test_repeated_updates_learn_the_responses_by_heart():
    learner = Learner(tiny(), LearnerSettings(lr=3e-3, warmup_updates=2))
    before = measure_fit(learner, PAIRS)
    losses = [sft_step(learner, PAIRS).metrics["imitation/loss"] for _ in range(40)]
    after = measure_fit(learner, PAIRS)
    limit = carried(lambda ours: measure_fit(ours, PAIRS).loss, given=lambda: Learner(tiny(), LearnerSettings()))
    assert losses[0] == pytest.approx(before.loss, rel=0, abs=limit)
    assert after.loss < 0.1 < before.loss
    assert (after.accuracy, after.tokens) == (1.0, before.tokens)
    assert before.accuracy < 0.5


@pytest.mark.numeric
def test_fit_is_the_same_however_it_is_cut_and_changes_nothing():
    learner, other = (Learner(tiny("qwen3"), LearnerSettings(micro_tokens=most)) for most in (10**6, 1))
    weights = [p.detach().clone() for p in learner.model.parameters()]
    whole, cut = measure_fit(learner, PAIRS), measure_fit(other, PAIRS)
    assert (whole.accuracy, whole.tokens) == (cut.accuracy, cut.tokens)
    limit = carried(lambda: measure_fit(learner, PAIRS).loss)
    assert whole.loss == pytest.approx(cut.loss, rel=0, abs=limit)
    assert learner.version == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, learner.model.parameters(), strict=True))


def test_the_most_likely_token_is_found_in_chunks_as_at_once(monkeypatch):
    states, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)
    expected = (states @ weight.T + bias).argmax(1)
    monkeypatch.setattr("bapo.learn.head.CHUNK_LOGITS", 22)
    head = TokenHead(torch.nn.Linear(5, 11))
    head.linear.weight.data, head.linear.bias.data = weight, bias
    assert torch.equal(head(states, torch.zeros(7, dtype=torch.int64), best=True).best, expected)


def test_a_gradient_that_is_not_finite_changes_nothing():
    learner = Learner(tiny(), LearnerSettings())
    before = [p.detach().clone() for p in learner.model.parameters()]
    hooks = [p.register_hook(lambda gradient: gradient * float("inf")) for p in learner.model.parameters()]
    assert re.match(r"the gradient norm is (nan|inf) although", sft_step(learner, PAIRS).skipped.cause)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    for hook in hooks:
        hook.remove()
    fresh = Learner(tiny(), LearnerSettings())
    fresh.version = 1
    assert sft_step(learner, PAIRS).metrics == sft_step(fresh, PAIRS).metrics  # nothing was left behind
