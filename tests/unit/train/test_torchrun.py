"""What the ranks of a run share: sampling, scores, results and errors."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from bapo.config.errors import ConfigError, RankFailed
from bapo.learn.ranks import leave
from bapo.process.stops import StopAsked
from bapo.rollout.engine import Request, Sampling, generate
from bapo.rollout.local.engine import LocalEngine
from bapo.train.torchrun import ALONE, SharedEngine, SharedTask, Team, check_alike, joined
from bapo.types import Problem, Score, Status
from tests.processes import in_ranks, opens_no_pickle
from tests.rollouts import forcing_limit
from tests.sharded import joined as joined_ranks
from tests.tiny.models import STOP, tiny

SAMPLING = Sampling(1.0, frozenset({STOP}))
REQUESTS = [Request([5, 6, 7 + i], 0, seed=i, max_new_tokens=4 + 3 * i, id=10 + i) for i in range(5)]
PROBLEMS = [Problem(str(i), "", None) for i in range(5)]


def engine():
    made = LocalEngine(tiny(), slots=2)
    made.load(made.model.named_parameters(), version=4)
    return made


@dataclass
class Lengths:
    """Scores a response by its length, and notes how many it was given."""

    train: list = field(default_factory=list)
    test: list = field(default_factory=list)
    given: int = 0
    asks_to_stop: bool = False

    def scores(self, responses):
        self.given = len(responses)
        assert responses, "nobody asks for nothing"
        if self.asks_to_stop:
            raise StopAsked
        if any("bad" in text for _, text in responses):
            raise ValueError("a bad response")
        return [Score(float(len(text)), answer=problem.id) for problem, text in responses]


def share_work(rank, directory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        opens_no_pickle(monkeypatch)
        share_all_work(rank, directory)


def share_all_work(rank, directory):
    ranks = joined_ranks(rank, 2, directory)
    team = Team(ranks, rank, 2)
    shared = SharedEngine(engine(), team)
    assert shared.version == 4
    found = {"all": [vars(segment) for segment in generate(shared, REQUESTS, SAMPLING)]}
    found["budget"] = [vars(segment) for segment in generate(shared, REQUESTS, SAMPLING, token_budget=7)]
    with pytest.raises((ValueError, RankFailed)) as caught:
        generate(shared, [*REQUESTS, Request([], 0, seed=1, max_new_tokens=2, id=99)], SAMPLING)
    found["refused"] = str(caught.value)
    found["after"] = [segment.tokens for segment in generate(shared, REQUESTS, SAMPLING)]

    lengths = Lengths()
    task = SharedTask(lengths, team)
    found["scores"] = [vars(score) for score in task.scores([(p, "x" * int(p.id)) for p in PROBLEMS])]
    found["given"] = lengths.given
    assert len(task.scores([(PROBLEMS[0], "x")])) == 1  # the other rank has none
    with pytest.raises((ValueError, RankFailed)) as caught:
        task.scores([(PROBLEMS[0], "x"), (PROBLEMS[1], "bad")])
    found["failed"] = str(caught.value)

    lengths.asks_to_stop = rank == 1
    with pytest.raises(StopAsked):
        task.scores([(p, "x") for p in PROBLEMS])
    lengths.asks_to_stop = False

    found["shared"] = team.share(lambda: rank * 10)
    found["led"] = team.lead(lambda: rank + 7)
    found["texts"] = team.share(lambda: ["ä\udc80", rank / 3, [1, None], {"a": "x" * 1000 * rank}])
    with pytest.raises((TypeError, RankFailed), match="not JSON serializable"):
        team.share(lambda: Path() if rank else "sound")
    found["any"] = [team.any(rank == 1), team.any(False)]
    check_alike({"step": 1}, team, "now")
    with pytest.raises(RuntimeError, match="after step 2, rank 1 knows something else than rank 0"):
        check_alike({"step": rank}, team, "after step 2")
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    leave(ranks)


@pytest.mark.numeric
def test_ranks_share_their_work_and_their_errors(tmp_path):
    in_ranks(share_work, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name in ("all", "budget", "after", "scores", "shared", "led", "any", "texts"):
        assert first[name] == second[name], name

    alone = generate(engine(), REQUESTS, SAMPLING)
    limit = forcing_limit(engine().model, REQUESTS, alone, SAMPLING.temperature)
    for ours, theirs in zip(first["all"], alone, strict=True):
        assert ours["tokens"] == theirs.tokens
        assert ours["versions"] == [4] * len(theirs.tokens)
        assert ours["status"] == theirs.status
        assert_close(torch.tensor(ours["logprobs"]), torch.tensor(theirs.logprobs), rtol=0, atol=limit)
    assert first["after"] == [segment.tokens for segment in alone]  # a refused request leaves nothing behind

    sampled = [len(segment["tokens"]) for segment in first["budget"]]
    assert [sum(sampled[0::2]), sum(sampled[1::2])] == [4, 3]  # both parts of 7 tokens
    assert Status.PARKED in [segment["status"] for segment in first["budget"]]
    assert "empty context" in second["refused"]  # the sixth request is the second rank's
    assert first["refused"].startswith("rank 1 failed, so the other ranks stop, too. ValueError: request 2")

    assert [score["reward"] for score in first["scores"]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [score["answer"] for score in first["scores"]] == ["0", "1", "2", "3", "4"]
    assert (first["given"], second["given"]) == (3, 2)
    assert first["failed"] == "rank 1 failed, so the other ranks stop, too. ValueError: a bad response"
    assert second["failed"] == "a bad response"
    assert (first["shared"], first["led"], first["any"]) == ([0, 10], 7, [True, False])


def test_a_process_that_torchrun_did_not_start_is_alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")  # of some other software
    with joined("cpu") as team:
        assert team is ALONE
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined("cpu") as team:
        assert team is ALONE
    assert ALONE.share(lambda: 3) == [3]
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_timeout_that_is_none_is_refused(monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("BAPO_RANK_TIMEOUT", "soon")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    with pytest.raises(ConfigError, match="BAPO_RANK_TIMEOUT=soon is not a time"), joined("cpu"):
        pass
