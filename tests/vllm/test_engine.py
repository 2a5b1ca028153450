"""The verbs of an engine on vLLM, with the embedded model, whose head is its own."""

import math
import os
import platform
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM's environment: make test-integrations")

from bapo.demo import model_path
from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment, generate, join
from bapo.rollout.vllm.engine import EngineDied, VllmEngine
from bapo.rollout.vllm.start import Settings
from bapo.rollout.worker import WrongWeights, probe
from bapo.types import Status
from tests.truncated import by_loop, exact_rows
from tests.vllm.engines import SETTINGS, changed, engine_processes, gap, made, order, policy, tree

BOUND = 5e-5  # of float32 log-probs; 7e-6 was measured


@pytest.fixture(scope="module")
def model():
    return policy(str(model_path()))


@pytest.fixture(scope="module")
def started():
    engine = made(str(model_path()))
    yield engine
    engine.close()
    assert engine_processes() == {}


@pytest.fixture
def engine(started, model):
    started.load(model.named_parameters(), version=3)
    return started


def requests(count: int = 6, tokens: int = 30) -> list[Request]:
    return [Request([(5 * i + 3 * j) % 21 for j in range(4 + i)], 0, 40 + i, tokens, id=10 + i) for i in range(count)]


def collected(engine: VllmEngine, seconds: float = 60) -> dict[int, list[Segment]]:
    """Everything until all that is under way has had its last segment."""
    pieces: dict[int, list[Segment]] = {}
    deadline = time.monotonic() + seconds
    while engine._streams:
        assert time.monotonic() < deadline, "no end in sight"
        for id, segment in engine.collect(0.05):
            parts = pieces.setdefault(id, [])
            assert not (parts and parts[-1].status is not None), "each request has one last segment"
            parts.append(segment)
    assert engine.collect(0) == []
    return pieces


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_tempered_policy(engine, model, temperature):
    asked = requests()
    segments = generate(engine, asked, Sampling(temperature))
    assert gap(model, asked, segments, temperature) < BOUND
    assert gap(model, asked, segments, 0.8) > 100 * BOUND  # it would be seen
    for segment in segments:
        assert segment.status == Status.TRUNCATED
        assert segment.versions == [3] * 30
        assert all(entropy != entropy for entropy in segment.entropies), "vLLM gives none"
        assert len(segment.entropies) == 30


def test_truncated_log_probs_are_those_of_what_is_left(engine, model):
    """Truncated, greedy and plain requests side by side: each gets its own, and only the first are told their mass."""
    sampling = Sampling(0.8, top_p=0.9, top_k=8, min_p=0.02)
    asked, plain = requests(), [replace(request, id=request.id + 100) for request in requests(3)]
    engine.submit(asked, sampling)
    engine.submit(plain, Sampling(0.8))
    pieces = {id: join(parts) for id, parts in collected(engine).items()}
    assert gap(model, plain, [pieces[request.id] for request in plain], 0.8) < BOUND
    assert all(pieces[request.id].log_kept == [] for request in plain)
    masses = []
    for request in asked:
        segment = pieces[request.id]
        rows = exact_rows(model, request.context, segment.tokens, 0.8)
        for token, logprob, log_mass, row in zip(segment.tokens, segment.logprobs, segment.log_kept, rows, strict=True):
            left, mass = by_loop(row, sampling)
            assert token in left
            assert abs(logprob + log_mass - row[token]) < BOUND
            assert abs(log_mass - math.log(mass)) < BOUND
            masses.append(mass)
    assert min(masses) < 0.95 < max(masses)


@torch.no_grad()
def test_temperature_zero_takes_the_likeliest_token(engine, model):
    (asked,) = requests(1, tokens=8)
    (segment,) = generate(engine, [asked], Sampling(0.0))
    context = list(asked.context)
    for token in segment.tokens:
        assert token == int(model(torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
    assert segment.logprobs == [0.0] * 8


def test_only_our_stop_tokens_end_a_response_and_the_last_token_is_the_stop(engine, model):
    never_stopped = generate(engine, requests(), Sampling(1.0))
    said = [token for segment in never_stopped for token in segment.tokens]
    assert model.config.eos_token_id in said, "the model's own end does not end a response"
    stop = frozenset({max(set(said), key=said.count)})
    stopped = generate(engine, requests(), Sampling(1.0, stop))
    assert Status.STOPPED in {segment.status for segment in stopped}
    for segment in stopped:
        assert not stop & set(segment.tokens[:-1])
        assert (segment.status == Status.STOPPED) == (segment.tokens[-1] in stop)


def test_requests_may_be_added_while_others_are_under_way(engine, model):
    early, late = requests(4, tokens=100), [replace(request, id=request.id + 50) for request in requests(3, tokens=40)]
    engine.submit(early, Sampling(1.0))
    begun = dict(engine.collect(0.05))
    assert all(segment.status is None for segment in begun.values())
    with pytest.raises(ValueError, match="request id 10 is still under way"):
        engine.submit(requests(1), Sampling(1.0))
    with pytest.raises(RuntimeError, match="load was called while requests are under way"):
        engine.load(model.named_parameters(), version=4)
    engine.submit(late, Sampling(1.0))
    pieces = collected(engine)
    whole = [join([*([begun[id]] if id in begun else []), *pieces[id]]) for id in [r.id for r in early + late]]
    assert [len(segment.tokens) for segment in whole] == [100] * 4 + [40] * 3
    assert gap(model, early + late, whole) < BOUND


def test_a_parked_response_keeps_its_tokens_and_is_continued_under_new_weights(engine, model):
    asked = requests(tokens=100)
    engine.submit(asked, Sampling(1.0))
    pieces = {id: [segment] for id, segment in engine.collect(0.1)}
    engine.park()
    for id, segment in engine.collect(0):
        pieces.setdefault(id, []).append(segment)
    assert engine.collect(0) == []
    first = [join(pieces[request.id]) for request in asked]
    assert {segment.status for segment in first} == {Status.PARKED}
    assert all(0 < len(segment.tokens) < 100 for segment in first)
    assert gap(model, asked, first) < BOUND

    newer = changed(model, seed=1)
    engine.load(newer.named_parameters(), version=4)
    again = [
        replace(r, context=r.context + s.tokens, position=len(s.tokens), max_new_tokens=100 - len(s.tokens))
        for r, s in zip(asked, first, strict=True)
    ]
    second = generate(engine, again, Sampling(1.0))
    assert gap(newer, again, second) < BOUND < gap(model, again, second)
    assert {version for segment in second for version in segment.versions} == {4}
    assert {len(a.tokens) + len(b.tokens) for a, b in zip(first, second, strict=True)} == {100}


@pytest.mark.parametrize("budget", [0, 1, 60])
def test_after_the_token_budget_the_rest_is_parked(engine, model, budget):
    asked = requests(6, tokens=100)
    engine.submit(asked, Sampling(1.0), token_budget=budget)
    whole = {id: join(parts) for id, parts in collected(engine).items()}
    assert {segment.status for segment in whole.values()} == {Status.PARKED}
    tokens = sum(len(segment.tokens) for segment in whole.values())
    assert budget <= tokens <= budget + 10 * len(asked)
    some = [request for request in asked if whole[request.id].tokens]
    if some:
        assert gap(model, some, [whole[request.id] for request in some]) < BOUND
    assert {segment.status for segment in generate(engine, asked, Sampling(1.0))} == {Status.TRUNCATED}  # without one


def test_what_cannot_be_sampled_is_refused_and_nothing_is_started(engine):
    good = requests(1)
    bad = [
        (replace(good[0], context=[]), Sampling(1.0), "empty context"),
        (replace(good[0], max_new_tokens=127), Sampling(1.0), "model has 128 positions"),
        (good[0], Sampling(0.001), "sampling.temperature=0.001 is not one that vLLM samples at"),
        (good[0], Sampling(3.0), "sampling.temperature=3.0 is not one"),
        (replace(good[0], context=[1, 99999]), Sampling(1.0), "has the token 99999 in its context"),
    ]
    for request, sampling, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.submit([*good, replace(request, id=1)], sampling)
        assert engine.collect(0) == []
    assert len(generate(engine, good, Sampling(1.0))[0].tokens) == 30


def test_a_weight_that_is_left_out_unknown_or_misshapen_is_named(engine, model):
    weights = dict(model.named_parameters())
    name = "model.layers.1.self_attn.k_proj.weight"
    cases = [
        ({n: w for n, w in weights.items() if n != name}, rf"not sent: {name}[;)]"),
        (weights | {"model.extra.weight": torch.zeros(2)}, "has no weight 'model.extra.weight'"),
        (weights | {name: torch.zeros(2, 3)}, r"k_proj.weight' has shape \(2, 3\)"),
    ]
    for wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.load(wrong.items(), version=4)
        assert engine.version == NOTHING_LOADED
        with pytest.raises(RuntimeError, match="no weights yet"):
            engine.submit(requests(1), Sampling())
    engine.load(weights.items(), version=5)
    asked = requests(3)
    assert gap(model, asked, generate(engine, asked, Sampling(1.0))) < BOUND


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
@pytest.mark.parametrize("fault", ["lose", "corrupt"])
def test_what_does_not_arrive_as_it_was_sent_is_named(engine, model, fault, name):
    order(engine, fault, name)
    try:
        what = {"lose": "sent, but not arrived in a worker", "corrupt": "arrived in a worker with other bits"}[fault]
        with pytest.raises(ValueError, match=f"{what}: {name}[;)]"):
            engine.load(model.named_parameters(), version=4)
        assert engine.version == NOTHING_LOADED
    finally:
        order(engine, "lose", None)
    engine.load(model.named_parameters(), version=4)
    asked = requests(3)
    assert gap(model, asked, generate(engine, asked, Sampling(1.0))) < BOUND


def test_weights_that_are_not_numbers_are_found_while_sampling(engine, model):
    broken = dict(model.named_parameters()) | {"model.norm.weight": torch.full_like(model.model.norm.weight, torch.nan)}
    engine.load(broken.items(), version=4)
    with pytest.raises(ValueError, match="non-finite logits for request 0"):
        generate(engine, requests(1), Sampling(1.0))
    while engine._streams:
        engine.collect(0.1)
    engine.load(model.named_parameters(), version=5)
    assert len(generate(engine, requests(1), Sampling(1.0))[0].tokens) == 30


@torch.no_grad()
def test_the_probe_passes_the_right_weights_and_refuses_others(engine, model):
    contexts = [request.context for request in requests(4)]
    table = torch.stack([model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in contexts])
    for temperature in (1.0, 0.7):
        assert probe(engine, contexts, table, temperature=temperature, tolerance=BOUND).gap_max < BOUND
    engine.load(changed(model, seed=2).named_parameters(), version=4)
    with pytest.raises(WrongWeights, match="VllmEngine with weights of version 4"):
        probe(engine, contexts, table, tolerance=1e-2)


def test_nothing_listens_beyond_this_machine(engine):
    pids = tree(os.getpid())
    assert len(pids) >= 3
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    listening = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes and local.split(":")[0] != loopback:
                listening.append((table, local))
    assert listening == []


def test_a_model_that_vllm_cannot_serve_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"is not a directory with a config\.json"):
        VllmEngine(Settings(str(tmp_path), **SETTINGS))
    with pytest.raises(ValueError, match=r"(?s)vLLM cannot serve the model .* max_model_len \(4096\)"):
        VllmEngine(Settings(str(model_path()), **SETTINGS | {"positions": 4096}))


@pytest.mark.skipif(
    platform.machine() != "aarch64" or bool(torch.cpu.get_capabilities().get("bf16")), reason="this CPU has bfloat16"
)
def test_bfloat16_is_refused_where_it_would_kill_the_workers():
    with pytest.raises(ValueError, match="Set dtype to float32"):
        VllmEngine(Settings(str(model_path()), **SETTINGS | {"dtype": "bfloat16"}))


def test_the_death_of_engine_core_is_told_at_once_and_tokens_are_not_lost(engine, model):
    """The last test of this module: the engine does not survive it."""
    asked = requests(6, tokens=100)
    engine.submit(asked, Sampling(1.0))
    while sum(len(stream.tokens) for stream in engine._streams.values()) < 20:
        time.sleep(0.01)
    os.kill(engine_processes()["EngineCore"], signal.SIGKILL)
    killed = time.monotonic()
    pieces: dict[int, list[Segment]] = {}

    def collect_for_ever():
        while True:
            for id, segment in engine.collect(1.0):
                pieces.setdefault(id, []).append(segment)

    with pytest.raises(EngineDied, match="vLLM's EngineCore has died"):
        collect_for_ever()
    assert time.monotonic() - killed < 10
    whole = {id: join(parts) for id, parts in pieces.items()}
    assert sum(len(segment.tokens) for segment in whole.values()) >= 20
    told = [request for request in asked if request.id in whole]
    assert gap(model, told, [whole[request.id] for request in told]) < BOUND
    assert all(set(segment.versions) == {3} for segment in whole.values())
    engine.park()  # does not hang
    with pytest.raises(EngineDied):
        engine.submit(requests(1), Sampling())
    assert engine.version == NOTHING_LOADED
