"""What an evaluation is asked to do, as given on the command line. Checked before anything heavy is imported.

What only the machine, the model and the data can tell (device, length limit, fingerprints) is decided in `parts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bapo.config.errors import ConfigError

__all__ = ["DEFAULT_K", "Settings", "data_names"]

DEFAULT_K = 16
DEFAULT_MAX_TOKENS = 4096
"""Longest response if nothing is said and the model has room for it."""


@dataclass(frozen=True)
class Settings:
    """Everything a person can choose. None: decided by model, data or machine."""

    model: str
    data: tuple[str, ...]
    k: int = DEFAULT_K
    temperature: float = 0.6
    max_tokens: int | None = None
    seed: int = 0
    problems: int | None = None
    """First so many of every data set."""
    reward: str | None = None
    """None: the data set's own verifier if it has one, otherwise math."""
    reward_seconds: float = 10.0
    reward_memory_mb: int = 2048
    template: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    chat: str = "auto"
    system: str = ""
    chat_options: dict[str, bool | int | str] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "auto"
    slots: int = 128
    chunk: int | None = None
    """Problems sampled and saved together."""
    threads: int | None = None

    def __post_init__(self) -> None:
        for key in ("k", "max_tokens", "problems", "slots", "chunk", "threads"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"--{key.replace('_', '-')} {value}: it must be 1 or more.")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature {self.temperature}: it must be a number from 0 on; 0 is greedy.")
        if self.temperature == 0 and self.k > 1:
            raise ConfigError(
                f"--k {self.k} at --temperature 0: greedy responses to one problem are all the same, so more than one "
                "tells nothing. Set --k 1, or a temperature above 0."
            )
        if not self.data:
            raise ConfigError("--data names no data set. Give for example --data gsm8k, or name=path.")
        if not (math.isfinite(self.reward_seconds) and self.reward_seconds > 0):
            raise ConfigError(f"--reward-seconds {self.reward_seconds}: it must be a number above 0.")
        if self.reward not in (None, "math") and ":" not in str(self.reward):
            raise ConfigError(
                f"--reward {self.reward}: it is neither math nor module:function, such as my_rewards:score."
            )

    @property
    def chunk_problems(self) -> int:
        """Problems per engine call: enough responses to keep the slots full for most of it."""
        return self.chunk or max(1, math.ceil(4 * self.slots / self.k))


def data_names(given: Sequence[str]) -> tuple[str, ...]:
    """The names in `--data a,b --data c`. A file with a comma in its path is one name, and so is name=path of one."""
    names: list[str] = []
    for text in given:
        name, _, path = text.partition("=")
        whole = Path(text).exists() or ("," not in name and path != "" and Path(path).exists())
        names += [text] if whole else [name.strip() for name in text.split(",") if name.strip()]
    return tuple(names)
