"""How much memory, disk and time a run will take, by arithmetic.

    states        bytes per trained parameter: 18 in bfloat16 (weight 2, master 4, gradient 4, moments 8), 6 with
                  learn.offload_optimizer, and 16 in float32; of a frozen one, the weight alone
    sampler       on CUDA, the engine's own copy of the weights; in eight bits, a byte per number of a layer's matrices
    reference     with a KL penalty, a copy of the weights. If low-rank additions are trained: of these, if it moves
    cache         keys and values of all responses in flight: layers x 2 x key heads x head width, per token
    activations   of one forward pass: with activation checkpointing the input of each layer and the working set of one,
                  without it about that working set for every layer
    disk          a checkpoint has the float32 weights, the moments and a reference that moves; the oldest one goes
                  when a new one is complete; the model is written once more at the end

On a cluster, a rollout actor holds the weights and the cache, and learner ranks share the states. Sampling is divided
among the actors and learning among the ranks, each on GPUs of its own, or with a share of the threads of this machine.
Processes that share its threads are never faster together than the machine.

Times are the floating-point operations of sampling (2 per parameter and token) and learning (6, or 8 with activation
checkpointing) at a speed that was measured, and no less than it takes to read the weights once per sampled token. With
a KL penalty, every response passes once more (2). They assume that every response has its full length, so they are
rough and err upwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapo.config.base import MICRO_TOKENS
from bapo.config.run import Config

GIB = 2**30
EFFICIENCY = 0.4
"""Share of the measured speed of plain matrix products that a whole model reaches."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model."""

    parameters: int
    trained: int
    """Those that are trained: all of them, or those of the low-rank additions."""
    layers: int
    hidden: int
    intermediate: int
    key_heads: int
    head_width: int
    matrices: int = 0
    """Parameters of the layers' matrices, which may be sampled with in eight bits."""


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    states: float
    sampler: float
    cache: float
    activations: float
    disk: float
    reference: float = 0.0

    @property
    def in_all(self) -> float:
        """Everything that is in memory at the same time."""
        return self.states + self.sampler + self.reference + self.cache + self.activations


def memory(config: Config, shape: Shape, longest_prompt: int) -> Memory:
    """What a resolved run holds in one process."""
    width = 2 if config.model.dtype == "bfloat16" else 4
    longest = longest_prompt + config.rollout.max_tokens
    slots = min(config.rollout.slots, config.rollout.prompts * config.rollout.responses)
    kept = config.rollout.cache_tokens or slots * longest
    in_update = config.learn.batch_groups * config.rollout.responses * longest
    tokens = max(longest, min(config.learn.micro_tokens or MICRO_TOKENS, in_update))
    working_set = 2 * (4 * shape.hidden + 3 * shape.intermediate)
    again = config.learn.activation_checkpointing
    layers = shape.hidden * shape.layers + working_set if again else shape.layers * working_set
    on_device = 6 if config.learn.offload_optimizer else 18
    moves, additions = config.learn.kl_every is not None, bool(config.model.lora.rank)
    reference = float((4 if additions else width) * shape.trained) if config.learn.refers else 0.0
    saved = 12 * shape.trained + (reference if moves else 0.0)
    checkpoints = config.steps if config.checkpoint_minutes else -(-config.steps // config.checkpoint_every)
    return Memory(
        states=(on_device if width == 2 else 16) * shape.trained + width * (shape.parameters - shape.trained),
        sampler=_sampled_with(config, shape) if config.device == "cuda" else 0.0,
        cache=float(kept * shape.layers * 2 * shape.key_heads * shape.head_width * width),
        activations=float(tokens * layers * width),
        disk=float(min(config.checkpoint_keep + 1, checkpoints) * saved + width * shape.parameters),
        reference=reference if moves or not additions else 0.0,
    )


def _sampled_with(config: Config, shape: Shape) -> float:
    """Bytes of the weights that sampling reads."""
    width = 2 if config.model.dtype == "bfloat16" else 4
    saved = 0 if config.rollout.precision == "model" else (width - 1) * shape.matrices
    return float(width * shape.parameters - saved)


@dataclass(frozen=True)
class Seconds:
    """How long the parts of a run take."""

    sampling: float
    learning: float
    evaluating: float
    at_once: bool = False
    """Whether sampling and learning go on at the same time."""
    least: float = 0.0
    """What the machine needs for both, if they share it."""

    @property
    def in_all(self) -> float:
        """The whole run."""
        both = max(self.sampling, self.learning, self.least) if self.at_once else self.sampling + self.learning
        return both + self.evaluating


def seconds(config: Config, shape: Shape, longest_prompt: int, *, flops: float, bandwidth: float) -> Seconds:
    """How long a resolved run takes at this many operations and bytes per second, if all responses are long."""
    rollout, evaluation = config.rollout, config.eval
    speed = EFFICIENCY * flops
    longest = longest_prompt + rollout.max_tokens

    def sampled(responses: int) -> float:
        together = min(rollout.slots, responses)
        passes = math.ceil(responses / together) * rollout.max_tokens
        return max(
            2 * shape.parameters * responses * longest / speed, passes * _sampled_with(config, shape) / bandwidth
        )

    responses = rollout.prompts * rollout.responses
    learned = config.steps * config.offpolicy.reuse * responses * longest
    per_token = (4 if shape.trained < shape.parameters else 6) + 2 * config.learn.activation_checkpointing
    referred = 2 * config.steps * responses * longest if config.learn.refers else 0
    during = (config.steps - 1) // evaluation.every if evaluation.every else 0
    times = 2 + during + 2 * len(evaluation.also_at)
    return Seconds(
        sampling=config.steps * sampled(responses),
        learning=shape.parameters * (per_token * learned + referred) / speed,
        evaluating=times * sampled((evaluation.problems or 1) * evaluation.k),
    )


@dataclass(frozen=True)
class OnCluster:
    """What the processes of a cluster hold, in bytes, and how long they take together."""

    actor: float
    """One rollout actor, on all of its GPUs."""
    rank: float
    """One learner rank."""
    took: Seconds | None
    """None if the speed of their devices is not known."""


def on_cluster(config: Config, shape: Shape, held: Memory, took: Seconds | None, *, threads: int) -> OnCluster:
    """The same run in the processes of its cluster. `took`: alone, on one GPU, or with all threads of this machine.

    `threads`: those of one process.
    """
    cluster = config.cluster
    width = 2 if config.model.dtype == "bfloat16" else 4
    share = 1.0 if config.device == "cuda" else threads / config.threads
    gpus = cluster.gpus_per_rollout if config.device == "cuda" else 1
    sampling, learning = cluster.rollouts * gpus * share, cluster.learners * share
    on_this_machine = config.device != "cuda" and cluster.address is None
    if on_this_machine:
        sampling, learning = min(1.0, sampling), min(1.0, learning)
    divided = took and Seconds(
        sampling=took.sampling / sampling,
        learning=took.learning / learning,
        evaluating=took.evaluating / sampling,
        at_once=cluster.ahead > 0,
        least=took.sampling + took.learning if on_this_machine else 0.0,
    )
    return OnCluster(
        actor=width * shape.parameters + held.cache,
        rank=held.states / cluster.learners + held.activations,
        took=divided,
    )
