"""Places and starts the actors of a run: a fleet of engines, and the ranks of its learner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from bapo.config.run import Config
from bapo.models import Policy
from bapo.tasks.task import Task
from bapo.train.cluster.fleet import Fleet
from bapo.train.cluster.hosts import LearnerHost, RolloutHost
from bapo.train.cluster.learner import RemoteLearner
from bapo.train.cluster.ray import Actor, Cluster

PROBE_CONTEXTS = 4
"""How many prompts the probe of an engine continues."""
PROBE_TOKENS = 128
"""The longest context of a probe."""


def start_cluster(config: Config, policy: Policy, task: Task) -> tuple[Fleet, RemoteLearner, Callable[[], None]]:
    """Start Ray or join it, reserve places, and start all actors. Returns what ends them as well."""
    chosen, given = config.cluster, config.model_dump(mode="json")
    cuda = 1.0 if config.device == "cuda" else 0.0
    cluster = Cluster(chosen.address, processes=chosen.rollouts + chosen.learners)
    try:
        seconds = chosen.start_seconds
        learning = cluster.places(chosen.learners, {"CPU": 1, "GPU": cuda}, seconds=seconds, what="learner ranks")
        gpus = {"CPU": 1.0, "GPU": cuda * chosen.gpus_per_rollout}
        sampling = cluster.places(chosen.rollouts, gpus, seconds=seconds, what="rollout actors")
        learner = RemoteLearner(
            lambda: [Actor(LearnerHost, f"learner {r}", place, given, r) for r, place in enumerate(learning)],
            contexts=probe_contexts(policy, task),
            start_seconds=seconds,
            update_seconds=chosen.update_seconds,
        )
        fleet = Fleet(
            lambda place: Actor(RolloutHost, f"rollout {place}", sampling[place], given),
            chosen.rollouts,
            slots=config.rollout.slots,
            even=chosen.ahead == 0,
            silence_seconds=chosen.silence_seconds,
            start_seconds=chosen.start_seconds,
        )
    except BaseException:
        cluster.close()
        raise

    ending = ExitStack()
    for part in (cluster, learner, fleet):  # the last one ends first, and all of them end
        ending.callback(part.close)
    return fleet, learner, ending.close


def probe_contexts(policy: Policy, task: Task) -> list[list[int]]:
    """What probes continue: prompts that are cut at various places, because the ends of prompts are often alike."""
    prompts = [policy.encode(problem.prompt)[:PROBE_TOKENS] for problem in task.train[:PROBE_CONTEXTS]]
    return [prompt[: max(1, len(prompt) * (place + 1) // len(prompts))] for place, prompt in enumerate(prompts)]
