"""Configuration of supervised training: what `bapo sft` learns from, and how.

`kind` tells the run directory of a supervised run from one of reinforcement learning. How many updates there are is not
decided here: the data says.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bapo.config.run import ModelConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SftDataConfig(_Section):
    """Demonstrations: prompts with the responses to imitate."""

    sources: tuple[str, ...] = ()
    """Files, directories, benchmark names (gsm8k:train) or hub ids (owner/name:split)."""
    held_out: tuple[str, ...] = ()
    """The same for demonstrations that are only measured; prompts that are in both are taken out of training."""
    held_out_share: float = Field(0.02, ge=0, lt=1)
    """Without data.held_out: share of the prompts that is held out of data.sources, the same for every
    seed; 0 holds out none."""
    prompt_column: str | None = None
    """Where the prompt is, dots lead into nested columns. None: recognised by name."""
    response_column: str | None = None
    """Where the response is. None: recognised by name."""
    template: str | None = None
    """Text around each {prompt}. None: that of a named benchmark, and none for other data."""
    box_answers: bool = True
    """Whether GSM8K's solutions lose their calculator marks and end in a box, \\\\boxed{72}, in place of #### 72."""
    max_tokens: int | None = Field(None, ge=2)
    """Demonstrations with more tokens, prompt and response together, are left out. None: what the model can hold."""


class SftLearnConfig(_Section):
    """How updates are taken."""

    batch_sequences: int = Field(32, ge=1)
    """Demonstrations per update. An epoch is cut into the nearest whole number of batches, all alike: of few
    demonstrations a batch may have up to half as many again (47 of 32 make one)."""
    lr: float = Field(2e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of all updates that is linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """After the warm-up; the last two reach zero at the end."""
    micro_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass, prompts included, and padding where sequences are padded (CPU, float32). Changes memory
    and speed, not results."""
    activation_checkpointing: bool = False
    """Layers keep only their inputs for the backward pass and are computed again there: less memory, more time."""
    compile: bool = False
    """Compile the layers (CUDA): a minute at the start, then faster updates. See docs/performance.md."""


class SftConfig(_Section):
    """A whole supervised run."""

    kind: Literal["sft"] = "sft"
    """Marks the configuration as one of `bapo sft`."""
    epochs: int = Field(2, ge=1)
    """Passes over the demonstrations, each in an order of its own."""
    seed: int = 0
    """Of the order. One seed, one machine, one thread count: one result, bit for bit."""
    out: str = "runs/sft-{time}"
    """Run directory; {time} becomes the start time. Must not exist yet."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run learns. auto: cuda if there is one. A run is resumed on the device it started on."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0: as many as there are cores."""
    checkpoint_every: int = Field(100, ge=1)
    """Updates between checkpoints."""
    checkpoint_keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    eval_every: int = Field(50, ge=0)
    """Updates between measurements of the held-out loss; 0: only before and after training."""
    model: ModelConfig = ModelConfig()
    data: SftDataConfig = SftDataConfig()
    learn: SftLearnConfig = SftLearnConfig()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.learn.compile and self.device == "cpu":
            raise ValueError("learn.compile=true is for CUDA, but device='cpu'. Set learn.compile=false.")
        return self
