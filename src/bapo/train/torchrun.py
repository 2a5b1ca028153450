"""Several GPUs of one machine, without other software: `torchrun --nproc-per-node N -m bapo train RECIPE`.

Every rank runs the same loop with the same scheduler and the same buffer. Work is divided where it is heavy, and its
results are exchanged at once, so all ranks know the same and decide the same:

    sampling   each rank continues its part of the requests with its own in-process engine, which has a copy of all
               weights, and is given all segments (`SharedEngine`). A token budget is divided, too
    scoring    each rank scores its part of the responses (`SharedTask`). A verifier may time out, so nobody repeats the
               work of another
    learning   all ranks take every update together (`learn/fsdp.py`)
    files      the first rank writes logs, screen, summary and model; all write their shards of a checkpoint

Nothing runs ahead: a rank waits for the slowest at each of these places. A run is a function of the configuration and
the number of ranks, and a resumed one repeats an uninterrupted one bit for bit if it has as many ranks. With another
number, sums are taken in another order: it continues from the same weights, but not bit for bit.

A `Team` is what one rank knows of the others, and how they exchange results: as JSON, because whoever reaches the store
of a torchrun could join, and opening a pickle can run code. A rank keeps its own result as it is. What JSON changes,
such as tuples and paths, callers turn into JSON data first. An error of one rank is raised on all of them, at the same
place, so nobody waits for somebody who has gone. A run in a single process is a team of one: nothing is exchanged.

On one machine, the ranks speak to each other over the loopback interface, unless GLOO_SOCKET_IFNAME or
NCCL_SOCKET_IFNAME say otherwise. The store where they meet belongs to torchrun.
"""

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from bapo.config.errors import ConfigError, RankFailed
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.learn.fsdp import ShardedLearner
from bapo.learn.learner import Learner
from bapo.learn.learner_settings import LearnerSettings
from bapo.learn.ranks import PATIENCE, LostRank, Ranks, failing_together, from_all_texts, join, leave
from bapo.models.policy import Policy
from bapo.process.stops import StopAsked
from bapo.rollout.engine import NOTHING_LOADED, Engine, Request, Sampling, Segment
from bapo.runs.write import RunDirectory
from bapo.tasks.task import Task
from bapo.train.machine import make_policy, on_the_cpu
from bapo.types import Problem, Score, Status

Result = TypeVar("Result")

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
"""What torchrun puts into the environment of each rank."""
PATIENCE_VARIABLE = "BAPO_RANK_TIMEOUT"
"""How many seconds a rank waits for the others, if the environment says so."""


@dataclass(frozen=True)
class Team:
    """The ranks that live one run together, as one of them sees them."""

    ranks: Ranks = None
    rank: int = 0
    size: int = 1
    on_this_machine: int = 1
    """How many of them share this machine's cores."""

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and the screen."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """What a person types before the verb, to start such a team."""
        return "bapo" if self.size == 1 else f"torchrun --nproc-per-node {self.on_this_machine} -m bapo"

    def share(self, work: Callable[[], Result]) -> list[Result]:
        """Let every rank do its part. Returns all results, in the order of ranks, on all. Results are JSON data."""
        if self.ranks is None:
            return [work()]
        result, failure = None, None
        try:
            result = work()
            said = json.dumps([result, None])
        except Exception as error:
            failure = error
            said = json.dumps([None, f"{type(error).__name__}: {error}"])
        found = [json.loads(text) for text in from_all_texts(said.encode(), self.ranks)]
        if failure is not None:
            raise failure
        for rank, (_, why) in enumerate(found):
            if why is not None:
                raise RankFailed(f"rank {rank} failed, so the other ranks stop, too. {why}")
        return [cast(Result, result if rank == self.rank else value) for rank, (value, _) in enumerate(found)]

    def lead(self, work: Callable[[], Result]) -> Result:
        """Let the first rank do something for all: write a file, or decide. Returns its result, on all."""
        return cast(Result, self.share(work if self.leads else lambda: None)[0])

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: the same answer on all."""
        return any(self.share(lambda: flag))


ALONE = Team()
"""The team of a run in a single process."""


def check_alike(state: dict[str, Any], team: Team, when: str) -> None:
    """Raise an error if the ranks do not know the same."""
    if team.size == 1:
        return
    digests = team.share(lambda: sha256(json.dumps(state).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise RuntimeError(
            f"{when}, rank {others[0]} knows something else than rank 0, so nothing was saved: the ranks of a run must "
            "stay alike. Look for something random in the task, or for ranks with different software, then resume."
        )


def team_notes(team: Team, ranks_before: int) -> list[str]:
    """What a person should know of a team, and of a resumed run that had another number of ranks."""
    notes = []
    if team.size > 1:
        notes.append(f"{team.size} ranks together: each samples and scores a part, and keeps a part of the weights")
    if ranks_before != team.size:
        notes.append(
            f"the checkpoint was written by {ranks_before} ranks, and there are {team.size} now: the run continues "
            "from the same weights, but not bit for bit as it would have"
        )
    return notes


@contextmanager
def joined(device: str) -> Iterator[Team]:
    """The team of this process: those that torchrun started with it, or nobody else."""
    if not all(name in os.environ for name in TORCHRUN) or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    rank, size, here = (int(os.environ[name]) for name in TORCHRUN)
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if device == "cuda":
        if here >= torch.cuda.device_count():
            raise ConfigError(
                f"torchrun started {on_this_machine} ranks on this machine, but it has {torch.cuda.device_count()} "
                "GPUs, and every rank needs one. Lower --nproc-per-node."
            )
        torch.cuda.set_device(here)
    if on_this_machine == size and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    ranks = join(rank, size, meeting="env://", device=torch.device(device), patience=_patience())
    try:
        with failing_together(ranks):
            yield Team(ranks, rank, size, on_this_machine)
    except LostRank as error:
        raise RankFailed(
            f"{error} Continue from the newest checkpoint: start the ranks again with `resume RUN`."
        ) from error
    finally:
        leave(ranks)


def _patience() -> float:
    given = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE))
    with suppress(ValueError):
        if 0 < (seconds := float(given)) < float("inf"):
            return seconds
    raise ConfigError(
        f"{PATIENCE_VARIABLE}={given} is not a time. Give the seconds that a rank waits for the others, such as "
        f"{PATIENCE:.0f}."
    )


class SharedEngine:
    """The engines of all ranks as one: each has its part of the requests, and every rank is given all segments."""

    def __init__(self, engine: Engine, team: Team) -> None:
        self.engine, self.team = engine, team
        self.version = engine.version
        self.draws_by_position, self.gives_entropies = engine.draws_by_position, engine.gives_entropies
        self.continuous = engine.continuous

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Let this rank's engine use these weights. All ranks gather them together."""
        self.version = NOTHING_LOADED
        self.engine.load(weights, version=version)
        self.version = version

    def submit(self, requests: Sequence[Request], sampling: Sampling, *, token_budget: int | None = None) -> None:
        """Give each engine its part of requests and budget. One with fewer requests leaves its part unused."""
        rank, size = self.team.rank, self.team.size
        budget = None if token_budget is None else token_budget // size + (rank < token_budget % size)
        try:
            self.team.share(lambda: self.engine.submit(requests[rank::size], sampling, token_budget=budget))
        except Exception:
            self.engine.park()  # another rank refused its part
            self.engine.collect(0)
            raise

    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """The segments that all engines have sampled."""
        parts = self.team.share(lambda: [(id, vars(segment)) for id, segment in self.engine.collect(timeout)])
        return [
            (id, Segment(**values | {"status": values["status"] and Status(values["status"])}))
            for part in parts
            for id, values in part
        ]

    def park(self) -> None:
        """Return unfinished requests as parked."""
        self.engine.park()


class SharedTask:
    """A task whose responses are scored by all ranks, each a part of them."""

    def __init__(self, task: Task, team: Team) -> None:
        self.task, self.team = task, team
        self.train, self.test = task.train, task.test

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The scores of all responses, of which this rank finds out its part. A stop of one rank is one of all."""
        rank, size = self.team.rank, self.team.size
        mine = responses[rank::size]

        def part() -> list[dict[str, Any]] | None:
            try:
                return [vars(score) for score in self.task.scores(mine)] if mine else []
            except StopAsked:
                return None

        parts = [found for found in self.team.share(part) if found is not None]
        if len(parts) < size:
            raise StopAsked
        return [Score(**parts[index % size][index // size]) for index in range(len(responses))]


class Onlooker(RunDirectory):
    """The run directory as the other ranks have it. What all ranks would log alike, the first one alone writes."""

    def append(self, name: str, *values: dict[str, Any]) -> None:
        """Leave the lines to the first rank."""

    def write_arrays(self, name: str, arrays: dict[str, NDArray[Any]]) -> None:
        """Leave the file to the first rank."""


def make_learner(model: Any, settings: LearnerSettings, config: Config | SftConfig, team: Team) -> Learner:
    """The learner of a model: this process's own, or this rank's part of the team's. A team's model is on the CPU."""
    if team.ranks is None:
        return Learner(model, settings)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return ShardedLearner(model, settings, ranks=team.ranks, device=torch.device(config.device), dtype=dtype)


@torch.no_grad()
def gathered(learner: Learner, config: Config | SftConfig, *, leads: bool) -> Policy | None:
    """The whole policy with the weights of a learner in shards, for the rank that leads. All ranks must call this."""
    policy = make_policy(on_the_cpu(config)) if leads else None
    places = {} if policy is None else dict(policy.model.named_parameters())
    for name, tensor in learner.weights():
        if policy is not None:
            places.pop(name).copy_(tensor)
    assert not places, f"the learner has no weights {sorted(places)}"
    return policy
