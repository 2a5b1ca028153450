"""The section task.judge: the model that scores responses with task.reward = "judge"."""

import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, field_validator

from bapo.config.base import Section


class JudgeConfig(Section):
    """The judge of task.reward = "judge": a model behind an OpenAI-compatible endpoint, such as vLLM's own server."""

    url: str = ""
    """Its address, up to /v1, such as http://127.0.0.1:8000/v1. Prompts, reference answers and responses are sent
    there."""
    model: str = ""
    """The name that the model has there."""
    rubric: str = ""
    """What a good response is, in words; or a file that says so, named with its ending: rubric.txt or rubric.md."""
    best: float = Field(10.0, gt=0, le=1e6)
    """The best score. The judge gives scores from 0 to this one, and the reward is its share of it."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the judge. Whatever it says of a response counts for the whole run."""
    max_tokens: int = Field(512, ge=1)
    """Length limit of what it says."""
    seconds: float = Field(60.0, gt=0)
    """Time limit of one request."""
    retries: int = Field(8, ge=0, le=100)
    """How often a server that is busy or gone is asked again, after 0.5 s, 1 s, 2 s and so on, at most 30 s. A response
    that it never scored is logged as a failure and not trained on."""
    key_variable: str = ""
    """The environment variable that holds the key of the endpoint. The key itself is written nowhere. Empty: there is
    none."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        if value:
            check_address(value)
        return value

    @field_validator("key_variable")
    @classmethod
    def _name(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,99}", value):
            raise ValueError(
                "task.judge.key_variable is no name of an environment variable, such as OPENAI_API_KEY. Put the key "
                "into the variable, and only its name here."
            )
        return value

    def check(self, rewards: tuple[str, ...]) -> None:
        """Raise a ValueError if the judge is asked and not described, or described and not asked."""
        asked = "judge" in rewards
        missing = [f"task.judge.{name}" for name in ("url", "model", "rubric") if not getattr(self, name)]
        if asked and missing:
            raise ValueError(f"task.reward='judge' needs {', '.join(missing)}. Set what is missing.")
        if not asked and (changed := self.changed()):
            raise ValueError(
                f"task.judge.{changed[0]} is for task.reward='judge', but task.reward={','.join(rewards)!r} asks none. "
                "Set task.reward='judge', or leave task.judge out."
            )

    @property
    def rubric_text(self) -> str:
        """What the rubric says. ValueError if its file cannot be read."""
        if not re.fullmatch(r"\S+\.(txt|md)", self.rubric):
            return self.rubric
        try:
            return Path(self.rubric).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            told = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise ValueError(f"task.judge.rubric={self.rubric!r} cannot be read: {told}. Check the path.") from None


def check_address(url: str) -> None:
    """Raise a ValueError, which does not repeat the address, if it is none or holds a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        raise ValueError("task.judge.url is no http or https address. Give one such as http://127.0.0.1:8000/v1.")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError(
            "task.judge.url holds a password, a query or a fragment. Give the address up to /v1 alone, and the key in "
            "the environment variable that task.judge.key_variable names."
        )
