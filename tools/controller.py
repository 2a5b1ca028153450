"""How many tokens per second the controller of a cluster can take: python tools/controller.py [--gpus 64,512].

Fleet, scheduler, scoring, buffer, ledger and the asynchronous loop are the real ones. Engines and learner are stand-ins
that answer as fast as so many GPUs would (2,930 tokens per second each): 1,024 prompts with 16 responses each are in
flight, an engine of 8 GPUs answers twice a second, and an update takes its turn beside. Answers and groups are pickled
and unpickled, as Ray does. Clocks are not real: the engines' time goes on when the controller waits for them. So a row
says how many seconds of its processor the controller needs for one second of the cluster. Below 1, it keeps up.

    load        those seconds. What the stand-ins themselves need is taken off
    ns / token  the same per token
    memory      of the controller, per token in flight
    waits       from the last token of a group to the moment when an update may use it, in seconds of the cluster
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pickle
import pstats
import resource
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from bapo.buffer import Buffer
from bapo.learn.learner import Update
from bapo.rollout.engine import Request, Sampling
from bapo.rollout.scheduler import Scheduler
from bapo.runs.ledger import Ledger
from bapo.screen.view import View
from bapo.tasks.task import ProblemStream
from bapo.train.cluster import fleet as fleet_module
from bapo.train.cluster.cargo import STATUSES, Answer, Batch
from bapo.train.cluster.fleet import WORK_SECONDS, Fleet
from bapo.train.cluster.hosts import Published
from bapo.train.cluster.learner import RemoteLearner
from bapo.train.cluster.loop import AsyncLoop
from bapo.train.job import RunState
from bapo.types import Problem, Score, Status

RATE = 1_500_000 / 512  # tokens per second of one GPU
GROUPS, RESPONSES, PER_STEP, UPDATES = 1024, 16, 64, 4
GPUS_PER_ENGINE, PROMPT_TOKENS, MOST_TOKENS, MEAN_TOKENS = 8, 100, 32_768, 8_192
NONE, STOPPED = STATUSES.index(None), STATUSES.index(Status.STOPPED)


class World:
    """The time of the cluster, and what the stand-ins cost."""

    def __init__(self, gpus: int) -> None:
        self.now, self.spent = 0.0, 0.0
        self.rate = gpus * RATE / (GROUPS * RESPONSES)  # tokens per second of a response
        self.groups_per_second = gpus * RATE / (RESPONSES * MEAN_TOKENS)
        self.ended: dict[int, float] = {}
        self.tokens = 0

    def length(self, group: int) -> int:
        """So long that the first groups end one after the other, as they would in the middle of a run."""
        return max(1, int(self.rate * (group + 1) / self.groups_per_second)) if group < GROUPS else MOST_TOKENS


class Call:
    """An answer that is there after some time of the cluster."""

    def __init__(self, world: World, after: float, make: Any) -> None:
        self.world, self.due, self.began, self.make = world, world.now + after, world.now, make

    @property
    def seconds(self) -> float:
        return self.world.now - self.began

    def answer(self, seconds: float) -> Any:
        began = time.process_time()
        data = self.make()
        self.world.spent += time.process_time() - began
        return pickle.loads(data)  # noqa: S301 - ours


class Engine:
    """An actor that gives each of its responses as many tokens as the time that has passed allows."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.at_work: dict[int, list[int]] = {}  # request -> group, tokens left
        self.version, self.last, self.owed = -1, 0.0, 0.0

    def call(self, method: str, *given: Any, what: str, returns: int = 1) -> Call:
        if method == "work":
            pickle.dumps(given[0])
            return Call(self.world, WORK_SECONDS, lambda: self.work(given[0]))
        if method == "load":
            self.version = given[1]
            return Call(self.world, 1.0, lambda: pickle.dumps(0.0))
        hello = SimpleNamespace(draws_by_position=False, gives_entropies=True, continuous=True)
        return Call(self.world, 0.0, lambda: pickle.dumps(hello))

    def work(self, requests: Sequence[Request]) -> bytes:
        world = self.world
        for request in requests:
            group = request.context[0]
            self.at_work[request.id] = [group, world.length(group)]
        self.owed += (world.now - max(self.last, 0.0)) * world.rate
        self.last, count = world.now, int(self.owed)
        self.owed -= count
        about, total = [], 0
        for id, left in list(self.at_work.items()):
            given = min(count, left[1])
            left[1] -= given
            total += given
            about.append((id, given, self.version, NONE if left[1] else STOPPED))
            if not left[1]:
                world.ended[left[0]] = world.now - WORK_SECONDS / 2
                del self.at_work[id]
        world.tokens += total
        tokens = np.random.default_rng(0).integers(1000, 150_000, total, dtype=np.int32)
        facts = np.stack([-np.linspace(0.01, 3, total), np.linspace(0.1, 2, total)])
        return pickle.dumps(Answer(WORK_SECONDS, np.array(about).reshape(-1, 4), tokens, facts), 5)

    def greet(self, hello: Any) -> None:
        """It is who it should be."""

    def kill(self) -> None:
        """It ends at once."""


class Learner(RemoteLearner):
    """Takes an update in the time that it takes to sample its tokens."""

    def __init__(self, world: World) -> None:
        self.world, self.version, self.meanwhile = world, 0, lambda: None

    def step(self, groups: Sequence[Any]) -> Update:
        pickle.dumps(Batch.of(groups), 5)
        until = self.world.now + 0.9 * PER_STEP / UPDATES / self.world.groups_per_second
        while self.world.now < until:
            before = self.world.now
            self.meanwhile()
            self.world.now = max(self.world.now, before + 0.05)
        self.version += 1
        return Update(self.version, 1, {})

    def weights(self) -> Published:  # type: ignore[override]
        return Published(self.version, None, "", None)  # type: ignore[arg-type]

    def lines(self) -> list[Any]:
        return []


def answered(world: World, calls: Sequence[Call], seconds: float) -> list[Call]:
    """The calls that are due; the cluster's time goes on to the first of them."""
    if calls and not any(call.due <= world.now for call in calls):
        world.now = min(world.now + seconds, min(call.due for call in calls))
    return [call for call in calls if call.due <= world.now]


def made(gpus: int) -> tuple[World, AsyncLoop]:
    """The loop of a run on so many GPUs."""
    world, ledger = World(gpus), Ledger()
    clock = SimpleNamespace(monotonic=lambda: world.now, sleep=lambda seconds: None)
    fleet_module.time = clock  # type: ignore[assignment]
    fleet_module.answered = lambda calls, seconds: answered(world, calls, seconds)  # type: ignore
    engines = gpus // GPUS_PER_ENGINE
    slots = -(-GROUPS * RESPONSES // engines)
    config: Any = SimpleNamespace(
        steps=10**6,
        seed=0,
        updates_per_step=UPDATES,
        cluster=SimpleNamespace(ahead=GROUPS // PER_STEP - 1),
        offpolicy=SimpleNamespace(max_staleness=10**6),
        rollout=SimpleNamespace(prompts=PER_STEP, responses=RESPONSES),
        learn=SimpleNamespace(skip_limit=3),
    )
    problems = [Problem(str(number), str(number), 0) for number in range(10**5)]
    numbers = iter(range(10**6))
    parts: Any = SimpleNamespace(
        config=config,
        task=SimpleNamespace(scores=lambda asked: [Score(float(place % 2)) for place in range(len(asked))]),
        ledger=ledger,
        overlong=lambda length: 0.0,
        policy=SimpleNamespace(transcript=lambda tokens: "", encode=lambda _: [next(numbers)] * PROMPT_TOKENS),
        engine=Fleet(
            lambda place: Engine(world, f"rollout {place}"),  # type: ignore[arg-type,return-value]
            engines,
            slots=slots,
            even=False,
            silence_seconds=10**6,
            start_seconds=10**6,
        ),
        learner=Learner(world),
        stream=ProblemStream(problems, seed=0),
        scheduler=Scheduler(Sampling(), max_response_tokens=MOST_TOKENS, record=ledger.record),
        buffer=Buffer(batch_groups=PER_STEP // UPDATES, max_batches=UPDATES, max_staleness=10**6, record=ledger.record),
    )
    return world, AsyncLoop(parts, RunState())


def measured(gpus: int, steps: int, *, profile: bool) -> list[str]:
    """One row of the table."""
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world, loop = made(gpus)
    waits: list[float] = []
    take = loop._take_scores

    def taken() -> None:
        known = len(loop._returned)
        take()
        waits.extend(world.now - world.ended[id] for id, _ in loop._returned[known:])

    loop._take_scores = taken  # type: ignore[method-assign]
    view, profiler = View(1, title="", clock=lambda: world.now), cProfile.Profile()
    loop.take_step(view)  # the first one has all requests to hand out
    start, spent, tokens, cpu = world.now, world.spent, world.tokens, time.process_time()
    if profile:
        profiler.enable()
    for _ in range(steps):
        loop.take_step(view)
    profiler.disable()
    cpu, seconds = time.process_time() - cpu - (world.spent - spent), world.now - start
    tokens = world.tokens - tokens
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    loop.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    waits.sort()
    return [
        *(str(gpus), str(gpus // GPUS_PER_ENGINE), f"{tokens / seconds:,.0f}", f"{cpu / seconds:.2f}"),
        *(f"{1e9 * cpu / tokens:.0f}", f"{grown / world.tokens:.0f} B"),
        f"{waits[len(waits) // 2]:.2f} / {waits[int(0.99 * len(waits))]:.2f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="64,512")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    given = parser.parse_args()
    rows = [measured(int(gpus), given.steps, profile=given.profile) for gpus in given.gpus.split(",")]
    header = ["GPUs", "engines", "tokens/s", "load", "ns / token", "memory / token", "waits, median / 99%"]
    print("\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]))


if __name__ == "__main__":
    main()
