"""GraphEngine on CUDA: log-probs of a full forward pass, the general engine's tokens, budgets, parking, new weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from bapo.models.layers import LoraSettings, add_lora
from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.cuda.graphs import Pool
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.local.engine import LocalEngine, engine_for
from bapo.types import Status
from tests.rollouts import (
    assert_matches_teacher_forcing,
    assert_told_right,
    ragged_requests,
    resumed,
    sitting,
    tokens_of,
)
from tests.tiny.models import STOP, VOCABULARY, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

FAMILIES = ["llama", "qwen2", "qwen3"]
SAMPLING = Sampling(0.8, frozenset({STOP}))


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("slots", [3, 64])
def test_logprobs_and_entropies_are_those_of_a_full_forward_pass(architecture, slots):
    model = tiny(architecture).cuda()
    requests = ragged_requests(40)
    segments = sitting(GraphEngine(model, slots=slots), requests, SAMPLING, version=3)
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=2e-5)
    assert all(segment.versions == [3] * len(segment.tokens) for segment in segments)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_bfloat16_logprobs_are_near_those_of_a_full_forward_pass(architecture):
    model = tiny(architecture).cuda().bfloat16()
    requests = ragged_requests(40)
    segments = sitting(GraphEngine(model, slots=16), requests, SAMPLING, version=0)
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=0.15)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("changed", [{"temperature": 0.0}, {}, {"top_p": 0.8, "top_k": 12, "min_p": 0.02}])
def test_tokens_are_those_of_the_general_engine_on_cpu(architecture, changed):
    requests = ragged_requests(24)
    sampling = replace(SAMPLING, **changed)
    cpu = sitting(LocalEngine(tiny(architecture), slots=8), requests, sampling, version=0)
    cuda = sitting(GraphEngine(tiny(architecture).cuda(), slots=8), requests, sampling, version=0)
    same = sum(a.tokens == b.tokens for a, b in zip(cpu, cuda, strict=True))
    assert same >= 23  # a uniform may fall within rounding of an edge
    for a, b in zip(cpu, cuda, strict=True):
        if a.tokens == b.tokens:
            assert a.status is b.status
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=2e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(a.log_kept), torch.tensor(b.log_kept), atol=2e-5, rtol=0)


def test_truncated_and_plain_sittings_have_graphs_of_their_own():
    engine, requests = GraphEngine(tiny("llama").cuda(), slots=8), ragged_requests(24)
    plain, cut = SAMPLING, replace(SAMPLING, top_p=0.5)
    found = [sitting(engine, requests, sampling) for sampling in (plain, cut, plain, cut)]
    assert found[0] == found[2] != found[1] == found[3]


def test_a_budget_is_never_exceeded_and_parked_responses_go_on_where_they_stopped():
    model = tiny("llama").cuda()
    requests = ragged_requests(30)
    whole = sitting(GraphEngine(model, slots=8), requests, SAMPLING, version=0)
    engine = GraphEngine(model, slots=8)
    pieces = [[] for _ in requests]
    rest = list(enumerate(requests))
    for budget in (1, 7, 50, 101, 10_000):
        segments = sitting(engine, [r for _, r in rest], SAMPLING, version=0, token_budget=budget)
        assert sum(len(s.tokens) for s in segments) <= budget
        unfinished = []
        for (index, request), segment in zip(rest, segments, strict=True):
            pieces[index] += segment.tokens
            if segment.status is Status.PARKED:
                unfinished.append((index, resumed(request, segment)))
        rest = unfinished
    assert not rest
    assert pieces == tokens_of(whole)


@pytest.mark.parametrize("budget", [None, 200])
def test_a_watch_hears_how_far_it_is_and_changes_nothing(budget, monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
    engine, requests, told = GraphEngine(tiny("llama").cuda(), slots=8), ragged_requests(30), []
    expected = sitting(engine, requests, SAMPLING, version=0, token_budget=budget)
    assert sitting(engine, requests, SAMPLING, version=0, token_budget=budget, tell=told.append) == expected
    assert_told_right(told, expected)


def test_kept_keys_and_values_give_the_same_tokens_while_the_weights_stay():
    model = tiny("qwen3").cuda()
    requests = ragged_requests(12)
    whole = sitting(GraphEngine(model, slots=16), requests, SAMPLING, version=0)
    engine = GraphEngine(model, slots=16, parked="keep")
    first = sitting(engine, requests, SAMPLING, version=0, token_budget=100)
    assert engine.kept
    going = [i for i, s in enumerate(first) if s.status is Status.PARKED]
    more = [Request(context=[5, 6], position=0, seed=999, max_new_tokens=5)]
    second = sitting(engine, [resumed(requests[i], first[i]) for i in going] + more, SAMPLING, version=0)
    for i, segment in zip(going, second[:-1], strict=True):
        assert first[i].tokens + segment.tokens == whole[i].tokens
    assert not engine.kept


def test_new_weights_are_used_by_the_next_sitting_without_a_new_capture():
    model = tiny("llama").cuda()
    engine = GraphEngine(model, slots=16)
    requests = ragged_requests(16)
    sitting(engine, requests, SAMPLING, version=0)
    graphs = set(map(id, engine.pool._graphs.values()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    segments = sitting(engine, requests, SAMPLING, version=1)
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=2e-5)
    assert graphs <= set(map(id, engine.pool._graphs.values()))


def test_long_contexts_are_prefilled_and_split_over_the_device():
    model = tiny("llama")
    model.config.max_position_embeddings = 4096
    model.cuda()
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(torch.randint(4, VOCABULARY, (n,), generator=generator).tolist(), 0, n, 24)
        for n in (1500, 700, 64, 65, 3)
    ]
    segments = sitting(GraphEngine(model, slots=5, prefill_tokens=900), requests, SAMPLING, version=0)
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=5e-5)


def test_non_finite_logits_name_the_request():
    model = tiny("llama").cuda()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(ValueError, match="non-finite logits for request"):
        sitting(GraphEngine(model, slots=4), ragged_requests(4), SAMPLING, version=0)


def test_other_models_fall_back_with_a_notice():
    with pytest.warns(UserWarning, match="general engine"):
        engine = engine_for(tiny("mistral").cuda(), slots=8)
    requests = ragged_requests(6)
    segments = sitting(engine, requests, SAMPLING, version=0)
    assert_matches_teacher_forcing(engine.model, requests, segments, 0.8, tolerance=5e-5)


def long_requests(count, *, prompt=130, tokens=400, group=4):
    """Groups with equal prompts, whose responses need several pages."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4, VOCABULARY, (prompt + i,), generator=generator).tolist() for i in range(count)]
    return [Request(prompts[i // group], 0, 100 + i, tokens - 40 * (i % 5)) for i in range(count)]


def long_model(architecture="llama"):
    model = tiny(architecture, max_position_embeddings=1024)
    return model.cuda()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_long_responses_in_pages_have_the_logprobs_of_a_full_forward_pass(architecture):
    model, requests = long_model(architecture), long_requests(12)
    engine = GraphEngine(model, slots=8)
    segments = sitting(engine, requests, Sampling(0.8), version=0)
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=1e-4)
    assert engine.pool.pages.free == len(engine.pool.cache[0, 0]) - 1


def test_responses_that_wait_for_pages_go_on_where_they_stopped():
    model, requests = long_model(), long_requests(16, tokens=800)
    whole = sitting(GraphEngine(model, slots=16), requests, Sampling(0.8), version=0)
    engine = GraphEngine(model, slots=16, cache_tokens=4000)
    batches, prefill = [], Pool.prefill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "prefill", lambda pool, batch: (batches.append(dict(batch)), prefill(pool, batch)))
        segments = sitting(engine, requests, Sampling(0.8), version=0)
    prompts = {tuple(request.context[:-1]) for request in requests}
    again = [context for batch in batches for context in batch.values() if tuple(context) not in prompts]
    assert again, "nobody had to wait"
    same = sum(a.tokens == b.tokens for a, b in zip(segments, whole, strict=True))
    assert same >= 14  # a uniform may fall within rounding of an edge
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=1e-4)
    assert engine.pool.pages.free == len(engine.pool.cache[0, 0]) - 1
    assert segments == sitting(engine, requests, Sampling(0.8), version=0)  # bit for bit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
        assert segments == sitting(engine, requests, Sampling(0.8), version=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_rank_additions_are_sampled_with(dtype):
    model = tiny("qwen2").to("cuda", dtype)
    add_lora(model, LoraSettings(4), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    engine = engine_for(model, slots=16)
    assert isinstance(engine, GraphEngine)
    requests = ragged_requests(24)
    segments = sitting(engine, requests, SAMPLING, version=0)
    tolerance = 2e-5 if dtype == torch.float32 else 0.2
    assert_matches_teacher_forcing(model, requests, segments, 0.8, tolerance=tolerance)


def test_the_model_itself_is_left_alone():
    model = tiny("llama").cuda()
    before = copy.deepcopy(model.state_dict())
    sitting(GraphEngine(model, slots=8), ragged_requests(8), SAMPLING, version=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
