"""The options of `bapo eval`, checked before anything heavy is imported.

What depends on the machine, the model and the data (device, length limit, fingerprints) is decided in `evaluation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from bapo.config.base import MOST_THREADS
from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.placement import DeviceName, Precision
from bapo.config.task import CALCULATOR, EpisodeConfig
from bapo.rollout.engine import Sampling
from bapo.tasks.verify.finding import written_as

COUNTDOWN = "countdown"
"""The embedded data set."""
DEFAULT_K = 16
DEFAULT_MAX_TOKENS = 4096  # length limit of a response if none is given and the model has room for it
LEAVES_OUT_NOTHING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Truncation that does nothing, which an evaluation's identity does not mention."""

POSSIBLE: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("k", "max_tokens", "problems", "slots", "chunk"), (lambda count: count >= 1, "1 or more")),
    "threads": (lambda count: 1 <= count <= MOST_THREADS, f"from 1 to {MOST_THREADS}"),
    "temperature": (lambda value: 0 <= value < math.inf, "a finite number, 0 or more. 0 is greedy"),
    "top_p": (lambda share: 0 < share <= 1, "a share above 0. 1 leaves out nothing"),
    "top_k": (lambda count: count >= 0, "0 or more. 0 leaves out nothing"),
    "min_p": (lambda share: 0 <= share <= 1, "a share. 0 leaves out nothing"),
    "holdout": (lambda share: 0 <= share < 1, "a share below 1. 0 uses all problems"),
    "reward_seconds": (lambda seconds: 0 < seconds < math.inf, "a finite number above 0"),
    "reward_memory_mb": (lambda size: size >= 256, "256 or more"),
}
"""Whether an option can have a value, and in words which ones it can have."""

if TYPE_CHECKING:
    Decided = int
else:
    Decided = int | None  # None on the command line; __post_init__ decides


def data_names(given: Sequence[str]) -> tuple[str, ...]:
    """The names in `--data a,b --data c`. A path with a comma in it, alone or as name=path, is not split."""
    names: list[str] = []
    for text in given:
        name, _, path = text.partition("=")
        whole = Path(text).exists() or ("," not in name and path != "" and Path(path).exists())
        names += [text] if whole else [name.strip() for name in text.split(",") if name.strip()]
    return tuple(names)


def chat_options(
    chat_option: Annotated[
        Sequence[str],
        UseAppendAction,
        arg(metavar="KEY=VALUE", help="An argument of the chat template, such as enable_thinking=false."),
    ] = (),
) -> dict[str, bool | int | str]:
    """The values of `--chat-option KEY=VALUE`: true, false, a whole number, or text."""
    options: dict[str, bool | int | str] = {}
    for text in chat_option:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--chat-option {text} must have the form KEY=VALUE, such as enable_thinking=false.")
        if value in ("true", "false"):
            options[key] = value == "true"
        else:
            options[key] = int(value) if value.lstrip("-").isdecimal() else value
    return options


def sampling_of(known: Mapping[str, Any]) -> Sampling:
    """How an evaluation with these settings, or with this identity, draws tokens."""
    return Sampling(known["temperature"], **{key: known[key] for key in LEAVES_OUT_NOTHING if key in known})


@dataclass(frozen=True)
class Settings:
    """Everything that can be chosen. None leaves the choice to the model, the data or the machine."""

    model: Annotated[str, arg(metavar="MODEL")]
    """A transformers model directory or hub id, a GGUF file, or "demo"."""
    data: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME,...", help_behavior_hint="(repeatable)")] = ()
    """Benchmarks (gsm8k, math500, aime24, aime25), countdown, files, directories or hub data sets (owner/name:split).
    Write name=path to give a file a name of its own. Needed unless an environment makes its own problems."""
    episodes: Annotated[EpisodeConfig, arg(name="")] = field(default_factory=EpisodeConfig)
    k: Annotated[Decided, option(default=f"{DEFAULT_K}, and 1 at temperature 0")] = None  # type: ignore[assignment]
    """Responses per problem."""
    temperature: float = 0.6
    """Sampling temperature. 0 is greedy."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together hold this share of the probability. 1 leaves out nothing."""
    top_k: int = 0
    """Sample only from so many of the likeliest tokens. 0 leaves out nothing."""
    min_p: float = 0.0
    """Sample only from tokens at least so many times as likely as the likeliest. 0 leaves out nothing."""
    max_tokens: Annotated[int | None, option(default=f"{DEFAULT_MAX_TOKENS}, or what the model has room for")] = None
    """Length limit of a response."""
    seed: int = 0
    """Seed of every random choice."""
    problems: Annotated[int | None, option(default="all")] = None
    """Use only this many problems of each data set, the first ones."""
    holdout: float = 0.0
    """Use only the share of the problems that `bapo train` holds out with this task.holdout, if --data names what it
    trains on. 0 uses all."""
    reward: Annotated[str | None, option(default="the data set's own verifier if it has one, otherwise math")] = None
    """What scores responses: math (math-verify, in separate processes), or module:function for a function of yours.
    Several, with commas: the reward is their weighted sum."""
    reward_weights: tuple[float, ...] = ()
    """What each of several rewards is multiplied by. Empty: 1."""
    reward_seconds: float = 10.0
    """Time limit for scoring one response, with math or an async function; a plain function has none."""
    reward_memory_mb: int = 2048
    """Memory limit for scoring one response with math, in megabytes."""
    template: Annotated[str | None, option(default="that of a named benchmark, otherwise none")] = None
    """Text around each prompt, with {prompt} in it."""
    prompt_column: Annotated[str | None, option(default="recognised by its name")] = None
    """The column with the prompt."""
    answer_column: Annotated[str | None, option(default="recognised by its name")] = None
    """The column with the reference answer."""
    chat: Literal["auto", "yes", "no"] = "auto"
    """Whether a plain-text prompt becomes a user message. auto: yes, if the model has a chat template."""
    system: str = ""
    """System message for chats that do not bring their own."""
    chat_options: Annotated[dict[str, bool | int | str], arg(name="", constructor=chat_options)] = field(
        default_factory=dict
    )
    device: DeviceName = "auto"
    """Where to compute. auto uses a CUDA device if there is one."""
    dtype: Precision = "auto"
    """Precision of the weights. auto: float32 on CPU and bfloat16 on CUDA."""
    slots: int = 128
    """How many responses are sampled side by side. Fewer need less memory."""
    chunk: Annotated[int | None, option(default="4 x slots / k")] = None
    """How many problems are sampled and saved together."""
    threads: Annotated[int | None, option(default="one per core")] = None
    """Number of CPU threads."""

    def __post_init__(self) -> None:
        calculator = self.episodes.environment == CALCULATOR
        object.__setattr__(self, "data", data_names(self.data) or ((COUNTDOWN,) if calculator else ()))
        if self.k is None:
            object.__setattr__(self, "k", 1 if self.temperature == 0 else DEFAULT_K)
        for key, (possible, words) in POSSIBLE.items():
            if (value := getattr(self, key)) is not None and not possible(value):
                raise ConfigError(f"--{key.replace('_', '-')} {value}: it must be {words}.")
        truncates = any(getattr(self, key) != off for key, off in LEAVES_OUT_NOTHING.items())
        if self.temperature == 0 and (truncates or self.k > 1):
            raise ConfigError(
                "--temperature 0 is greedy: it takes the likeliest token, so all responses to a problem are the same. "
                "Leave out --top-p, --top-k and --min-p, and give --k 1; or set a temperature above 0."
            )
        if not self.data and self.episodes.environment is None:
            raise ConfigError("--data names no data set. Give for example --data gsm8k, or name=path.")
        if idle := self.episodes.idle.replace("_", "-"):
            raise ConfigError(
                f"--{idle} is about environments, and there is none. Give --environment or --tools, or leave it out."
            )
        if self.episodes.plays and calculator != (self.data == (COUNTDOWN,)):
            raise ConfigError(
                f"--environment {CALCULATOR} is for --data {COUNTDOWN} alone, which has no other one. Leave out one of "
                "them."
            )
        for one in self.rewards:
            if one == "judge":
                raise ConfigError(
                    "--reward judge: `bapo eval` asks no judge. The evaluations of a run do: bapo train with "
                    "task.reward=judge and eval.every."
                )
            if one != "math" and ":" not in one:
                raise ConfigError(f"--reward {one}: it is neither math nor module:function. {written_as(one)}")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ConfigError(
                f"--reward-weights has {len(self.reward_weights)} weights for {len(self.rewards)} rewards. Give "
                "--reward as many, with commas."
            )
        if not all(map(math.isfinite, self.reward_weights)):
            raise ConfigError(f"--reward-weights {self.reward_weights}: give finite numbers.")

    @property
    def rewards(self) -> tuple[str, ...]:
        """What is asked to score responses; empty if nobody said."""
        return () if self.reward is None else tuple(name.strip() for name in self.reward.split(","))

    @property
    def chunk_problems(self) -> int:
        """Problems per engine call: enough responses to keep the slots full for most of it."""
        return self.chunk or max(1, math.ceil(4 * self.slots / self.k))
