"""GraphEngine's bookkeeping, with its kernels under Triton's interpreter: seats, budgets, parking, refills.

The interpreter is slow, so responses are few and short here, and one layer must do where a second would show nothing;
tests/gpu repeats these at size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bapo.rollout.cuda.decoder import unsupported
from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.cuda.graphs import Pool, batch_sizes
from bapo.rollout.cuda.kernels.sampling import sample
from bapo.rollout.engine import Request, Sampling, Segment
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
from tests.tiny.models import STOP, shallow, tiny

SAMPLING = Sampling(0.8, frozenset({STOP}))


def short_requests(count, tokens=3):
    return [replace(request, max_new_tokens=tokens) for request in ragged_requests(count)]


@pytest.mark.numeric
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logprobs_are_a_full_forward_passes_and_tokens_the_general_engines(architecture):
    model, requests = tiny(architecture), short_requests(3)
    segments = sitting(GraphEngine(model, slots=2), requests, SAMPLING, version=3)
    assert_matches_teacher_forcing(model, requests, segments, 0.8)
    assert tokens_of(segments) == tokens_of(sitting(LocalEngine(model, slots=2), requests, SAMPLING, version=3))
    assert all(segment.versions == [3] * len(segment.tokens) for segment in segments)
    assert {segment.status for segment in segments} <= {Status.STOPPED, Status.TRUNCATED}


def test_a_float32_head_gives_the_sampler_logits_that_are_not_rounded(monkeypatch):
    seen = []

    def watched(logits, *rest, **options):
        seen.append(logits)
        sample(logits, *rest, **options)

    monkeypatch.setattr("bapo.rollout.cuda.graphs.sample", watched)
    model, requests = shallow("qwen2").bfloat16(), short_requests(2)
    for float32 in (True, False):
        seen.clear()
        sitting(GraphEngine(model, slots=2, float32_head=float32), requests, SAMPLING, version=0)
        logits = torch.cat(seen)
        assert torch.equal(logits, logits.bfloat16().to(logits.dtype)) is not float32


@pytest.mark.parametrize("parked", ["rebuild", "keep"])
def test_parked_responses_go_on_where_they_stopped(parked):
    model, requests = tiny("llama"), short_requests(4, tokens=4)
    whole = sitting(LocalEngine(model, slots=4), requests, SAMPLING, version=0)
    engine = GraphEngine(model, slots=3, parked=parked)
    pieces, rest = [[] for _ in requests], list(enumerate(requests))
    for budget in (5, 3, 100):
        segments = sitting(engine, [r for _, r in rest], SAMPLING, version=0, token_budget=budget)
        assert sum(map(len, tokens_of(segments))) <= budget
        assert bool(engine.kept) == (parked == "keep" and any(s.status is Status.PARKED for s in segments))
        for (index, _), segment in zip(rest, segments, strict=True):
            pieces[index] += segment.tokens
        rest = [
            (index, resumed(request, segment))
            for (index, request), segment in zip(rest, segments, strict=True)
            if segment.status is Status.PARKED
        ]
    assert not rest
    assert pieces == tokens_of(whole)


@pytest.mark.numeric
def test_a_response_that_comes_back_in_its_turn_is_prefilled_with_what_was_said_alone(monkeypatch):
    """Three responses on two slots: each ends a turn, is told three tokens, and goes on as in a full pass."""
    model, stops = shallow(), Sampling(0.8, frozenset(range(4, 20)))
    engine, prefilled = GraphEngine(model, slots=2), []
    plain = Pool.prefill
    watched = lambda pool, contexts: (prefilled.extend(len(c) - n for n, c in contexts.values()), plain(pool, contexts))  # noqa: E731
    monkeypatch.setattr(Pool, "prefill", watched)
    engine.load(model.named_parameters(), version=0)
    going = {index: Request([5, 6, 7 + index], 0, index, 9, id=index) for index in range(3)}
    parts, told = {index: [] for index in going}, 0
    engine.submit(list(going.values()), stops, turns=True)
    while going:
        back = []
        while not engine.resting:
            for id, segment in engine.collect(0):
                parts[id].append((going[id], segment))
                going[id] = resumed(going[id], segment)
                if segment.status is not None:
                    if segment.status is Status.STOPPED and going[id].max_new_tokens > 3:
                        back.append(id)
                    else:
                        del going[id]
        for id in back:
            going[id] = resumed(going[id], Segment([8, 9, 10]))
            told += 1
        engine.submit([going[id] for id in back], stops, turns=True)
    assert told > 2
    assert sorted(prefilled) == [2] * 3 + [3] * told
    engine.park()
    assert engine.collect() == []
    assert engine.pool.pages.free == len(engine.pool.pages._owners) - 1
    for listed in parts.values():
        assert_matches_teacher_forcing(model, [r for r, _ in listed], [s for _, s in listed], 0.8)


@pytest.mark.parametrize("budget", [None, 5])
def test_a_watch_hears_how_far_it_is_and_changes_nothing(budget, monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
    monkeypatch.setattr("bapo.rollout.cuda.engine.LOOK", 1)
    requests, told = short_requests(3), []
    engine = GraphEngine(shallow(), slots=2)
    watched = sitting(engine, requests, SAMPLING, version=0, token_budget=budget, tell=told.append)
    assert watched == sitting(engine, requests, SAMPLING, version=0, token_budget=budget)
    assert_told_right(told, watched)
    assert len(told) > 3


def test_slots_kept_for_others_are_given_up_rather_than_waited_for():
    model = shallow()
    first, second = short_requests(2)
    engine = GraphEngine(model, slots=1, parked="keep")
    begun = sitting(engine, [first], SAMPLING, version=0, token_budget=1)[0]
    assert list(engine.kept) == [(first.seed, (*first.context, *begun.tokens))]
    out = sitting(engine, [second, resumed(first, begun)], SAMPLING, version=0)
    assert all(segment.status is not Status.PARKED for segment in out)
    assert begun.tokens + out[1].tokens == sitting(LocalEngine(model), [first], SAMPLING, version=0)[0].tokens


@pytest.mark.numeric
def test_equal_contexts_are_prefilled_once_and_diverge():
    model = shallow()
    requests = [Request([5, 6, 7, 8], 0, seed, 2) for seed in (1, 2, 3)]
    engine = GraphEngine(model, slots=4)
    segments = sitting(engine, requests, SAMPLING, version=0)
    assert_matches_teacher_forcing(model, requests, segments, 0.8)
    assert len(set(map(tuple, tokens_of(segments)))) > 1


def test_the_cache_grows_when_longer_responses_come(monkeypatch):
    monkeypatch.setattr("bapo.rollout.cuda.engine.REACH_STEP", 4)
    engine = GraphEngine(shallow(), slots=1)
    sitting(engine, [Request([5], 0, 1, 2)], SAMPLING, version=0)
    small = engine.pool
    sitting(engine, [Request([5, 6], 0, 1, 1)], SAMPLING, version=0)
    assert engine.pool is small
    sitting(engine, [Request([5, 6, 7, 8], 0, 1, 2)], SAMPLING, version=0)
    assert (small.reach, engine.pool.reach) == (4, 8)


@pytest.mark.numeric
def test_new_weights_are_seen():
    model, requests = shallow(), short_requests(1)
    engine = GraphEngine(model, slots=1)
    sitting(engine, requests, SAMPLING, version=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    assert_matches_teacher_forcing(model, requests, sitting(engine, requests, SAMPLING, version=1), 0.8)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_non_finite_logits_name_the_request(temperature):
    model = shallow()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(ValueError, match="non-finite logits for request 0"):
        sitting(GraphEngine(model, slots=2), short_requests(1), replace(SAMPLING, temperature=temperature), version=0)


def test_no_requests_no_budget():
    engine = GraphEngine(shallow(), slots=2)
    assert sitting(engine, [], SAMPLING, version=0) == []
    assert tokens_of(sitting(engine, short_requests(2), SAMPLING, version=0, token_budget=0)) == [[], []]


def test_what_it_cannot_run_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="architecture is mistral"):
        GraphEngine(tiny("mistral"))
    with pytest.raises(ValueError, match="parked='both'"):
        GraphEngine(tiny("llama"), parked="both")
    odd = tiny("llama")
    odd.config.rope_parameters["rope_type"] = "dynamic"
    assert "depends on the sequence length" in unsupported(odd)
    wrapped = tiny("llama")
    wrapped.model.layers[0].mlp.up_proj = torch.nn.Sequential(wrapped.model.layers[0].mlp.up_proj)
    assert "Sequential" in unsupported(wrapped)
    adapted = tiny("llama")
    adapted.lm_head = type("Adapted", (torch.nn.Linear,), {})(32, 32, bias=False)
    assert "Adapted" in unsupported(adapted)
    windowed = tiny("qwen2")
    windowed.config.layer_types = ["full_attention", "sliding_attention"]
    assert "sliding window" in unsupported(windowed)


def test_on_cpu_the_general_engine_is_chosen():
    assert isinstance(engine_for(tiny("llama"), slots=4), LocalEngine)
    with pytest.raises(ValueError, match=r"needs the CUDA engine, .* it is on cpu"):
        engine_for(tiny("llama"), slots=4, parked="keep")


def test_batch_sizes_hold_every_number_of_rows():
    assert batch_sizes(3) == [3]
    assert batch_sizes(64) == [8, 12, 16, 24, 32, 48, 64]
    assert batch_sizes(100)[-3:] == [64, 96, 100]


def test_kept_keys_and_values_belong_to_their_own_tokens():
    model, engine = tiny("llama"), GraphEngine(tiny("llama"), slots=2, parked="keep")
    twins = [Request([5, 6], 0, 7, 4), Request([9, 8], 0, 7, 4)]  # one seed, two prompts
    begun = sitting(engine, twins, SAMPLING, version=0, token_budget=2)
    rest = sitting(engine, [resumed(r, s) for r, s in zip(twins, begun, strict=True)], SAMPLING, version=0)
    whole = sitting(LocalEngine(model), twins, SAMPLING, version=0)
    assert [a.tokens + b.tokens for a, b in zip(begun, rest, strict=True)] == tokens_of(whole)


def test_a_sitting_in_between_leaves_kept_slots_alone_while_there_are_free_ones():
    model = shallow()
    first, second = short_requests(2)
    engine = GraphEngine(model, slots=2, parked="keep")
    begun = sitting(engine, [first], SAMPLING, version=0, token_budget=1)[0]
    sitting(engine, [second], SAMPLING, version=0)
    assert list(engine.kept.values()) == [engine.kept[first.seed, (*first.context, *begun.tokens)]]
    out = sitting(engine, [resumed(first, begun)], SAMPLING, version=0)[0]
    assert begun.tokens + out.tokens == sitting(LocalEngine(model), [first], SAMPLING, version=0)[0].tokens


def test_after_a_sitting_that_failed_nothing_is_kept():
    model = shallow()
    first, second = short_requests(2)
    engine = GraphEngine(model, slots=1, parked="keep")
    sitting(engine, [first], SAMPLING, version=0, token_budget=1)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(ValueError, match="non-finite"):
        sitting(engine, [second], SAMPLING, version=0)
    assert not engine.kept


def test_weights_of_another_shape_of_model_ask_for_a_new_engine():
    model = tiny("qwen2")
    engine = GraphEngine(model, slots=1)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(AssertionError, match="not loaded"):
        sitting(engine, short_requests(1), SAMPLING, version=0)


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of eight tokens, so that short responses have several."""
    monkeypatch.setattr("bapo.rollout.cuda.pages.PAGE", 8)
    monkeypatch.setattr("bapo.rollout.cuda.decoder.PAGE", 8)
    monkeypatch.setattr("bapo.rollout.cuda.kernels.attention.KEYS", 8)
    monkeypatch.setattr("bapo.rollout.cuda.sitting.HEADROOM", 2)


@pytest.mark.numeric
def test_groups_share_the_pages_of_their_prompt_and_all_pages_are_free_afterwards(small_pages, monkeypatch):
    monkeypatch.setattr("bapo.rollout.cuda.engine.LOOK", 1)
    model = shallow()
    requests = [Request(list(range(4, 4 + n)), 0, seed, 3) for n, seed in ((11, 1), (11, 2), (9, 3), (9, 4))]
    engine = GraphEngine(model, slots=4)
    engine.load(model.named_parameters(), version=0)
    engine.submit([replace(request, id=request.seed) for request in requests], SAMPLING)
    engine.collect(0)
    table = engine.pool.pages.table
    assert table[0, 0] == table[1, 0]  # ten tokens of context: a full page is shared, the next one is copied
    assert table[2, 0] == table[3, 0]  # eight tokens: nothing is copied
    assert len({*table[:2, 0], *table[2:4, 0], *table[:4, 1]}) == 6
    engine.park()
    engine.collect()
    assert engine.pool.pages.free == 4 * len(table[0])
    segments = sitting(engine, requests, SAMPLING)
    assert_matches_teacher_forcing(model, requests, segments, 0.8)


@pytest.mark.numeric
def test_responses_wait_for_pages_and_lose_nothing(small_pages, monkeypatch):
    model = shallow()
    prefilled, prefill = [], Pool.prefill
    monkeypatch.setattr(Pool, "prefill", lambda pool, batch: (prefilled.append(dict(batch)), prefill(pool, batch)))
    requests = [Request([5], 0, 1, 10), Request([6], 0, 2, 10)]
    whole = sitting(GraphEngine(model, slots=2), requests, Sampling(0.8))
    engine = GraphEngine(model, slots=2, cache_tokens=24)  # the second response has to wait for its second page
    segments = sitting(engine, requests, Sampling(0.8))
    assert [list(batch.values()) for batch in prefilled] == [[(0, [6, *whole[1].tokens[:7]])]]
    assert tokens_of(segments) == tokens_of(whole)
    assert_matches_teacher_forcing(model, requests, segments, 0.8)
    for found, expected in zip(segments, whole, strict=True):
        torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs), atol=1e-5, rtol=0)
    assert engine.pool.pages.free == 3


def test_a_response_that_can_never_fit_is_refused():
    engine = GraphEngine(shallow(), slots=2, cache_tokens=20)
    with pytest.raises(ValueError, match=r"rollout\.cache_tokens=20, but one response can have up to 21 tokens"):
        sitting(engine, [Request([5, 6], 0, 1, 19)], SAMPLING)
    assert len(sitting(engine, [Request([5, 6], 0, 1, 2)], SAMPLING)[0].tokens) == 2
