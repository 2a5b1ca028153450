"""What an environment is to the rest of the system: something that answers a turn.

    turn          what the policy samples up to a stop token, or up to a token that ends a turn
    observation   what the environment says after a turn; its tokens follow in the same response, but nobody sampled
                  them
    episode       the life of one environment beside one response
    answer        what an environment says after it began, after a turn, or about the whole episode

The scheduler asks and does not wait; answers come by `collect`, one for each `begin`, `act` and `grade`. Each episode
has one question open at most. An environment that failed is not asked again: its episode is ended, and another one
begins, is given the same turns and must answer as the first one did, unless it offers its state (`conversations.py`).

Text becomes tokens in `Script`, and in one direction only: what was sampled is never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bapo.types import Message, Problem

Said = str | list[Message]
"""Plain text to be continued as it stands, or messages for the model's chat template. Empty: nothing was said."""


@dataclass(frozen=True)
class Answer:
    """What an environment says when it is asked."""

    text: Said = ""
    """After `begin`: what the prompt has besides the problem. After `act`: the observation. After `grade`: nothing."""
    over: bool = False
    """Whether the episode is over. The observation of the last turn is recorded, but the policy does not read it."""
    reward: float | None = None
    """After `act`: of this step; the steps are added up. After `grade`: of the whole episode, in place of their sum.
    None: it has no opinion. If no answer of an episode has a reward, the task's verifier scores the transcript."""
    state: Any = None
    """What an environment that offers it can go on from, as JSON data. None: it is given the same turns instead."""
    failure: str = ""
    """Why the environment failed, and not the model, in a line; after `grade`, why the grader did. Tried again, and
    then the whole group leaves. An error of a tool is an observation, not a failure."""


class Environments(Protocol):
    """The environments of all episodes of a run, wherever they live. No method waits but `collect`."""

    @property
    def at_once(self) -> bool:
        """Whether answers are there as soon as they are asked for."""

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Texts that end a turn besides the model's stop tokens, such as "=": tokens that end with one end a turn."""

    @property
    def name(self) -> str:
        """What a person calls them."""

    def begin(self, key: str, problem: Problem, state: Any = None) -> None:
        """Start the episode of this name. Its answer may add something to the prompt; with a state, it says nothing."""

    def act(self, key: str, turn: str) -> None:
        """Give the episode a finished turn, with its special tokens."""

    def grade(self, key: str) -> None:
        """Ask an episode for its own reward. The response is complete, whether or not the environment said so."""

    def collect(self, timeout: float) -> list[tuple[str, Answer]]:
        """What was answered since the last call. Waits for the first answer at most this many seconds."""

    def end(self, key: str) -> None:
        """Forget an episode, wherever it is. The answer to a question that is open never comes. May come twice."""

    def close(self) -> None:
        """End what was started for all of them."""


class Script(Protocol):
    """How what is said becomes tokens of one model, and a turn becomes text."""

    def prompt(self, problem: Problem, opening: Said) -> list[int]:
        """The prompt of a response: the problem, what the environment said when it began, and descriptions of tools."""

    def turn(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, with special tokens."""

    def observation(self, said: Said) -> list[int]:
        """The tokens that follow a finished turn, up to where the policy goes on. None of nothing said."""

    def context(self, problem: Problem, opening: Said, turns: Sequence[tuple[Sequence[int], Said]]) -> list[int] | None:
        """The whole conversation up to where the policy goes on, as its chat template writes it after these turns, each
        with what was said after it. None: the policy reads every token again, as it stands."""
