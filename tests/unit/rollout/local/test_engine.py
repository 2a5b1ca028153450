"""LocalEngine against the model's own full forward pass, its `generate`, and itself in other company."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from bapo.rollout.engine import Request, Sampled, Sampling, Segment
from bapo.rollout.local.engine import LocalEngine, draw
from bapo.rollout.randomness import mix, response_seed, stream, uniforms
from bapo.types import Status
from tests.rollouts import (
    assert_matches_teacher_forcing,
    assert_told_right,
    exact_logprobs,
    forcing_limit,
    ragged_requests,
    resumed,
    sitting,
    teacher_forced,
    tokens_of,
)
from tests.rounding import rounding
from tests.tiny.models import STOP, VOCABULARY, tiny, without_layers

LLAMA = tiny("llama")
"""Shared by tests that leave its weights alone."""


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny("llama")


# Log-probs, entropies, greedy


@pytest.mark.numeric
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize("slots", [3, 64])
def test_logprobs_and_entropies_are_those_of_a_full_forward_pass(architecture, slots):
    model = tiny(architecture)
    requests = ragged_requests()
    segments = sitting(LocalEngine(model, slots=slots), requests, Sampling(0.7, frozenset({STOP})), version=0)
    assert max(len(segment.tokens) for segment in segments) > 20
    assert_matches_teacher_forcing(model, requests, segments, 0.7)


@pytest.mark.numeric
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_it_runs_under_every_attention_implementation(attention):
    model = tiny("llama")
    model.set_attn_implementation(attention)
    requests = ragged_requests(6)
    assert_matches_teacher_forcing(
        model, requests, sitting(LocalEngine(model, slots=2), requests, Sampling(), version=0), 1.0
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt2"])
def test_greedy_equals_generate(architecture):
    model = tiny(architecture)
    requests = [replace(request, max_new_tokens=30) for request in ragged_requests(6)]
    segments = sitting(LocalEngine(model, slots=4), requests, Sampling(0.0, frozenset({STOP})), version=0)
    for request, segment in zip(requests, segments, strict=True):
        ids = torch.tensor([request.context])
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30
        )
        assert segment.tokens == expected[0, len(request.context) :].tolist()
        # Temperature 0 puts all mass on one token.
        assert set(segment.logprobs) == set(segment.entropies) == {0.0}


@pytest.mark.numeric
def test_a_float32_head_does_not_round_the_logits_of_16_bit_weights():
    model, sampling = without_layers(initializer_range=1.0).bfloat16(), Sampling(0.7, frozenset({STOP}))
    errors = {}
    for float32 in (False, True):
        requests = ragged_requests(6)
        segments = sitting(LocalEngine(model, slots=4, float32_head=float32), requests, sampling, version=0)
        errors[float32] = max(
            abs(ours - exact)
            for request, segment in zip(requests, segments, strict=True)
            for ours, exact in zip(segment.logprobs, exact_logprobs(model, request, segment.tokens, 0.7), strict=True)
        )
    # the states have the same bits: what is left is a sum of 32 products, its quotient, a softmax and a difference
    largest = float(model(torch.arange(VOCABULARY)[None]).logits.detach().abs().max()) / 0.7
    assert errors[True] < rounding(4 + 32**0.5, size=largest) < 1e-4
    assert errors[False] > 1e-2
    assert model(torch.tensor([[5]])).logits.dtype == torch.bfloat16  # the model is as it was


@pytest.mark.numeric
def test_the_columns_are_reused_when_they_run_out():
    # Two slots and thirty responses of 20 tokens take 300 steps; the cache has 24 + 32 columns.
    requests = [Request([5, 6, 7, 8], 0, seed, 20) for seed in range(30)]
    segments = sitting(LocalEngine(LLAMA, slots=2), requests, Sampling(), version=0)
    assert {len(segment.tokens) for segment in segments} == {20}
    assert_matches_teacher_forcing(LLAMA, requests, segments, 1.0)


def test_prefill_in_small_batches_changes_nothing():
    requests = ragged_requests()
    whole = sitting(LocalEngine(LLAMA), requests, Sampling(), version=0)
    split = sitting(LocalEngine(LLAMA, prefill_tokens=1), requests, Sampling(), version=0)
    assert tokens_of(whole) == tokens_of(split)


# The same response in any company


ALONE = [
    sitting(LocalEngine(LLAMA), [r], Sampling(stop_ids=frozenset({STOP})), version=0)[0] for r in ragged_requests()
]
LIMIT = forcing_limit(LLAMA, ragged_requests(), ALONE, 1.0)


@pytest.mark.numeric
@settings(deadline=None, max_examples=25)
@given(order=st.permutations(range(14)), count=st.integers(1, 14), slots=st.integers(1, 16))
def test_a_response_does_not_depend_on_slots_order_or_company(order, count, slots):
    requests = ragged_requests()
    chosen = order[:count]
    segments = sitting(
        LocalEngine(LLAMA, slots=slots),
        [requests[index] for index in chosen],
        Sampling(stop_ids=frozenset({STOP})),
        version=0,
    )
    for index, segment in zip(chosen, segments, strict=True):
        assert segment.tokens == ALONE[index].tokens
        assert segment.status == ALONE[index].status
        assert segment.logprobs == pytest.approx(ALONE[index].logprobs, rel=0, abs=LIMIT)
        assert segment.entropies == pytest.approx(ALONE[index].entropies, rel=0, abs=LIMIT)


@cache
def in_one_sitting(slots):
    return sitting(LocalEngine(LLAMA, slots=slots), ragged_requests(), Sampling(stop_ids=frozenset({STOP})), version=0)


@pytest.mark.numeric
@settings(deadline=None, max_examples=25)
@given(budgets=st.lists(st.integers(0, 90), max_size=4), slots=st.integers(1, 16))
def test_parked_and_resumed_equals_one_sitting(budgets, slots):
    engine = LocalEngine(LLAMA, slots=slots)
    sampling = Sampling(stop_ids=frozenset({STOP}))
    requests = ragged_requests()
    whole = in_one_sitting(slots)
    tokens: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[float]] = [[] for _ in requests]
    pending = dict(enumerate(requests))
    for budget in [*budgets, None]:
        indices = list(pending)
        segments = sitting(engine, [pending[i] for i in indices], sampling, version=0, token_budget=budget)
        sampled = sum(len(segment.tokens) for segment in segments)
        if budget is not None:
            # Never more than the budget, and less only if all are complete.
            assert sampled == budget or (sampled < budget and all(s.status is not Status.PARKED for s in segments))
        for index, segment in zip(indices, segments, strict=True):
            tokens[index] += segment.tokens
            logprobs[index] += segment.logprobs
            if segment.status is Status.PARKED:
                pending[index] = resumed(pending[index], segment)
            else:
                assert segment.status == whole[index].status
                del pending[index]
    assert not pending
    assert tokens == tokens_of(whole)
    for got, expected in zip(logprobs, whole, strict=True):
        assert got == pytest.approx(expected.logprobs, rel=0, abs=LIMIT)


@pytest.mark.numeric
def test_weights_changed_in_place_between_sittings_are_used(llama):
    engine = LocalEngine(llama, slots=3)
    requests = [replace(request, max_new_tokens=20) for request in ragged_requests(5)]
    first = sitting(engine, requests, Sampling(), version=4, token_budget=37)
    rest = [resumed(request, segment) for request, segment in zip(requests, first, strict=True)]
    rest = [request for request in rest if request.max_new_tokens]
    same = sitting(engine, rest, Sampling(), version=4)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(1.1)
    second = sitting(engine, rest, Sampling(), version=5)
    assert tokens_of(second) != tokens_of(same)
    assert all(set(segment.versions) <= {4} for segment in first)
    assert all(set(segment.versions) == {5} for segment in second)
    assert_matches_teacher_forcing(llama, rest, second, 1.0)


def test_the_engine_holds_the_very_parameters_it_was_given(llama):
    assert LocalEngine(llama).model is llama


# Sampling frequencies


def test_sampling_frequencies_match_the_softmax():
    temperature, count = 1.3, 4000
    requests = [Request([5, 9, 11], 0, response_seed(1, 0, index), 1) for index in range(count)]
    segments = sitting(LocalEngine(LLAMA), requests, Sampling(temperature), version=0)
    expected = teacher_forced(LLAMA, [5, 9, 11], [0], temperature)[0].exp().double().numpy() * count
    observed = np.bincount([segment.tokens[0] for segment in segments], minlength=VOCABULARY)
    assert expected.min() > 5
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    # 31 degrees of freedom: mean 31, standard deviation 7.9; 61.1 is the 0.999 quantile.
    assert 8 < chi_square < 61.1


def test_successive_positions_of_one_seed_are_independent_draws():
    values = uniforms(np.array([stream(5)]), np.arange(4096))
    assert abs(values.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 4096)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / math.sqrt(4096)
    bins = np.bincount((values * 16).astype(int), minlength=16)
    assert ((bins - 256) ** 2 / 256).sum() < 37.7  # 0.999 quantile, 15 degrees of freedom


def test_uniforms_are_splitmix64():
    # The first outputs of the reference generator with state 1234567.
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + (i + 1) * golden) % 2**64 for i in range(3)], dtype=np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    start = int(stream(-1))
    assert start == int(mix(np.array([2**64 - 1], dtype=np.uint64))[0])
    expected = int(mix(np.array([(start + 3 * golden) % 2**64], dtype=np.uint64))[0]) >> 12
    assert uniforms(np.array([stream(-1)]), np.array([2]))[0] == expected / 2**52


def test_response_seeds_differ_in_each_of_their_names():
    seeds = {response_seed(s, g, i) for s in range(10) for g in range(10) for i in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_draw_inverts_the_cumulative_distribution():
    logits = torch.log(torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0]])).expand(6, 5)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    tokens, logprobs, entropies = draw(logits, uniform, temperature=1.0)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])
    assert entropies.tolist() == pytest.approx([1.5 * math.log(2)] * 6)


# Ends, budgets, modes


def test_stop_and_length_limit():
    request = Request([5, 6], 0, 1, 12)
    (free,) = sitting(LocalEngine(LLAMA), [request], Sampling(), version=0)
    assert (len(free.tokens), free.status) == (12, Status.TRUNCATED)
    stop = free.tokens[4]
    cut = free.tokens.index(stop) + 1
    (stopped,) = sitting(LocalEngine(LLAMA), [request], Sampling(stop_ids=frozenset({stop})), version=0)
    assert (stopped.tokens, stopped.status) == (free.tokens[:cut], Status.STOPPED)
    # A stop token in the last place allowed is a stop, not a truncation.
    exact = replace(request, max_new_tokens=cut)
    (last,) = sitting(LocalEngine(LLAMA), [exact], Sampling(stop_ids=frozenset({stop})), version=0)
    assert (last.tokens, last.status) == (free.tokens[:cut], Status.STOPPED)


def test_the_budget_serves_the_first_in_line():
    requests = [Request([5, 6], 0, seed, 10) for seed in range(5)]
    segments = sitting(LocalEngine(LLAMA, slots=2), requests, Sampling(), version=0, token_budget=25)
    assert [len(segment.tokens) for segment in segments] == [10, 10, 3, 2, 0]
    assert [segment.status for segment in segments] == [Status.TRUNCATED] * 2 + [Status.PARKED] * 3
    assert segments[4] == Segment([], [], [], [], Status.PARKED)


def test_no_budget_no_tokens_and_no_requests_no_segments():
    (segment,) = sitting(LocalEngine(LLAMA), [Request([5], 0, 0, 3)], Sampling(), version=0, token_budget=0)
    assert segment == Segment([], [], [], [], Status.PARKED)
    assert sitting(LocalEngine(LLAMA), [], Sampling(), version=0) == []


def test_every_module_gets_its_own_mode_back(llama):
    llama.train()
    llama.lm_head.eval()
    engine = LocalEngine(llama)
    sitting(engine, [Request([5], 0, 0, 3)], Sampling(), version=0)
    assert llama.training
    assert llama.model.layers[0].training
    assert not llama.lm_head.training
    with torch.no_grad():
        llama.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="non-finite"):
        sitting(engine, [Request([5], 0, 0, 3)], Sampling(), version=0)
    assert llama.training


def test_the_learner_can_train_right_after(llama):
    sitting(LocalEngine(llama), ragged_requests(3), Sampling(), version=0)
    llama.train()
    ids = torch.tensor([[5, 6, 7]])
    llama(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in llama.parameters())


# Errors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_name_the_request(llama, temperature):
    with torch.no_grad():
        llama.model.embed_tokens.weight[31] = float("nan")
    requests = [Request([5, 6], 0, 70, 4), Request([5, 31, 6], 9, 71, 4)]
    with pytest.raises(
        ValueError,
        match=r"non-finite logits for request 1 \(seed 71, context of 3 tokens\) at response position 9.*weights",
    ):
        sitting(LocalEngine(llama), requests, Sampling(temperature), version=0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 0, 7, 4), r"request 0 \(seed 7\) has an empty context.*beginning-of-sequence"),
        (Request([5], 0, 7, 0), r"request 0 \(seed 7\) has max_new_tokens=0.*Set max_new_tokens >= 1"),
        (Request([5], 0, 7, -2), r"max_new_tokens=-2"),
        (
            Request([5] * 90, 0, 7, 7),
            r"request 0 \(seed 7\) may grow to 97 tokens \(90 of context and max_new_tokens=7\).*96 positions.*to 6",
        ),
    ],
)
def test_impossible_requests_are_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        sitting(LocalEngine(LLAMA), [request_], Sampling(), version=0)


def test_a_response_may_fill_the_last_position():
    for architecture in ("llama", "gpt2"):
        (segment,) = sitting(LocalEngine(tiny(architecture)), [Request([5] * 90, 0, 7, 6)], Sampling(), version=0)
        assert len(segment.tokens) == 6


@pytest.mark.parametrize("temperature", [-0.1, float("nan")])
def test_what_is_not_a_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match=r"sampling\.temperature=(-0\.1|nan) .*Set it to 0 \(greedy\)"):
        sitting(LocalEngine(LLAMA), [Request([5], 0, 0, 1)], Sampling(temperature), version=0)


def test_a_budget_below_0_is_refused():
    with pytest.raises(ValueError, match="token_budget=-1 is negative"):
        sitting(LocalEngine(LLAMA), [Request([5], 0, 0, 1)], Sampling(), version=0, token_budget=-1)


def test_wrapped_models_are_refused(llama):
    with pytest.raises(TypeError, match=r"got a Sequential.*model\.get_base_model\(\) of a PEFT model"):
        LocalEngine(torch.nn.Sequential(llama))


def test_models_without_keys_and_values_are_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match=r"MambaForCausalLM keeps state other than keys and values.*attention layers"):
        LocalEngine(model)


# Watched


@pytest.mark.parametrize("budget", [None, 0, 60])
def test_a_watch_hears_how_far_it_is_and_changes_nothing(budget, monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
    sampling, requests, told = Sampling(stop_ids=frozenset({STOP})), ragged_requests(), []
    engine = LocalEngine(LLAMA, slots=4)
    watched = sitting(engine, requests, sampling, version=0, token_budget=budget, tell=told.append)
    assert watched == sitting(engine, requests, sampling, version=0, token_budget=budget)
    if budget == 0:
        assert told == [Sampled(0, len(requests), 0)] * 2
        return
    assert_told_right(told, watched)
    # Collected after every step, and a step gives each of the four slots at most one token.
    assert all(0 < after.tokens - before.tokens <= 4 for before, after in pairwise(told))


def test_a_watch_is_not_called_for_every_token():
    told = []
    segments = sitting(LocalEngine(LLAMA, slots=4), ragged_requests(), Sampling(), version=0, tell=told.append)
    assert sum(len(segment.tokens) for segment in segments) > 200
    assert len(told) < 20  # the first, the last, and one a second
    assert_told_right(told, segments)
