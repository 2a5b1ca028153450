"""The task of a run of `bapo train`: its problems, what answers the model between its turns, and what scores it."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bapo.config.base import MOST_THREADS, Section
from bapo.config.judging import JudgeConfig

CALCULATOR = "calculator"
"""The environment of the embedded task."""


class ProblemConfig(Section):
    """The problems, and how responses to them are scored."""

    name: Literal["countdown", "data", "gym", "environment"] = "countdown"
    """countdown: the embedded task. data: problems from files or the hub. gym: problems that reasoning-gym generates.
    environment: the environment makes its own. If it is not given, it follows from task.train, task.test, task.gym or
    task.environment."""
    train: tuple[str, ...] = ()
    """data: what to train on. Files, directories, benchmark names (gsm8k:train) or hub ids (owner/name:split)."""
    test: tuple[str, ...] = ()
    """data: the held-out problems, named in the same way. A problem that is in both is removed from train."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """data: in place of task.test, the share of the problems in task.train that is held out. It is the same for every
    seed and every order of the rows."""
    prompt_column: str | None = None
    """data: the column with the prompt. Dots lead into nested columns. None recognises it by its name."""
    answer_column: str | None = None
    """data: the column with the reference answer. None recognises it by its name."""
    template: str | None = None
    """data: text around each {prompt}, for example a request to put the answer in a box. None uses the template of a
    named benchmark, and leaves other prompts as they are."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """data: problems with a longer prompt are left out. None keeps all of them."""
    reward: str | tuple[str, ...] = "math"
    """data: what scores responses: math (math-verify, in separate processes), judge (a model, task.judge), or
    module:function for a function of yours, TRL's or verl's. Several, as a list or with commas: the reward is their
    sum, and each is logged by name."""
    judge: JudgeConfig = JudgeConfig()
    reward_weights: tuple[float, ...] = ()
    """data: what each reward is multiplied by (with learn.advantages = gdpo, once it is normalised). Empty: 1."""
    reward_isolated: bool = False
    """data: run functions in a process of their own (in reward_workers of them), which may crash or hang."""
    reward_seconds: float = Field(10.0, gt=0)
    """Time limit for scoring one response, with math, gym or an async function; a plain function has one if isolated. A
    response that exceeds it is logged as a failure and not trained on."""
    reward_retries: int = Field(0, ge=0, le=10)
    """data: how often a function that fails on a response is called again, after 1 s, 2 s, 4 s and so on."""
    reward_memory_mb: int = Field(2048, ge=256)
    """math, or an isolated function: memory limit for scoring one response, in megabytes."""
    reward_workers: int = Field(0, ge=0, le=MOST_THREADS)
    """How many responses are scored at the same time. 0: one per core, 1 by a plain function, 32 by an async one."""
    gym: dict[str, dict[str, bool | int | float | str]] = Field(default_factory=dict)
    """gym: the reasoning-gym data sets by name, each with its own options."""
    gym_train: int = Field(4096, ge=1)
    """gym: how many problems to train on."""
    gym_test: int = Field(512, ge=1)
    """gym: how many held-out problems."""
    environment_train: int = Field(4096, ge=1)
    """environment: how many episodes to train on. Each has a seed of its own, which all responses of a group share."""
    environment_test: int = Field(128, ge=1)
    """environment: how many held-out episodes."""
    overlong_tokens: int = Field(0, ge=0)
    """Responses that end within this many tokens of `rollout.max_tokens` lose reward, linearly. 0 turns the penalty
    off. The rewards that are reported do not include it."""
    overlong_penalty: float = Field(1.0, ge=0, le=1e6)
    """How much reward a response of the full length loses."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """What scores responses, as a list."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward

    @field_validator("reward", mode="before")
    @classmethod
    def _in_commas(cls, given: Any) -> Any:
        """Several rewards may stand in one word. One alone is no list."""
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        return names[0] if isinstance(names, list | tuple) and len(names) == 1 else names


class EpisodeConfig(Section):
    """What answers the model between its turns."""

    environment: str | None = None
    """module:name of what answers the model's turns: a class of yours, a function that makes one, or a dict of these
    from which the column environment chooses. TRL's environment classes and text games run as they are. calculator
    answers the sums of countdown."""
    environment_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments of the environment, such as env_id = "GuessTheNumber-v0" of textarena:make."""
    environment_weights: dict[str, float] = Field(default_factory=dict)
    """environment: how much more often than others each of several environments is played, by name; 1 if it is not
    named, and 0 leaves it out. With data, the rows say which one is theirs."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call, each as module:function, with type hints and a docstring that has Args. The
    methods of TRL's environment classes are tools without being named."""
    tool_format: str = "auto"
    """How the model writes calls: hermes (Qwen's <tool_call>), llama, tokenizer (its response_template), or
    module:function, which finds (name, arguments) pairs in a turn. auto follows from the model's chat template."""
    turns: int = Field(16, ge=1)
    """Most turns of the model in an episode."""
    history: Literal["append", "fork"] = "append"
    """What the model reads of its earlier turns. append: every token, as it was sampled; a chat template that changes
    earlier turns is refused. fork: what the template writes of them, for instance no earlier reasoning; the model then
    goes on, and is trained, from this other context."""
    tool_seconds: float = Field(30.0, gt=0, le=3600)
    """Time limit for each turn of an environment, tools included. One that exceeds it has failed, not the model."""
    tool_memory_mb: int = Field(2048, ge=64)
    """Memory limit of an episode's process, in megabytes."""
    observation_tokens: int = Field(1024, ge=1)
    """Most tokens of what an environment says at a time. More are cut, with a mark."""

    @property
    def plays(self) -> bool:
        """Whether something answers the model's turns."""
        return self.environment is not None or bool(self.tools)

    @property
    def idle(self) -> str:
        """A key that means nothing, because there is neither an environment nor a tool; empty if there is no such."""
        own = EpisodeConfig.model_fields.keys() - {"environment", "tools"}
        return min(own & set(self.changed()), default="") if not self.plays else ""


class TaskConfig(EpisodeConfig, ProblemConfig):
    """The problems, what answers the model between its turns, and what scores responses."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_keys(cls, values: Any) -> Any:
        """The keys say which task is meant, so nobody has to say it twice."""
        if not isinstance(values, dict) or "name" in values:
            return values
        embedded = values.get("environment") == CALCULATOR
        keys = {"train": "data", "test": "data", "gym": "gym"} | ({} if embedded else {"environment": "environment"})
        meant = next((name for key, name in keys.items() if values.get(key)), None)
        return values if meant is None else values | {"name": meant}

    @model_validator(mode="after")
    def _used(self) -> Self:
        """Refuse keys that the chosen kind of task would ignore."""
        data = {"train", "test", "holdout", "prompt_column", "answer_column", "template", "max_prompt_tokens"}
        data |= {"reward", "judge", "reward_weights", "reward_isolated", "reward_retries"}
        gym, played = {"gym", "gym_train", "gym_test"}, {"environment_train", "environment_test", "environment_weights"}
        kinds = dict.fromkeys(gym, "gym") | dict.fromkeys(data, "data") | dict.fromkeys(played, "environment")
        used = {"reward", "reward_weights"} if self.name == "environment" else set()
        wanted = {key: kinds[key] for key in sorted(self.changed()) if kinds.get(key, self.name) != self.name}
        wanted = {key: kind for key, kind in wanted.items() if key not in used}
        if wanted:
            raise ValueError(
                "\n".join(
                    f"task.{key} belongs to task.name={name!r}, not to {self.name!r}, which ignores it. Set "
                    f"task.name={name!r}, or leave task.{key} out."
                    for key, name in wanted.items()
                )
            )
        if self.idle:
            raise ValueError(
                f"task.{self.idle} is about environments, and there is none. Set task.environment or task.tools, or "
                f"leave task.{self.idle} out."
            )
        if (self.environment == CALCULATOR) != (self.plays and self.name == "countdown"):
            raise ValueError(
                f"task.environment={CALCULATOR!r} is for task.name='countdown', which has no other one. Leave "
                "task.name out, or set task.environment to module:name of one of yours."
            )
        if self.plays and self.name not in ("countdown", "data", "environment"):
            raise ValueError(
                f"task.name={self.name!r} is for one turn, but task.environment or task.tools is set. Leave task.name "
                "out, and set task.train unless the environment makes its own problems."
            )
        if self.name == "environment" and self.environment is None:
            raise ValueError("task.name='environment' needs an environment. Set task.environment to module:name.")
        self.judge.check(self.rewards)
        return self
