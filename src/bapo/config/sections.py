"""The sections of a run of `bapo train`: rollout, objective, off-policy sources, evaluation, cluster.

Each section checks its own keys. What several sections must agree on is checked in `run.py`.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bapo.config.base import Section
from bapo.core.settings import (
    BRAKES,
    NOT_PRESETS,
    OBJECTIVE_OPTIONS,
    ClipSettings,
    Measure,
    Order,
    Preset,
    Remainder,
    Weight,
    require_choice,
    used_low_of,
)
from bapo.demo import MAX_RESPONSE_TOKENS

OBJECTIVE_NAMES = tuple(OBJECTIVE_OPTIONS)


class RolloutConfig(Section):
    """How responses are sampled."""

    prompts: int = Field(16, ge=1)
    """New problems per step. A group that was filtered out or dropped is replaced in the next step."""
    responses: int = Field(8, ge=2)
    """Responses per problem. Together they are a group, and rewards are compared within it."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. The log-probs that are trained on are taken at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the likeliest tokens that together hold this share of the probability. 1 leaves out nothing.
    Ratios compare the learner with what was really sampled from, so they begin at the share that was kept. The
    run's own evaluations leave out nothing."""
    top_k: int = Field(0, ge=0)
    """Sample only from so many of the likeliest tokens, and before top_p. 0 leaves out nothing."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample only from tokens at least so many times as likely as the likeliest, and before top_k. 0 leaves out
    nothing."""
    max_tokens: int = Field(MAX_RESPONSE_TOKENS, ge=1)
    """Length limit of a response. Longer responses are truncated."""
    slots: int = Field(128, ge=1)
    """How many responses are sampled side by side. On a GPU, as many as memory allows: each token of each response
    takes layers x 2 x key heads x head width x 2 bytes in 16 bits."""
    cache_tokens: int | None = Field(None, ge=1)
    """Most tokens whose keys and values the CUDA engine keeps at a time. If they are too few for all slots, the
    responses that came last wait. None: every slot has room for the longest response."""
    precision: Literal["model", "fp8", "fp8-weights"] = "model"
    """In what the CUDA engine multiplies layers. fp8: weights and states in eight bits, the fastest with many slots.
    fp8-weights: weights alone, with the states' own bits. The sampler is then another policy than the learner's, and
    the log-probs that are recorded are the sampler's. Needs bfloat16 weights and compute capability 8.9."""

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are drawn, by the names that samplers have for it."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}


NO_LONGER_PRESETS = {
    "auto": "Leave it out: the default is the objective brake.",
    "none": 'Leave it out: objective.name = "bapo" without a preset has the paper\'s numbers and the gradient measure.',
    **{name: f'Write objective.name = "{objective}" instead.' for name, objective in NOT_PRESETS.items()},
}
"""What stood in objective.preset before it was only for published settings of a search -> what to write now."""


class ObjectiveConfig(Section):
    """The loss. The keys from preset to scope belong to bapo; one that is set overrides the preset."""

    name: str = Field(
        "brake",
        description=f"One of: {', '.join(OBJECTIVE_NAMES)}. If it is not given, it is brake, or bapo if one of its "
        "keys is given. brake equals grpo where no token is trained on twice.",
    )
    options: dict[str, float] = Field(default_factory=dict)
    """Options of an objective that is named, such as low and high of grpo."""
    preset: Preset | None = None
    """Published settings of BAPO's search to start from. None: the paper's numbers, but the share is measured by the
    gradient."""
    target_share: float | None = None
    """The share of the signal that positive tokens should hold."""
    low: tuple[float, float] | None = None
    """Range of the lower bound on the ratio."""
    high: tuple[float, float] | None = None
    """Range of the upper bound on the ratio."""
    measure: Measure | None = None
    """How the share is measured. gradient: clipped tokens do not count. surrogate: they count at their bound."""
    weight: Weight | None = None
    """How the share weights tokens. none: all alike. rollout_prob: by the probability they were sampled with."""
    order: Order | None = None
    """Which bound the search moves first."""
    used_low: float | None = None
    """The lower bound on the ratio of tokens that were trained on before. 1.0 pushes a negative token down again only
    while it is more likely than when it was sampled."""
    brake: float | None = None
    """Delta of the brake beside the search: the lower bound of used tokens rises from the one found to 1, as far
    as used negative tokens have fallen. The objective brake has it without a search."""
    sensor: Literal["update", "previous"] = "previous"
    """brake: where it is measured how far used negative tokens have fallen. previous: in the last update that had any,
    which costs nothing. update: in the update itself, which needs one more forward pass if there are several
    micro-batches."""
    remainder: Remainder | None = None
    """What happens if no bounds reach the target share. leave: nothing. weigh: negative tokens are weighted down until
    it is reached."""
    scope: Literal["update", "microbatch"] = "update"
    """The tokens that share one pair of bounds: those of a whole update (as in the paper), or those of each micro-batch
    (as in the authors' code)."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_keys(cls, values: Any) -> Any:
        """The keys of bapo say that bapo is meant, so nobody has to say it twice."""
        if not isinstance(values, dict) or "name" in values:
            return values
        if any(values.get(key) is not None for key in cls.model_fields if key not in ("name", "options", "sensor")):
            return values | {"name": "bapo"}
        if "preset" in values:
            raise ValueError(f"objective.preset=none says of no objective what it is. {NO_LONGER_PRESETS['none']}")
        return values

    @field_validator("preset", mode="before")
    @classmethod
    def _published(cls, value: Any) -> Any:
        if isinstance(value, str) and value in NO_LONGER_PRESETS:
            raise ValueError(
                f"objective.preset={value!r} is not a preset: presets are published settings of BAPO's search. "
                f"{NO_LONGER_PRESETS[value]}"
            )
        return value

    @property
    def overrides(self) -> dict[str, Any]:
        """The clip settings that are set here."""
        names = [field.name for field in fields(ClipSettings) if field.name in type(self).model_fields]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def clip(self) -> ClipSettings:
        """The clip settings that the preset and the overrides describe, or the options of a brake. Others use none."""
        if self.name in BRAKES:
            return BRAKES[self.name](**self.options)
        return ClipSettings.from_options(self.preset, **self.overrides)

    @property
    def all_options(self) -> dict[str, float]:
        """The options of an objective other than bapo: those that are set, and the defaults of the others."""
        options = OBJECTIVE_OPTIONS.get(self.name, {}) | self.options
        return {name: value for name, value in options.items() if value is not None}

    @property
    def bound_of_used(self) -> float | None:
        """The fixed lower bound of tokens that were trained on before; None: there is none."""
        return self.clip.used_low if self.name == "bapo" else used_low_of(self.name, self.options)

    @property
    def has_brake(self) -> bool:
        """Whether a drift of tokens decides a lower bound."""
        return self.name in BRAKES or (self.name == "bapo" and self.clip.brake is not None)

    @model_validator(mode="after")
    def _known(self) -> Self:
        require_choice("objective.name", self.name, OBJECTIVE_NAMES)
        if self.name in BRAKES and self.options.keys() <= OBJECTIVE_OPTIONS[self.name].keys():
            BRAKES[self.name](**self.options)  # raises for values that cannot work
        if self.name != "bapo":
            self._refuse_what_only_bapo_has()
        if self.sensor != "previous" and not self.has_brake:
            raise ValueError(
                f"objective.sensor={self.sensor!r} belongs to the brake, which objective.name={self.name!r} does not "
                "have. Leave it out, or set objective.name='brake'."
            )
        if self.name != "bapo":
            return self
        if self.remainder == "weigh" and self.scope == "microbatch":
            raise ValueError(
                "objective.remainder='weigh' balances a whole update, but objective.scope='microbatch' would weigh "
                "each micro-batch alone and drop those without a positive token. Set objective.scope='update'."
            )
        searches = self.clip.searches or self.remainder == "weigh"
        ignored = [key for key in ("target_share", "order") if key in self.overrides]
        if ignored and not searches:
            raise ValueError(
                f"objective.{ignored[0]}={self.overrides[ignored[0]]!r} belongs to a search for bounds, but "
                "objective.low and objective.high are a single pair. Give ranges to search, such as low = [0.6, 0.9]."
            )
        return self

    def _refuse_what_only_bapo_has(self) -> None:
        """Raise for keys of bapo beside another objective."""
        given: dict[str, Any] = {"preset": self.preset} if self.preset else {}
        given |= self.overrides
        if self.scope != "update" and self.name not in BRAKES:
            given["scope"] = self.scope
        for key, value in given.items():
            beside = " (on top of a recipe: --objective.preset none)" if key == "preset" else ""
            once = " For push once, set objective.name = 'push_once'." if key == "used_low" else ""
            raise ValueError(
                f"objective.{key}={value!r} belongs to objective.name='bapo', not to {self.name!r}, which ignores it. "
                f"Leave it out{beside}, or set objective.name='bapo'. Options of other objectives go into "
                f"objective.options.{once}"
            )


def renamed(objective: dict[str, Any]) -> dict[str, Any]:
    """The objective in the config.json of an earlier version, as it is stated now: for readers, not for training.

    A clip that does not search was called bapo, with the preset fixed or push-once. And every other objective had a
    preset, too, where it meant nothing.
    """
    if "preset" not in objective:
        return objective
    if objective.get("name") != "bapo":
        return objective | {"preset": None}
    name = NOT_PRESETS.get(str(objective.get("preset")))
    if name is None:
        return objective
    stated = {key: value for key, value in objective.items() if value not in (None, {}) and key != "preset"}
    if stated.keys() <= {"name", "scope"}:
        return {"name": name}
    pair = {"low": (0.8, 0.8), "high": (1.2, 1.2), "used_low": used_low_of(name, {})}
    return pair | stated


class OffPolicyConfig(Section):
    """Where stale data comes from, and how stale it may be. Each source can be turned on alone."""

    reuse: int = Field(4, ge=1)
    """Passes over each rollout batch. 1 uses every response once."""
    max_staleness: int = Field(16, ge=0)
    """No token is trained on when the learner is more than this many updates ahead of the policy that sampled it."""
    replay_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of each batch that is drawn from earlier rollouts. 0 turns replay off."""
    replay_max_age: int = Field(16, ge=0)
    """Groups older than this many updates are not replayed."""
    replay_max_uses: int = Field(2, ge=1)
    """How often a group may be replayed after its own passes."""
    replay_capacity: int = Field(1024, ge=1)
    """How many groups are kept in memory."""
    partial_budget: int | None = Field(None, ge=1)
    """Tokens sampled per step. Responses that are unfinished by then are parked and continued in a later step, under
    newer weights. None turns partial rollout off."""
    partial_max_age: int | None = Field(None, ge=0)
    """How many updates old a parked group may grow. None: as old as `max_staleness` allows."""
    partial_over_age: Literal["finish", "drop"] = "finish"
    """What happens to a parked response that would grow too old. finish: it is finished beyond the budget. drop: it is
    dropped."""
    partial_cache: Literal["rebuild", "keep"] = "rebuild"
    """What happens to the keys and values of parked responses (CUDA only). rebuild: they are computed again under the
    new weights. keep: they stay as they are. This is cheaper, but new tokens then depend on old keys, and a resumed run
    does not repeat them bit for bit."""


PROBLEMS = 256
"""How many problems are evaluated if the configuration leaves it open and as many are held out."""


class EvalConfig(Section):
    """Evaluation on held-out problems before, during and after training."""

    problems: int | None = Field(None, ge=1)
    """How many held-out problems. None: 256, or all of them if fewer are held out."""
    k: int = Field(8, ge=1)
    """Responses per problem, for avg@k and pass@k."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0 is greedy."""
    every: int = Field(20, ge=0)
    """Steps between evaluations on the same problems, at `eval.temperature`. 0 evaluates only before and after
    training."""
    also_at: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """More temperatures to evaluate at, before and after training. 0 is greedy and takes one response per problem."""

    def among(self, held_out: int) -> Self:
        """The same, with a number of problems that is decided."""
        return self if self.problems is not None else self.model_copy(update={"problems": min(PROBLEMS, held_out)})

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        temperatures = (self.temperature, *self.also_at)
        if len(set(temperatures)) < len(temperatures):
            raise ValueError(
                f"eval.also_at={list(self.also_at)} with eval.temperature={self.temperature:g} evaluates at one "
                "temperature twice. Name each temperature once."
            )
        return self


class ClusterConfig(Section):
    """Sampling and learning in processes of their own, on this machine or on many. docs/cluster.md explains it."""

    rollouts: int = Field(0, ge=0)
    """How many rollout actors sample. 0: there is no cluster, and this process samples and learns."""
    learners: int = Field(1, ge=1)
    """How many learner ranks share the model and every update."""
    ahead: int = Field(1, ge=0)
    """How many rollouts sampling may run ahead of learning. 0: sampling and learning take turns. Every rollout ahead
    makes tokens older by the updates of one step, within `offpolicy.max_staleness`."""
    engine: Literal["in-process", "vllm"] = "in-process"
    """What samples. in-process: bapo's own engine for this device. vllm: vLLM, which must be installed. LoRA is merged
    into the weights that vLLM is given."""
    address: str | None = None
    """The Ray cluster to join: "auto", or host:port. None starts Ray on this machine, reachable from this machine
    only."""
    gpus_per_rollout: int = Field(1, ge=1)
    """GPUs of each rollout actor (tensor parallel; more than one needs vllm)."""
    silence_seconds: float = Field(60.0, gt=0)
    """A rollout actor that does not answer for so long, while it samples or loads weights, is replaced. Its responses
    continue elsewhere."""
    start_seconds: float = Field(600.0, gt=0)
    """How long an actor may take to start."""
    update_seconds: float = Field(1800.0, gt=0)
    """How long an update, a checkpoint or an export may take before the learner ranks are restarted."""

    @property
    def on(self) -> bool:
        """Whether there is a cluster."""
        return self.rollouts > 0

    @model_validator(mode="after")
    def _used(self) -> Self:
        if not self.on and (changed := self.changed()):
            raise ValueError(
                f"cluster.{changed[0]}={getattr(self, changed[0])!r} does nothing with cluster.rollouts=0, which runs "
                f"everything in this process. Set cluster.rollouts, or leave cluster.{changed[0]} out."
            )
        if self.gpus_per_rollout > 1 and self.engine != "vllm":
            raise ValueError(
                f"cluster.gpus_per_rollout={self.gpus_per_rollout} needs cluster.engine='vllm': bapo's own engine uses "
                "one GPU. Set gpus_per_rollout=1 and raise cluster.rollouts instead."
            )
        return self
