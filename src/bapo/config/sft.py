"""The configuration of `bapo sft`: what supervised training learns from, and how.

`kind` tells the run directory of supervised training from one of reinforcement learning. The number of updates is not
decided here; it depends on the data.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from bapo.config.base import (
    LearningRate,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    Out,
    RunConfig,
    Schedule,
    Section,
    SkipLimit,
    refuse_on_cpu,
)


class SftTaskConfig(Section):
    """The demonstrations: prompts, each with a response to imitate."""

    train: tuple[str, ...] = ()
    """What to train on. Files, directories, benchmark names (gsm8k:train) or hub ids (owner/name:split)."""
    test: tuple[str, ...] = ()
    """Demonstrations that only the held-out loss is measured on, named in the same way. A prompt that is in both is
    removed from train."""
    holdout: float = Field(0.02, ge=0, lt=1)
    """Share of the prompts in task.train that is held out if task.test is empty. It is the same for every seed. 0 holds
    out nothing."""
    prompt_column: str | None = None
    """The column with the prompt. Dots lead into nested columns. None recognises it by its name."""
    response_column: str | None = None
    """The column with the response. None recognises it by its name."""
    template: str | None = None
    """Text around each {prompt}. None uses the template of a named benchmark, and leaves other prompts as they are."""
    box_answers: bool = True
    """Whether the solutions of GSM8K lose their calculator marks and end in \\boxed{72} instead of #### 72."""
    max_tokens: int | None = Field(None, ge=2)
    """Demonstrations with more tokens, prompt and response together, are left out. None: what the model can hold."""


class SftLearnConfig(OptimizerConfig):
    """How the weights are updated."""

    lr: LearningRate = 2e-5
    schedule: Schedule = "cosine"
    batch_sequences: int = Field(32, ge=1)
    """About how many demonstrations an update uses. An epoch is cut into the nearest whole number of equal batches:
    with 32, an epoch of 47 demonstrations is one batch, and one of 48 is two batches of 24."""
    warmup_updates: int | None = Field(None, ge=0)
    """Updates during which the learning rate rises linearly to its peak. None: the share `learn.warmup` of all."""
    warmup: float = Field(0.05, ge=0, lt=1)
    """The same as a share of all updates, whose number depends on the data."""
    skip_limit: SkipLimit = 3


class SftEvalConfig(Section):
    """The held-out loss."""

    every: int = Field(50, ge=0)
    """Updates between measurements of the held-out loss. 0 measures it only before and after training."""


class SftConfig(RunConfig):
    """Train a model to imitate responses (supervised fine-tuning): the warm start before reinforcement learning.

    Keys on the command line override those of the recipe: a TOML or JSON file, or the name of one that comes with bapo
    (--list shows them). task.train must be set.
    """

    kind: Literal["sft"] = "sft"
    """Marks the configuration as one of `bapo sft`."""
    epochs: int = Field(2, ge=1)
    """Passes over the demonstrations, each in a new order."""
    out: Out = "runs/sft-{time}"
    checkpoint_every: int = Field(100, ge=1)
    """Updates between checkpoints."""
    model: ModelConfig = ModelConfig()
    task: SftTaskConfig = SftTaskConfig()
    learn: SftLearnConfig = SftLearnConfig()
    eval: SftEvalConfig = SftEvalConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        refuse_on_cpu(self.device, self.learn)
        return self
