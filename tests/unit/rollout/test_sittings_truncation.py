"""Truncated sampling: what is left and how much of it, against a literal loop in float64, in the engines of a process.

`tests/vllm/test_engine.py` asks the same of vLLM.
"""

import math
from dataclasses import replace

import pytest
import torch

from bapo.rollout import rounds
from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.rollout.sittings import left_by
from bapo.types import Problem, Status, group_from_state, group_state
from tests.rollouts import forcing_limit, ragged_requests, sitting
from tests.tiny.models import STOP, VOCABULARY, tiny
from tests.truncated import by_loop, exact_rows

RULES = {
    "top_p": Sampling(top_p=0.7),
    "top_k": Sampling(top_k=3),
    "min_p": Sampling(min_p=0.2),
    "all": Sampling(top_p=0.8, top_k=6, min_p=0.05),
    "only the best": Sampling(top_p=1e-9),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_left_is_what_a_loop_leaves(rule):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 40, generator=generator) * torch.linspace(0.1, 6, 50)[:, None]
    left, mass = left_by(RULES[rule], logits)
    for row, kept, log_mass in zip(logits.double().tolist(), left, mass.tolist(), strict=True):
        tokens, expected = by_loop(row, RULES[rule])
        assert set(kept.nonzero().flatten().tolist()) == tokens
        assert log_mass == pytest.approx(math.log(expected), abs=1e-6)  # float32, of a sum over 40


@pytest.mark.parametrize(
    ("sampling", "left", "mass"),
    [
        (Sampling(top_k=2), {0, 1, 2}, 0.8),  # two others are as likely as the second
        (Sampling(top_p=0.5), {0, 1, 2}, 0.8),  # the second reaches it, and the third is as likely
        (Sampling(top_p=0.2), {0}, 0.4),
        (Sampling(min_p=0.49), {0, 1, 2}, 0.8),
        (Sampling(min_p=0.51), {0}, 0.4),
        (Sampling(top_k=4, top_p=0.9), {0, 1, 2, 3, 4}, 1.0),
        (Sampling(min_p=0.49, top_p=0.5), {0}, 0.4),  # half of the 0.8 that min_p has left
        (Sampling(top_k=1, top_p=0.99), {0}, 0.4),
    ],
)
def test_equal_tokens_at_the_edge_stay_together(sampling, left, mass):
    kept, log_mass = left_by(sampling, torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log())
    assert set(kept[0].nonzero().flatten().tolist()) == left
    assert float(log_mass.exp()) == pytest.approx(mass, rel=1e-6)


def test_logits_that_are_not_finite_reach_the_draw():
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, math.inf, 1.0]])
    for sampling in RULES.values():
        left, _ = left_by(sampling, logits)
        masked = logits.masked_fill(~left, -math.inf).log_softmax(-1)
        assert not masked[left].isfinite().any()


@pytest.mark.numeric
@pytest.mark.parametrize("make", [LocalEngine, GraphEngine])
def test_recorded_log_probs_are_those_of_what_is_left(make):
    model = tiny("llama")
    sampling = Sampling(0.8, frozenset({STOP}), top_p=0.8, top_k=12, min_p=0.02)
    requests = [replace(request, max_new_tokens=4) for request in ragged_requests(3)]
    segments = sitting(make(model, slots=2), requests, sampling)
    limit = forcing_limit(model, requests, segments, 0.8)
    for request, segment in zip(requests, segments, strict=True):
        rows = exact_rows(model, request.context, segment.tokens, 0.8)
        for token, logprob, entropy, log_mass, row in zip(
            segment.tokens, segment.logprobs, segment.entropies, segment.log_kept, rows, strict=True
        ):
            left, mass = by_loop(row, sampling)
            assert token in left
            assert len(left) < VOCABULARY
            # The error of log m is a mean of errors of log-probs.
            assert logprob + log_mass == pytest.approx(row[token], abs=limit)
            assert log_mass == pytest.approx(math.log(mass), abs=limit)
            shares = [math.exp(row[one]) / mass for one in left]
            assert entropy == pytest.approx(-sum(share * math.log(share) for share in shares), abs=3 * limit)


@pytest.mark.parametrize("make", [LocalEngine, GraphEngine])
def test_rules_that_leave_out_nothing_change_no_bit(make):
    model, requests = tiny("llama"), [replace(request, max_new_tokens=4) for request in ragged_requests(3)]
    engine = make(model, slots=2)
    plain = sitting(engine, requests, Sampling(0.8))
    assert [segment.log_kept for segment in plain] == [[]] * 3
    loose = sitting(engine, requests, Sampling(0.8, top_k=VOCABULARY, min_p=1e-30))
    assert [segment.log_kept for segment in loose] == [[0.0] * len(segment.tokens) for segment in plain]
    assert [replace(segment, log_kept=[]) for segment in loose] == plain
    greedy = sitting(engine, requests, Sampling(0.0, top_p=0.5))
    assert greedy == sitting(engine, requests, Sampling(0.0))


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        (Sampling(top_p=0.0), "top_p=0.0 is not a share"),
        (Sampling(top_k=-1), "top_k=-1"),
        (Sampling(min_p=1.5), "min_p"),
    ],
)
def test_impossible_truncation_is_refused(sampling, told):
    with pytest.raises(ValueError, match=told):
        sitting(LocalEngine(tiny("llama")), [Request([5], 0, 0, 1)], sampling)


def test_parked_responses_and_checkpoints_keep_their_masses():
    def sampled(top_p, budget):
        scheduler = Scheduler(Sampling(top_p=top_p), max_response_tokens=9, token_budget=budget, max_age=5)
        scheduler.admit(new_group(i, Problem(str(i), "", None), [3, 4 + i], responses=2, seed=7) for i in range(2))
        engine, groups = LocalEngine(tiny("llama")), []
        for version in range(9):
            engine.load(engine.model.named_parameters(), version=version)
            state = scheduler.state_dict()
            scheduler.load_state_dict(state)
            back = scheduler.bookmark()
            rounds.run(scheduler, engine)
            back()
            assert scheduler.state_dict() == state
            groups += rounds.run(scheduler, engine).groups
        return groups

    whole, parts = sampled(0.9, 1000), sampled(0.9, 10)
    for one, other in zip(whole, parts, strict=True):
        for once, pieces in zip(one.trajectories, other.trajectories, strict=True):
            assert once.status is Status.TRUNCATED
            assert once.tokens == pieces.tokens
            assert once.log_kept == pytest.approx(pieces.log_kept, abs=1e-5)
            assert len(once.log_kept) == 9
            assert min(once.log_kept) >= math.log(0.9)
            assert once.versions != pieces.versions
        assert group_from_state(group_state(one)) == one
    (first, _) = sampled(1.0, 1000)
    assert "log_kept" not in group_state(first)["trajectories"][0]
