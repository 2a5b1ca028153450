"""What every configuration is made of: the section, the keys that two configurations share, and the model.

A section is a frozen pydantic model that refuses unknown keys. The docstring of a field is its help text. What
`bapo train` and `bapo sft` both have stands once, here: as a section, or as the type of a key, with its bound and its
help, where each configuration chooses its own place and default.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bapo.config.errors import ConfigError
from bapo.config.placement import DeviceName, Precision


class Section(BaseModel):
    """A table of keys. No number in it is infinite or NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps = true` is a slip of the pen, and pydantic would read it as 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise PydanticCustomError("switch", "give a number, not a switch")
        return value

    def changed(self) -> list[str]:
        """The keys whose values are not the defaults."""
        known = type(self).model_fields
        return [key for key in known if getattr(self, key) != known[key].get_default(call_default_factory=True)]


LONGEST_NAME, LONGEST_PATH = 240, 3500
"""Bytes of one name in a path, and of a whole path. File systems hold a little more: a file has a longer name until it
is whole, and there are paths below a run directory."""


def possible_path(text: str) -> bool:
    """Whether a file system could hold this path. Merely looking for one that is too long raises an OSError."""
    data = text.encode(errors="surrogatepass")
    return b"\0" not in data and len(data) <= LONGEST_PATH and max(map(len, data.split(b"/"))) <= LONGEST_NAME


def _path(text: str) -> str:
    if not possible_path(text):
        raise PydanticCustomError("path", "give a path that a file system can hold", {"longest": LONGEST_NAME})
    return text


PossiblePath = Annotated[str, AfterValidator(_path)]
Out = Annotated[
    PossiblePath,
    Field(
        description="The run directory. {time} is replaced by the start time. The directory must be new or empty, or "
        "belong to a run that was stopped before its first checkpoint."
    ),
]
MOST_THREADS = 4096
"""With many more, the libraries that make them end the process."""


class RunConfig(Section):
    """What every run has: its seed, its place, what it computes with, and when it is saved."""

    seed: int = Field(0, ge=0)
    """Seed of every random choice. The same seed, machine and number of threads give the same result, bit for bit."""
    out: Out = "runs/{time}"
    device: DeviceName = "auto"
    """Where the run computes. auto uses a CUDA device if there is one. A run can only be resumed on the kind of device
    it started on."""
    threads: int = Field(0, ge=0, le=MOST_THREADS)
    """Number of CPU threads. 0 uses one thread per core, but at most OMP_NUM_THREADS if it is set."""
    checkpoint_minutes: float = Field(0.0, ge=0)
    """Save a checkpoint, too, after the step that ends this many minutes or more after the last one. 0: only after
    every `checkpoint_every` steps. When checkpoints are saved does not change the result."""
    checkpoint_keep: int = Field(2, ge=1)
    """How many checkpoints are kept. Older ones are deleted."""


LearningRate = Annotated[float, Field(description="Peak learning rate of AdamW.", gt=0, le=1e3)]
Schedule = Annotated[
    Literal["constant", "linear", "cosine"],
    Field(description="The learning rate after the warm-up. linear and cosine fall to zero at the end of the run."),
]
SkipLimit = Annotated[
    int,
    Field(
        description="An update whose loss or gradient is not finite changes nothing and is skipped. After this many "
        "skipped updates in a row the run stops, and the batch is saved in skipped/.",
        ge=1,
    ),
]


MICRO_TOKENS = 16384
"""Tokens per forward pass, unless a run decides otherwise."""


class OptimizerConfig(Section):
    """The keys of `learn` that say how an update is taken, whatever its loss."""

    lr: LearningRate = 3e-5
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates for the first and the second moment of the gradient."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay. It applies to matrices, but not to norms and biases."""
    clip_norm: float = Field(1.0, gt=0, le=1e15)
    """Largest gradient norm. Larger gradients are scaled down to this norm."""
    schedule: Schedule = "constant"
    micro_tokens: int | None = Field(None, ge=1)
    """Tokens per forward pass, prompts included. Padding counts too where sequences are padded (on the CPU and in
    float32). The first key to lower if memory runs out: it changes memory and speed, but not the result. None means
    16384, and 2048 on a CPU, whose caches hold no more, unless the objective must see a whole update first."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer and compute the layer again in the backward pass. This needs less memory, and
    one more forward pass."""
    compile: bool = False
    """Compile the layers (CUDA only). This takes a minute at the start and makes updates faster; see
    docs/performance.md."""
    offload_optimizer: bool = False
    """Keep the optimizer's float32 masters and moments in the host's memory, 12 of 18 bytes per trained parameter (CUDA
    and 16-bit weights only). The result is the same, but updates are slower; see docs/hardware.md."""

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.lr * self.weight_decay > 1:
            raise ValueError(
                f"learn.weight_decay={self.weight_decay:g} with learn.lr={self.lr:g} changes a weight by their product "
                "in every update, and more than 1 would turn it round. Lower learn.weight_decay."
            )
        return self


class LoraConfig(Section):
    """LoRA: train low-rank adapters of the linear layers (through peft) instead of all weights."""

    rank: int = Field(0, ge=0)
    """Rank of the adapters. 0 trains all weights."""
    alpha: float | None = Field(None, gt=0)
    """The adapters are scaled by alpha / rank. None means twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get adapters, such as q_proj. Empty: every linear layer except the output head."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        if not self.rank and (self.alpha is not None or self.targets):
            name, value = ("alpha", self.alpha) if self.alpha is not None else ("targets", list(self.targets))
            raise ValueError(
                f"model.lora.{name}={value} does nothing with model.lora.rank=0, which trains all weights. Set "
                f"model.lora.rank, for example to 16, or remove model.lora.{name}."
            )
        return self


class LogConfig(Section):
    """Where metrics go, besides the files of the run."""

    to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    """Trackers that get every number of metrics.jsonl and timing.jsonl. Nothing leaves this machine unless the
    environment variables of a tracker say so. Each is a package of its own: pip install 'bapo[wandb]'."""
    project: str = Field("bapo", min_length=1, max_length=100)
    """The project, or experiment, under which wandb, trackio and mlflow list the run."""


class ModelConfig(Section):
    """The model that is trained."""

    path: PossiblePath = "demo"
    """A transformers model directory or hub id, a GGUF file, or "demo" for the embedded model."""
    dtype: Precision = "auto"
    """Precision of the weights. auto: float32 on CPU and bfloat16 on CUDA, but both work on both. With bfloat16 the
    optimizer keeps a float32 copy of every weight."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """The attention implementation of transformers, used where bapo's own kernels are not. auto lets transformers
    choose."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether a plain-text prompt becomes a user message in the model's chat template. auto: yes, if the model has a
    template."""
    system: str = ""
    """System message for chats that do not bring their own."""
    template_options: dict[str, bool | int | str] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking = false."""
    float32_head: bool = False
    """Whether sampler and learner compute the logits of 16-bit weights in float32. This brings their log-probs closer
    together, and costs some time and memory."""
    lora: LoraConfig = LoraConfig()


def refuse_on_cpu(device: str, learn: OptimizerConfig, *, asked: str | None = None) -> None:
    """Raise if a key of `learn` asks the CPU for what only CUDA has. `asked`: the device in the configuration."""
    for key in ("compile", "offload_optimizer") if device == "cpu" else ():
        if getattr(learn, key):
            where = "device='auto' finds no CUDA device on this machine" if asked == "auto" else "device='cpu'"
            raise ConfigError(f"learn.{key}=true is for CUDA, but {where}. Set learn.{key}=false.")
