"""vLLM's engine with a real model whose head is its embedding, which vLLM's own loading leaves stale on CPUs."""

import os
from copy import deepcopy

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM's environment: make test-integrations")

from bapo.rollout.engine import Request, Sampling, generate
from bapo.rollout.worker import WrongWeights, probe
from tests.vllm.engines import changed, gap, made, order, policy

MODEL = os.environ.get("BAPO_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not MODEL, reason="needs BAPO_SMOLLM2")
BOUND = 5e-4  # of float32 log-probs over a vocabulary of 49,152; 9e-5 was measured
CONTEXTS = [[504, 3575, 282, 4649, 314], [198, 504, 6330], [1, 4093, 198, 1780, 314, 216, 33, 39, 1232, 216, 34]]


@pytest.fixture(scope="module")
def model():
    return policy(MODEL)


@pytest.fixture(scope="module")
def engine():
    engine = made(MODEL)
    yield engine
    engine.close()


def requests() -> list[Request]:
    return [Request(ids, 0, seed, 24) for seed, ids in enumerate(CONTEXTS)]


@torch.no_grad()
def table(model) -> torch.Tensor:
    return torch.stack([model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in CONTEXTS])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_tempered_policy(engine, model, temperature):
    engine.load(model.named_parameters(), version=0)
    measured = gap(model, requests(), generate(engine, requests(), Sampling(temperature)), temperature)
    print(f"largest gap at temperature {temperature}: {measured:.1e}")
    assert measured < BOUND


def test_changed_weights_change_the_head_too(engine, model):
    engine.load(model.named_parameters(), version=1)
    newer = changed(model, seed=3)
    assert "lm_head.weight" not in dict(newer.named_parameters())
    engine.load(newer.named_parameters(), version=2)
    segments = generate(engine, requests(), Sampling(1.0))
    assert gap(newer, requests(), segments) < BOUND < gap(model, requests(), segments)
    assert probe(engine, CONTEXTS, table(newer), tolerance=BOUND).tokens == 12


def test_a_stale_head_is_caught_by_the_probe(engine, model):
    engine.load(model.named_parameters(), version=3)
    newer = changed(model, seed=4)
    order(engine, "leave_heads", True)
    try:
        engine.load(newer.named_parameters(), version=4)  # every bit arrives; only the packed copy is old
        with pytest.raises(WrongWeights, match="version 4 does not sample from the policy of that version"):
            probe(engine, CONTEXTS, table(newer), tolerance=1e-2)
    finally:
        order(engine, "leave_heads", False)
    engine.load(newer.named_parameters(), version=4)
    assert probe(engine, CONTEXTS, table(newer), tolerance=BOUND).gap_max < BOUND


def test_another_dtype_is_sent_as_it_is(engine, model):
    """bfloat16 weights in a float32 engine: what is loaded is what was sent, rounded once by the sender."""
    rounded = [(name, weight.to(torch.bfloat16)) for name, weight in model.named_parameters()]
    engine.load(rounded, version=5)
    same = deepcopy(model)
    same.load_state_dict({name: weight.float() for name, weight in rounded}, strict=False)
    assert gap(same, requests(), generate(engine, requests(), Sampling(1.0))) < BOUND
