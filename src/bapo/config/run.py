"""The configuration of `bapo train`: its sections together, and what they must agree on.

A recipe is written by hand as TOML; the run keeps it as resolved JSON. A combination that cannot work is refused before
anything heavy is imported, with the keys that disagree and what to set instead. The defaults are those of the embedded
run: a laptop, minutes, no network.
"""

from collections.abc import Iterator
from math import isfinite
from typing import Self

from pydantic import Field, model_validator

from bapo.buffer import wrong_settings
from bapo.config.base import LogConfig, ModelConfig, RunConfig, refuse_on_cpu
from bapo.config.errors import ConfigError
from bapo.config.learning import ADVANTAGE_NAMES, LearnConfig
from bapo.config.numerals import counted
from bapo.config.sections import (
    OBJECTIVE_NAMES,
    ClusterConfig,
    EvalConfig,
    ObjectiveConfig,
    OffPolicyConfig,
    RolloutConfig,
)
from bapo.config.task import TaskConfig
from bapo.core.settings import require_choice
from bapo.types import batches_per_pass

__all__ = ["ADVANTAGE_NAMES", "OBJECTIVE_NAMES", "Config", "TaskConfig"]


class Config(RunConfig):
    """Train a model on problems by reinforcement learning.

    Keys on the command line override those of the recipe: a TOML or JSON file, or the name of one that comes with bapo
    (--list shows them). Without a recipe, the embedded model learns the embedded task: offline, on a CPU, in minutes.
    --dry-run shows what would happen and everything that is wrong, and starts nothing.
    """

    steps: int = Field(60, ge=1)
    """How many times to sample. Each step then makes `offpolicy.reuse` passes over what it sampled."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    sample_every: int = Field(5, ge=1)
    """Steps between the sample responses that are shown."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    offpolicy: OffPolicyConfig = OffPolicyConfig()
    learn: LearnConfig = LearnConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()

    @property
    def max_batches(self) -> int:
        """Updates of one pass; a step that finishes more groups makes larger batches, not more of them."""
        return batches_per_pass(self.rollout.prompts, self.learn.batch_groups)

    @property
    def updates_per_step(self) -> int:
        """Updates of one step, at most."""
        return self.offpolicy.reuse * self.max_batches

    @property
    def parked_max_age(self) -> int:
        """How old a parked group may grow: what the staleness bound leaves after the updates of one step."""
        given = self.offpolicy.partial_max_age
        return self.offpolicy.max_staleness - (self.updates_per_step - 1) if given is None else given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        wrong = [*self._check_choices(), *self._check_task(), *self._check_cache(), *self._check_replay()]
        if self.updates_per_step - 1 <= self.offpolicy.max_staleness:  # what these checks take for granted
            wrong += [*self._check_partial_rollout(), *self._check_cluster()]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def _check_choices(self) -> Iterator[str]:
        try:
            require_choice("learn.advantages", self.learn.advantages, ADVANTAGE_NAMES)
        except ValueError as error:
            yield str(error)
        try:
            refuse_on_cpu(self.device, self.learn)
        except ConfigError as error:
            yield str(error)
        if self.learn.opsm_on == "used" and self.learn.opsm is None:
            yield "learn.opsm_on='used' says which tokens learn.opsm masks, but that is not set. Set it, e.g. to 0.1."
        if self.learn.opsm is not None and self.objective.name == "asymre":
            yield (
                "learn.opsm gives masked responses advantage 0, but objective.name='asymre' shifts every advantage, so "
                "it would push them up. Leave learn.opsm out, or choose another objective."
            )
        if self.learn.kl_mix != 1 and self.model.lora.rank:
            yield (
                f"learn.kl_mix={self.learn.kl_mix:g} mixes weights, but model.lora.rank={self.model.lora.rank} trains "
                "LoRA adapters, and a mean of two of them has a higher rank. Set learn.kl_mix=1, or "
                "model.lora.rank=0 to train all weights."
            )
        if self.learn.offload_optimizer and (self.model.lora.rank or self.cluster.on):
            why = f"model.lora.rank={self.model.lora.rank}" if self.model.lora.rank else "the run is on a cluster"
            yield (
                f"learn.offload_optimizer=true is for all weights on one GPU, but {why}. Set "
                "learn.offload_optimizer=false: adapters and the shards of ranks need little memory."
            )

    def _check_task(self) -> Iterator[str]:
        given = {"task.train": self.task.train, "task.test": self.task.test or self.task.holdout}
        missing = [key for key, value in given.items() if not value]
        if self.task.name == "data" and missing:
            one_file = " If all problems are in one place, set task.holdout = 0.1 instead of task.test."
            yield (
                f"task.name='data' needs problems to train on and others to test on. Set {' and '.join(missing)}, for "
                f'example train = ["gsm8k:train"], test = ["gsm8k"].{one_file if "task.test" in missing else ""}'
            )
        if self.task.holdout and self.task.test:
            yield (
                f"task.holdout={self.task.holdout:g} holds out problems of task.train, but task.test names the "
                "held-out problems. Leave one of them out."
            )
        if self.task.name == "gym" and not self.task.gym:
            yield ("task.name='gym' needs a data set. Add one to the recipe, for example [task.gym.basic_arithmetic].")
        names, weights = self.task.rewards, self.task.reward_weights
        if not names or len(set(names)) < len(names):
            yield f"task.reward={list(names)} must name one reward or several different ones."
        if weights and (len(weights) != len(names) or not all(map(isfinite, weights)) or not any(weights)):
            yield (
                f"task.reward_weights={list(weights)} does not weigh the {counted(len(names), 'reward')} of "
                "task.reward. Give one finite number for each, not all 0, or leave it out for 1."
            )
        elsewhere = "name a function of the length in task.reward (docs/rewards.md)"
        for key, value, instead in (
            ("task.overlong_tokens", self.task.overlong_tokens, elsewhere),
            ("learn.kl_in_reward", self.learn.kl_in_reward, "set learn.kl, whose penalty is part of the loss"),
        ):
            if value and self.learn.advantages == "gdpo" and (weights or len(names) > 1):
                yield (
                    f"{key}={value:g} changes the sum of the rewards, but learn.advantages='gdpo' normalises each by "
                    f"itself. Set it to 0, and {instead}."
                )
        if self.task.overlong_tokens >= self.rollout.max_tokens:
            yield (
                f"task.overlong_tokens={self.task.overlong_tokens} is not below rollout.max_tokens="
                f"{self.rollout.max_tokens}, so every response would be penalised. Lower task.overlong_tokens."
            )

    def _check_cache(self) -> Iterator[str]:
        kept, longest = self.rollout.cache_tokens, self.rollout.max_tokens
        if kept is None:
            return
        if self.cluster.on and self.cluster.engine == "vllm":
            yield (
                f"rollout.cache_tokens={kept} does nothing with cluster.engine='vllm', which decides itself how much "
                "it keeps. Leave cache_tokens out."
            )
        if kept <= longest:
            yield (
                f"rollout.cache_tokens={kept} cannot hold one response, which can have rollout.max_tokens={longest} "
                f"tokens besides its prompt. Set cache_tokens well above {longest}, or lower max_tokens."
            )

    def _check_replay(self) -> Iterator[str]:
        off = self.offpolicy
        if off.replay_capacity < 2 * self.rollout.prompts:
            yield (
                f"offpolicy.replay_capacity={off.replay_capacity} is too small: one step may finish twice "
                f"rollout.prompts={self.rollout.prompts} groups. Set replay_capacity >= {2 * self.rollout.prompts}."
            )
        yield from wrong_settings(
            updates=self.updates_per_step,
            batch_groups=self.learn.batch_groups,
            reuse=off.reuse,
            max_staleness=off.max_staleness,
            replay_fraction=off.replay_fraction,
            replay_max_age=off.replay_max_age,
            replay_max_uses=off.replay_max_uses,
            capacity=off.replay_capacity,
        )

    def _check_partial_rollout(self) -> Iterator[str]:
        off, last = self.offpolicy, self.updates_per_step - 1
        if off.partial_budget is None:
            if off.partial_cache == "keep":
                yield (
                    "offpolicy.partial_cache='keep' keeps nothing without partial rollout. Set "
                    "offpolicy.partial_budget, or leave partial_cache at 'rebuild'."
                )
            return
        if self.parked_max_age + last > off.max_staleness:
            yield (
                f"offpolicy.partial_max_age={self.parked_max_age} plus the {counted(last, 'further update')} of a "
                f"step exceed offpolicy.max_staleness={off.max_staleness}. Lower partial_max_age or raise "
                f"max_staleness."
            )
        if self.parked_max_age < self.updates_per_step:
            yield (
                f"parked groups may grow {counted(self.parked_max_age, 'update')} old, but a step takes "
                f"{self.updates_per_step}, "
                "so none could ever be resumed. Raise offpolicy.max_staleness (and partial_max_age), or lower reuse."
            )

    def _check_cluster(self) -> Iterator[str]:
        cluster, off, u = self.cluster, self.offpolicy, self.updates_per_step
        if not cluster.on:
            return
        if cluster.engine == "vllm" and self.model.float32_head:
            yield (
                "model.float32_head=true, but cluster.engine='vllm' computes logits in the model's own precision, so "
                "sampler and learner would differ by more, not less. Set model.float32_head=false, or "
                "cluster.engine='in-process'."
            )
        if cluster.engine == "vllm" and self.rollout.precision != "model":
            yield (
                f"rollout.precision={self.rollout.precision!r} is for our own engine, but cluster.engine='vllm'. Set "
                "rollout.precision='model', or cluster.engine='in-process'."
            )
        if self.learn.refers:
            yield (
                f"{self.learn.refers} is for one process, but cluster.rollouts={cluster.rollouts} starts a cluster, "
                "which keeps no reference. Set it to 0, or run without a cluster."
            )
        needed = cluster.ahead * u + u - 1
        if needed > off.max_staleness:
            yield (
                f"cluster.ahead={cluster.ahead} lets sampling run {counted(cluster.ahead * u, 'update')} ahead, and "
                f"a step takes {counted(u, 'update')}, so tokens grow {counted(needed, 'update')} old, but "
                f"offpolicy.max_staleness={off.max_staleness} forbids that. Set max_staleness >= {needed}, or lower "
                f"ahead or offpolicy.reuse."
            )
        most = (2 + cluster.ahead) * self.rollout.prompts
        if off.replay_capacity < most:
            yield (
                f"offpolicy.replay_capacity={off.replay_capacity} is too small: with cluster.ahead={cluster.ahead}, up "
                f"to {most} groups are under way. Set replay_capacity >= {most}."
            )
        if off.partial_budget is not None:
            yield (
                f"offpolicy.partial_budget={off.partial_budget} is for one process. On a cluster, responses continue "
                "across updates by themselves. Leave partial_budget out, and set cluster.ahead >= 1."
            )
