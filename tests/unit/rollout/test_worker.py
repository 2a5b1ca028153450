"""A worker keeps an engine busy across new requests and new weights, and loses no token."""

import pytest
import torch

from bapo.rollout.engine import Request, Sampling, generate, join
from bapo.rollout.local.engine import LocalEngine
from bapo.rollout.worker import Begun, Worker
from bapo.types import Status
from tests.rollouts import forcing_limit
from tests.tiny.models import tiny

STOP = Sampling(1.0, frozenset())


def request(id, tokens=12):
    return Request(context=[3, 5, id + 1], position=0, seed=id, max_new_tokens=tokens, id=id)


def worker(slots=4):
    engine = LocalEngine(tiny(), slots=slots)
    engine.load(list(engine.model.named_parameters()), version=0)
    return Worker(engine)


def worked(worker, parts, times=None):
    """Let it work so often, a token of each response at a time, or until all is done."""
    while (worker.waiting or worker.under_way) and times != 0:
        for id, segment in worker.work(0.0):
            parts.setdefault(id, []).append(segment)
        times = None if times is None else times - 1
    return parts


@pytest.mark.numeric
def test_requests_that_come_later_get_what_they_would_have_got_alone():
    ours = worker()
    alone = generate(ours.engine, [request(id) for id in range(6)], STOP)
    limit = forcing_limit(ours.engine.model, [request(id) for id in range(6)], alone, 1.0)
    ours.give([request(id) for id in range(3)], STOP)
    parts = worked(ours, {}, times=4)
    ours.give([request(id) for id in range(3, 6)], STOP)
    worked(ours, parts)
    for id in range(6):
        whole = join(parts[id])
        assert whole.status is Status.TRUNCATED
        assert whole.tokens == alone[id].tokens
        assert whole.logprobs == pytest.approx(alone[id].logprobs, rel=0, abs=limit)
        assert [segment.status for segment in parts[id][:-1]] == [None] * (len(parts[id]) - 1)


@pytest.mark.numeric
def test_new_weights_continue_what_was_begun_and_stamp_what_follows():
    ours = worker()
    ours.give([request(id) for id in range(3)], STOP)
    parts = worked(ours, {}, times=5)
    begun = {id: len(join(listed).tokens) for id, listed in parts.items()}
    assert all(0 < count < 12 for count in begun.values())
    weights = [(name, weight.detach() + 0.05) for name, weight in ours.engine.model.named_parameters()]
    ours.load(weights, version=1)
    worked(ours, parts)
    for id in range(3):
        whole = join(parts[id])
        assert len(whole.tokens) == 12
        assert whole.versions == [0] * begun[id] + [1] * (12 - begun[id])
        limit = forcing_limit(ours.engine.model, [request(id)], [whole], 1.0)
        context = torch.tensor([[3, 5, id + 1, *whole.tokens]])
        with torch.no_grad():
            now = ours.engine.model(context).logits[0, 2:-1].log_softmax(-1)
        expected = now.gather(1, torch.tensor(whole.tokens)[:, None])[:, 0][begun[id] :]
        assert whole.logprobs[begun[id] :] == pytest.approx(expected.tolist(), rel=0, abs=limit)


def test_park_gives_everything_back():
    ours = worker(slots=2)
    ours.give([request(id) for id in range(4)], STOP)
    parts = worked(ours, {}, times=3)
    for id, segment in ours.park():
        parts.setdefault(id, []).append(segment)
    assert {id: listed[-1].status for id, listed in parts.items()} == dict.fromkeys(range(4), Status.PARKED)
    assert not ours.waiting
    assert not ours.under_way
    assert ours.work(0.0) == []


def test_other_sampling_waits_its_turn():
    ours = worker()
    ours.give([request(0)], STOP)
    with pytest.raises(RuntimeError, match="another sampling"):
        ours.give([request(1)], Sampling(0.5))
    ours.park()
    ours.give([request(1)], Sampling(0.5))


def test_what_is_left_of_a_request_is_asked_for():
    asked = Begun(request(7), [9, 9]).left()
    assert (asked.context, asked.position, asked.max_new_tokens) == ([3, 5, 8, 9, 9], 2, 10)
