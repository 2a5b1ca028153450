"""Configuration: what a run is, checked before anything heavy is imported.

Frozen pydantic models, one per part of the system, written by hand as TOML and kept by the run as resolved JSON.
Unknown keys are refused, impossible combinations say which keys disagree and what to set instead. Defaults are those of
the embedded run: a laptop, minutes, no network.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from bapo.core.settings import ClipSettings, Measure, Order, Preset, Remainder, Weight, require_choice
from bapo.demo import MAX_RESPONSE_TOKENS
from bapo.types import batches_per_pass

OBJECTIVE_NAMES = (
    "grpo", "clip_higher", "dual_clip", "bapo", "dcpo", "cispo", "gspo", "sapo", "topr", "asymre", "m2po",
)  # fmt: skip
CLIP_KEYS = ("target_share", "low", "high", "measure", "weight", "order", "remainder")
ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps = true` is a slip of the pen, and pydantic would read it as 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:
            raise PydanticCustomError("switch", "give a number, not a switch")
        return value


class LoraConfig(_Section):
    """Train low-rank additions to the linear layers (peft) in place of all weights."""

    rank: int = Field(0, ge=0)
    """Of the additions; 0 trains all weights."""
    alpha: float | None = Field(None, gt=0)
    """Their scale is alpha / rank; None: twice the rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers they are added to, such as q_proj; empty: every linear layer but the output head."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        if not self.rank and (self.alpha is not None or self.targets):
            key, value = ("alpha", self.alpha) if self.alpha is not None else ("targets", list(self.targets))
            raise ValueError(
                f"model.lora.{key}={value} does nothing with model.lora.rank=0, which trains all weights. Set a rank, "
                "for example 16, or remove it."
            )
        return self


class ModelConfig(_Section):
    """The policy."""

    path: str = "demo"
    """A transformers model directory or hub id, a GGUF file, or "demo" for the embedded model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights. auto: float32 on CPU, bfloat16 on CUDA, where the learner keeps float32 masters of them."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """How transformers computes attention where our own kernels do not; auto: its own choice."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether prompts of plain text become a user's message in the model's chat template. auto: if it has one."""
    system: str = ""
    """System message of chats that have none."""
    template_options: dict[str, bool | int | str] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking = false."""
    lora: LoraConfig = LoraConfig()


class TaskConfig(_Section):
    """Problems and how responses to them are scored."""

    name: Literal["countdown", "data", "gym"] = "countdown"
    """countdown: the embedded task. data: problems from files or the hub. gym: reasoning-gym generates them."""
    train: tuple[str, ...] = ()
    """data: files, directories, benchmark names (gsm8k:train) or hub ids (owner/name:split) to train on."""
    test: tuple[str, ...] = ()
    """data: the same for held-out problems; problems that are in both are taken out of train."""
    prompt_column: str | None = None
    """data: where the prompt is, dots lead into nested columns. None: recognised by name."""
    answer_column: str | None = None
    """data: where the reference answer is. None: recognised by name."""
    template: str | None = None
    """data: text around each {prompt}, for example to ask for a box. None: benchmarks have one, others stay as is."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Problems with a longer prompt are left out. None: none is."""
    reward: str = "math"
    """data: math (math-verify, in processes of their own), or module:function of yours."""
    reward_seconds: float = Field(10.0, gt=0)
    """Longest time to score one response; beyond it the response is logged as a failure and not trained on."""
    reward_memory_mb: int = Field(2048, ge=256)
    """math: most memory to score one response with."""
    reward_workers: int = Field(0, ge=0)
    """Responses scored at a time; 0: as many as there are cores, and 32 calls of an async function."""
    gym: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    """gym: names of reasoning-gym data sets, each with options of its own."""
    gym_train: int = Field(4096, ge=1)
    """gym: problems to train on."""
    gym_test: int = Field(512, ge=1)
    """gym: held-out problems."""
    overlong_tokens: int = Field(0, ge=0)
    """The last so many tokens before rollout.max_tokens cost reward to learn from, more and more; 0: none do. The
    reward that is reported stays as it is."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What a response of the full length loses."""

    @model_validator(mode="after")
    def _used(self) -> Self:
        """Keys of one kind of task mean nothing to another."""
        data = {"train", "test", "prompt_column", "answer_column", "template", "max_prompt_tokens", "reward"}
        gym = {"gym", "gym_train", "gym_test"}
        unused = {"countdown": data | gym, "data": gym, "gym": data}[self.name]
        for key in sorted(unused):
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                wanted = "gym" if key in gym else "data"
                raise ValueError(
                    f"task.{key} belongs to task.name={wanted!r}, not to {self.name!r}, which ignores it. Set "
                    f"task.name={wanted!r}, or leave task.{key} out."
                )
        return self


class RolloutConfig(_Section):
    """How responses are sampled."""

    prompts: int = Field(16, ge=1)
    """New problems per step. A group that is filtered or dropped is made up for in the next step."""
    responses: int = Field(8, ge=2)
    """Responses per problem: the group that rewards are compared within."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling, and of the log-probs trained on."""
    max_tokens: int = Field(MAX_RESPONSE_TOKENS, ge=1)
    """Longest response; longer ones are truncated."""
    slots: int = Field(128, ge=1)
    """Responses decoded side by side by the in-process engine."""


class ObjectiveConfig(_Section):
    """The loss."""

    name: str = "bapo"
    """One of: grpo, clip_higher, dual_clip, bapo, dcpo, cispo, gspo, sapo, topr, asymre, m2po."""
    options: dict[str, float] = Field(default_factory=dict)
    """Options of that objective, such as low and high of grpo."""
    preset: Preset | None = "weak-model"
    """BAPO's published settings to start from; None (in TOML "none") means the paper's numbers with the gradient
    measure."""
    target_share: float | None = None
    """Overrides the preset: share of the signal that positive tokens should hold."""
    low: tuple[float, float] | None = None
    """Overrides the preset: range of the lower bound on the ratio."""
    high: tuple[float, float] | None = None
    """Overrides the preset: range of the upper bound on the ratio."""
    measure: Measure | None = None
    """Overrides the preset: gradient (clipped tokens count nothing) or surrogate (they count at their bound)."""
    weight: Weight | None = None
    """Overrides the preset: none, or rollout_prob."""
    order: Order | None = None
    """Overrides the preset: which bound moves first."""
    remainder: Remainder | None = None
    """Overrides the preset: leave a share that no bounds reach, or weigh negative tokens down to it."""
    scope: Literal["update", "microbatch"] = "update"
    """Tokens that share one pair of bounds: those of the update (the paper), or of each micro-batch (its code)."""

    @field_validator("preset", mode="before")
    @classmethod
    def _toml_has_no_null(cls, value: Any) -> Any:
        return None if value == "none" else value

    @property
    def clip(self) -> ClipSettings:
        """The clip settings these keys describe."""
        base = ClipSettings.preset(self.preset) if self.preset else ClipSettings()
        kept = {name: getattr(base, name) for name in (*CLIP_KEYS, "low_step", "high_step")}
        chosen = {name: getattr(self, name) for name in CLIP_KEYS if getattr(self, name) is not None}
        return ClipSettings(**(kept | chosen))

    @model_validator(mode="after")
    def _known(self) -> Self:
        require_choice("objective.name", self.name, OBJECTIVE_NAMES)
        overrides = [n for n in CLIP_KEYS if getattr(self, n) is not None]
        if self.name != "bapo" and overrides:
            raise ValueError(
                f"objective.{overrides[0]} belongs to objective.name='bapo', not to {self.name!r}, which ignores it. "
                f"Options of {self.name!r} go into objective.options."
            )
        if self.name != "bapo" and self.preset not in (None, "weak-model"):
            raise ValueError(
                f"objective.preset={self.preset!r} belongs to objective.name='bapo', not to {self.name!r}, which "
                "ignores it. Leave it out."
            )
        if self.name != "bapo" and self.scope != "update":
            raise ValueError(
                f"objective.scope={self.scope!r} says which tokens share BAPO's bounds, and {self.name!r} has none. "
                "Leave it out."
            )
        if self.remainder == "weigh" and self.scope == "microbatch":
            raise ValueError(
                "objective.remainder='weigh' balances an update; objective.scope='microbatch' would weigh each part of "
                "it alone, and drop those without a positive token. Use scope='update'."
            )
        if self.preset is not None:
            require_choice("objective.preset", self.preset, get_args(Preset))
        _ = self.clip
        return self


class OffPolicyConfig(_Section):
    """Where stale data comes from, and how stale it may be. Each source can be switched on alone."""

    reuse: int = Field(4, ge=1)
    """Passes over each rollout batch; 1 is on-policy training as far as reuse goes."""
    max_staleness: int = Field(16, ge=0)
    """Oldest admissible token, in updates behind the learner. A promise: older tokens are never trained on."""
    replay_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of each batch drawn from earlier rollouts; 0 switches replay off."""
    replay_max_age: int = Field(16, ge=0)
    """Oldest group that may be replayed, in updates."""
    replay_max_uses: int = Field(2, ge=1)
    """How often a group may be replayed after its own passes."""
    replay_capacity: int = Field(1024, ge=1)
    """Groups kept in memory."""
    partial_budget: int | None = Field(None, ge=1)
    """Tokens sampled per step; responses that run past it are parked and continued later. None: no partial rollout."""
    partial_max_age: int | None = Field(None, ge=0)
    """Oldest parked group, in updates; None: max_staleness less the updates of one step."""
    partial_over_age: Literal["finish", "drop"] = "finish"
    """What happens to a parked response that would grow too old: finished beyond the budget, or dropped."""
    partial_cache: Literal["rebuild", "keep"] = "rebuild"
    """Keys and values of parked responses (CUDA): computed again under the new weights, or kept as they are."""


class LearnConfig(_Section):
    """How updates are taken."""

    batch_groups: int = Field(16, ge=1)
    """Fresh groups per update; replayed ones come on top."""
    advantages: str = "grpo"
    """One of: grpo, dr_grpo, rloo."""
    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] = "sequence_mean"
    """How token losses become one number. token_mean: the paper's, in which long responses weigh more. sequence_mean:
    every response weighs the same (docs/results.md says why). fixed_length: sums divided by rollout.max_tokens."""
    lr: float = Field(3e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    warmup_updates: int = Field(10, ge=0)
    """Updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    micro_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass, prompts included, and padding where sequences are padded (CPU, float32). Changes memory
    and speed, not results."""
    activation_checkpointing: bool = False
    """Layers keep only their inputs for the backward pass and are computed again there: less memory, more time."""
    compile: bool = False
    """Compile the layers (CUDA): a minute at the start, then faster updates. See docs/performance.md."""


class EvalConfig(_Section):
    """Evaluation on held-out problems, before, during and after training."""

    problems: int = Field(256, ge=1)
    k: int = Field(8, ge=1)
    """Samples per problem: avg@k and pass@k."""
    temperature: float = Field(1.0, ge=0)
    every: int = Field(20, ge=0)
    """Steps between evaluations on a quarter of the problems; 0: only before and after."""
    also_at: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Further temperatures to evaluate at before and after training; 0 is greedy and takes one sample per problem."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        temperatures = (self.temperature, *self.also_at)
        if len(set(temperatures)) < len(temperatures):
            raise ValueError(
                f"eval.also_at={list(self.also_at)} with eval.temperature={self.temperature:g} evaluates one "
                "temperature twice. Name each once."
            )
        return self


class Config(_Section):
    """A whole run."""

    steps: int = Field(60, ge=1)
    """Rollout steps; each takes `offpolicy.reuse` passes over what it sampled."""
    seed: int = Field(0, ge=0)
    """Of everything random. One seed, one machine, one thread count: one result, bit for bit."""
    out: str = "runs/{time}"
    """Run directory; {time} becomes the start time. Must not exist yet."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run samples and learns. auto: cuda if there is one. A run is resumed on the device it started on."""
    threads: int = Field(0, ge=0)
    """CPU threads; 0: as many as there are cores."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    checkpoint_keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    sample_every: int = Field(5, ge=1)
    """Steps between sample responses shown."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    offpolicy: OffPolicyConfig = OffPolicyConfig()
    learn: LearnConfig = LearnConfig()
    eval: EvalConfig = EvalConfig()

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
        """Oldest parked group: what the staleness bound leaves after the updates of the step that trains on it."""
        given = self.offpolicy.partial_max_age
        return self.offpolicy.max_staleness - (self.updates_per_step - 1) if given is None else given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        require_choice("learn.advantages", self.learn.advantages, ADVANTAGE_NAMES)
        if self.task.name == "data" and not (self.task.train and self.task.test):
            raise ValueError(
                "task.name='data' needs files: set task.train and task.test, for example train = [\"gsm8k:train\"], "
                'test = ["gsm8k"].'
            )
        if self.task.name == "gym" and not self.task.gym:
            raise ValueError(
                "task.name='gym' needs a data set: add for example [task.gym.basic_arithmetic] to the recipe."
            )
        if self.task.overlong_tokens >= self.rollout.max_tokens:
            raise ValueError(
                f"task.overlong_tokens={self.task.overlong_tokens} is not below rollout.max_tokens="
                f"{self.rollout.max_tokens}: every response would be penalised. Lower it."
            )
        off = self.offpolicy
        last = self.updates_per_step - 1
        if last > off.max_staleness:
            raise ValueError(
                f"offpolicy.reuse={off.reuse} makes {self.updates_per_step} updates on each rollout batch, so its "
                f"tokens grow {last} updates old, but offpolicy.max_staleness={off.max_staleness} forbids that. Set "
                f"max_staleness >= {last}, or lower reuse or raise learn.batch_groups."
            )
        if off.replay_capacity < 2 * self.rollout.prompts:
            raise ValueError(
                f"offpolicy.replay_capacity={off.replay_capacity} cannot hold the groups one step may finish, twice "
                f"rollout.prompts={self.rollout.prompts}. Set replay_capacity >= {2 * self.rollout.prompts}."
            )
        if off.replay_fraction > 0 and off.replay_max_age < self.updates_per_step:
            raise ValueError(
                f"offpolicy.replay_max_age={off.replay_max_age} replays nothing: a rollout is {self.updates_per_step} "
                f"updates old when the next one is trained on. Set replay_max_age >= {self.updates_per_step}."
            )
        if off.replay_fraction > 0 and off.replay_max_age > off.max_staleness:
            raise ValueError(
                f"offpolicy.replay_max_age={off.replay_max_age} exceeds offpolicy.max_staleness={off.max_staleness}, "
                "which is a promise for every token. Raise max_staleness or lower replay_max_age."
            )
        if off.partial_cache == "keep" and off.partial_budget is None:
            raise ValueError(
                "offpolicy.partial_cache='keep' keeps nothing without partial rollout. Set "
                "offpolicy.partial_budget, or leave partial_cache at 'rebuild'."
            )
        if self.learn.compile and self.device == "cpu":
            raise ValueError("learn.compile=true is for CUDA, but device='cpu'. Set learn.compile=false.")
        if off.partial_budget is not None and self.parked_max_age + last > off.max_staleness:
            raise ValueError(
                f"offpolicy.partial_max_age={self.parked_max_age} plus the {last} further updates of a step exceed "
                f"offpolicy.max_staleness={off.max_staleness}. Lower partial_max_age or raise max_staleness."
            )
        if off.partial_budget is not None and self.parked_max_age < self.updates_per_step:
            raise ValueError(
                f"parked groups may grow {self.parked_max_age} updates old, but a step takes {self.updates_per_step}, "
                "so none could ever be resumed. Raise offpolicy.max_staleness (and partial_max_age), or lower reuse."
            )
        return self
