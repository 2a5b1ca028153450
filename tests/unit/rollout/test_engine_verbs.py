"""The verbs of an engine, on both in-process engines: load, submit, collect, park."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bapo.rollout.cuda.decoder import Decoder
from bapo.rollout.cuda.engine import GraphEngine
from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment, generate, join, left_idle, sampled
from bapo.rollout.local.engine import LocalEngine
from bapo.types import Status
from tests.rollouts import sitting, tokens_of
from tests.tiny.models import STOP, shallow

SAMPLING = Sampling(0.8, frozenset({STOP}))
ENGINES = pytest.mark.parametrize("make", [LocalEngine, GraphEngine], ids=["local", "graphs"])


def requests(count: int = 4, tokens: int = 5) -> list[Request]:
    return [Request([5 + i, 6], 0, 40 + i, tokens, id=10 + i) for i in range(count)]


def loaded(make: Any, **options: Any) -> Any:
    engine = make(shallow(), slots=2, **options)
    engine.load(engine.model.named_parameters(), version=3)
    return engine


@ENGINES
def test_what_is_collected_in_pieces_is_what_is_collected_at_once(make, monkeypatch):
    monkeypatch.setattr("bapo.rollout.cuda.engine.LOOK", 1)
    engine = loaded(make)
    engine.submit(requests(), SAMPLING)
    pieces: dict[int, list[Segment]] = {request.id: [] for request in requests()}
    collects = 0
    while any(not parts or parts[-1].status is None for parts in pieces.values()):
        found = engine.collect(0)
        assert found, "an engine in this process samples something in every collect"
        collects += 1
        for id, segment in found:
            assert not (pieces[id] and pieces[id][-1].status is not None), "each request has one last segment"
            pieces[id].append(segment)
    assert collects > 4
    assert engine.collect(0) == []  # and then nothing
    whole = sitting(engine, requests(), SAMPLING, version=3)
    assert [join(parts) for parts in pieces.values()] == whole
    assert {version for segment in whole for version in segment.versions} == {3}


@ENGINES
def test_parked_requests_come_back_with_what_they_got_and_can_be_continued(make, monkeypatch):
    monkeypatch.setattr("bapo.rollout.cuda.engine.LOOK", 1)
    engine = loaded(make)
    whole = sitting(engine, requests(), SAMPLING, version=3)
    engine.submit(requests(), SAMPLING)
    begun = engine.collect(0)
    engine.park()
    rest = engine.collect()
    last = {id: segment.status for id, segment in begun + rest}
    assert set(last) == {request.id for request in requests()}
    assert Status.PARKED in last.values()
    given = {request.id: [s for id, s in begun + rest if id == request.id] for request in requests()}
    tokens = [[token for segment in parts for token in segment.tokens] for parts in given.values()]
    assert 0 < sum(map(len, tokens)) < sum(len(segment.tokens) for segment in whole)
    again = [
        replace(request, context=request.context + had, position=len(had), max_new_tokens=5 - len(had))
        for request, had in zip(requests(), tokens, strict=True)
        if last[request.id] is Status.PARKED
    ]
    continued = dict(zip((request.id for request in again), tokens_of(generate(engine, again, SAMPLING)), strict=True))
    for request, had, expected in zip(requests(), tokens, whole, strict=True):
        assert had + continued.get(request.id, []) == expected.tokens


@ENGINES
def test_verbs_in_the_wrong_order_are_refused(make):
    engine = make(shallow(), slots=2)
    assert engine.version == NOTHING_LOADED
    with pytest.raises(RuntimeError, match="the engine has no weights yet"):
        engine.submit(requests(), SAMPLING)
    engine.load(engine.model.named_parameters(), version=0)
    with pytest.raises(ValueError, match="two requests have the same id"):
        engine.submit([*requests(1), *requests(1)], SAMPLING)
    engine.submit(requests(), SAMPLING)
    with pytest.raises(RuntimeError, match="submit was called while requests are under way that have the same ids"):
        engine.submit(requests(), SAMPLING)
    with pytest.raises(RuntimeError, match="load was called while requests are under way"):
        engine.load(engine.model.named_parameters(), version=1)
    engine.park()
    assert [segment.status for _, segment in engine.collect()] == [Status.PARKED] * 4
    engine.load(engine.model.named_parameters(), version=1)


@ENGINES
def test_weights_of_another_copy_of_the_model_are_taken_over(make):
    engine, other = loaded(make), shallow()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    engine.load(other.named_parameters(), version=4)
    found = generate(engine, requests(), SAMPLING)
    expected = sitting(LocalEngine(other, slots=2), requests(), SAMPLING, version=4)
    assert tokens_of(found) == tokens_of(expected)
    assert tokens_of(found) != tokens_of(sitting(loaded(make), requests(), SAMPLING))


@ENGINES
def test_a_weight_that_nobody_knows_is_refused(make):
    engine = loaded(make)
    with pytest.raises(AssertionError, match=r"strange\.weight"):
        engine.load([*engine.model.named_parameters(), ("strange.weight", torch.zeros(2))], version=4)
    assert engine.version == NOTHING_LOADED  # it may hold a mixture, so it must not be used
    with pytest.raises(RuntimeError, match="the engine has no weights yet"):
        engine.submit(requests(), SAMPLING)


def test_weights_in_place_are_not_copied():
    engine = loaded(LocalEngine)
    before = {name: parameter._version for name, parameter in engine.model.named_parameters()}
    engine.load(engine.model.named_parameters(), version=4)
    assert {name: parameter._version for name, parameter in engine.model.named_parameters()} == before


@ENGINES
def test_an_engine_without_some_of_the_weights_is_not_used(make):
    engine = loaded(make)
    some = dict(list(engine.model.named_parameters())[:-1])
    with pytest.raises(AssertionError, match="1 weights were not loaded"):
        engine.load(some.items(), version=4)
    assert engine.version == NOTHING_LOADED


@ENGINES
def test_a_weight_of_another_shape_is_not_broadcast(make):
    engine = loaded(make)
    weights = {name: parameter.detach() for name, parameter in engine.model.named_parameters()}
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    with pytest.raises(AssertionError, match=r"embed_tokens\.weight' has another shape"):
        engine.load((weights | {name: weights[name][:1]}).items(), version=4)


def test_weights_that_changed_since_they_were_loaded_are_not_sampled_under_their_old_version():
    engine = loaded(LocalEngine)
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.1)
    with pytest.raises(RuntimeError, match="weights have changed since version 3 was loaded"):
        engine.submit(requests(), SAMPLING)


@ENGINES
def test_a_caller_that_fails_leaves_the_engine_free(make, monkeypatch):
    monkeypatch.setattr("bapo.rollout.engine.COLLECT_SECONDS", 0)
    monkeypatch.setattr("bapo.rollout.cuda.engine.LOOK", 1)
    engine = loaded(make)

    def fail() -> None:
        with left_idle(engine):
            engine.submit(requests(tokens=40), SAMPLING)
            next(sampled(engine, [10]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(sitting(engine, requests(), SAMPLING, version=4)) == 4


def count_loads(monkeypatch) -> list[int]:
    """One entry per copy of the weights into the CUDA engine: how many tensors it moved."""
    copies = []
    load = Decoder.load

    def counted(self: Decoder, weights: Any) -> None:
        listed = list(weights)
        copies.append(len(listed))
        load(self, listed)

    monkeypatch.setattr(Decoder, "load", counted)
    return copies


def test_a_rollout_of_several_submissions_copies_the_weights_once(monkeypatch):
    from bapo.rollout import rounds
    from bapo.rollout.scheduler import Scheduler, new_group
    from bapo.types import Problem

    copies = count_loads(monkeypatch)
    engine = GraphEngine(shallow(), slots=2)
    # Group 0 lacks two tokens when the second run begins, and is due: that run submits it first, and then the rest.
    scheduler = Scheduler(Sampling(), max_response_tokens=6, token_budget=10, max_age=1)
    submissions = []
    submit = engine.submit
    monkeypatch.setattr(
        engine, "submit", lambda asked, *rest, **how: (submissions.append(len(asked)), submit(asked, *rest, **how))
    )
    for version in range(2):
        scheduler.admit([new_group(version, Problem(str(version), "", None), [5, 6], responses=2, seed=version)])
        engine.load(engine.model.named_parameters(), version=version)
        rounds.run(scheduler, engine)
    assert submissions == [2, 2, 2]
    assert copies == [len(list(engine.model.parameters()))] * 2
