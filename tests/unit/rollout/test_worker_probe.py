"""The probe of what an engine samples, by hand on a uniform policy, then with weights that are wrong."""

from __future__ import annotations

from math import log

import pytest
import torch

from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.worker import Probed, WrongWeights, probe
from tests.rounding import carried
from tests.tiny.models import tiny

CONTEXTS = [[5, 6, 7], [8], [9, 10]]


@torch.no_grad()
def engine_and_table(**wrong):
    """An engine with the weights of a tiny model, some of them wrong, and the learner's log-probs after CONTEXTS."""
    engine = LocalEngine(tiny("llama"), slots=4)
    learner = tiny("llama")
    engine.load([(name, wrong.get(name, weight)) for name, weight in learner.named_parameters()], version=7)
    return engine, next_logprobs(learner)


def next_logprobs(model, temperature=1.0):
    logits = [model(torch.tensor([ids])).logits[0, -1] for ids in CONTEXTS]
    return (torch.stack(logits) / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gaps_by_hand_on_a_uniform_policy(temperature):
    engine, table = engine_and_table(**{"lm_head.weight": torch.zeros(32, 32)})
    size = table.shape[1]
    table = torch.zeros_like(table)
    table[:, :-1] = log(3.0)  # all tokens but the last are 3 times as likely as the last, 3^2 times at temperature 1/2
    found = probe(engine, CONTEXTS, table, temperature=temperature, draws=2, tolerance=1.0)
    weight = 3.0 ** (1 / temperature)
    # the engine gives every token 1 / size; none of these six draws is the last token
    gap = abs(log(1 / size) - log(weight / ((size - 1) * weight + 1)))
    assert gap > 1e-3
    assert found.tokens == 6
    assert found.gap_max == pytest.approx(gap, rel=1e-3)
    assert found.gap_mean == pytest.approx(gap, rel=1e-3)


@pytest.mark.numeric
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_right_weights_pass(temperature):
    engine, table = engine_and_table()
    found = probe(engine, CONTEXTS, table, temperature=temperature, draws=8, tolerance=1e-4)
    assert found == Probed(found.gap_max, found.gap_mean, tokens=24)
    limit = carried(lambda model: next_logprobs(model, temperature), given=lambda: tiny("llama"))
    assert 0 <= found.gap_mean <= found.gap_max < limit < 1e-4


def test_one_stale_tensor_is_found_and_the_error_says_where():
    name = "model.layers.0.mlp.down_proj.weight"
    engine, table = engine_and_table(**{name: 3 * tiny("llama").get_parameter(name)})
    with pytest.raises(WrongWeights, match=r"LocalEngine with weights of version 7 .* after context \d it gave token"):
        probe(engine, CONTEXTS, table, tolerance=1e-3)


def test_a_table_that_is_not_a_number_does_not_pass():
    engine, table = engine_and_table()
    with pytest.raises(WrongWeights, match=r"after context 1 .* gaps of 12 tokens are nan in the mean"):
        probe(engine, CONTEXTS, table.index_fill(0, torch.tensor(1), torch.nan), tolerance=1e-3)


def test_the_mean_gap_has_a_bound_of_its_own():
    engine, table = engine_and_table()
    moved = torch.log_softmax(table + 0.3 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0)), -1)
    found = probe(engine, CONTEXTS, moved, draws=8, tolerance=9.0)
    assert 0.05 < found.gap_mean < found.gap_max
    with pytest.raises(WrongWeights, match="in the mean"):
        probe(engine, CONTEXTS, moved, draws=8, tolerance=9.0, mean_tolerance=0.05)
