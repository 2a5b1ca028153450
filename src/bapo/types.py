"""The things that move through the system, and the words for them.

    policy          a model with its tokenizer
    problem         a prompt with what its verifier needs
    verifier        the program that gives a response its reward
    response        the tokens a policy adds to a prompt; while it grows we call it a trajectory
    group           the responses to one problem; rewards are compared within it
    version         how many updates the learner had taken when a token was sampled; one per token
    staleness       learner version minus token version
    update          one optimizer step; `version` counts them
    uses            how often a token was trained on before an update, in passes over its rollout and as a replay
    rollout         the groups that were sampled between two series of updates
    parked          a trajectory paused mid-generation, to be continued under newer weights
    demonstration   a prompt with a response to learn from, in supervised training
    turn            what the policy samples before an environment answers; a response has one, or several
    observation     what an environment answers; its tokens belong to the response, but nobody sampled them

Every token keeps the log-prob and the version of the policy that really sampled it. Nothing is recomputed or guessed
later. A token that an environment said has neither: it counts as context, and for nothing else. This module imports
nothing heavy, so every other module may import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor

Message = dict[str, Any]
"""One turn of a chat: role and content, and the calls of tools or the tool's name if it has them."""

Truncated = Literal["keep", "mask", "drop"]
"""What an update does with responses that the length limit cut off: learn.truncated."""

LOG_RATIO_EDGES = (-1.0, -0.6, -0.35, -0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Where tokens are binned by log-ratio: 15 bins, the middle one around ratio 1, the outer two open."""

USE_EDGES = (1, 2, 4, 8)
"""Where tokens are binned by uses: 5 bins, the first for tokens that were never trained on, the last one open."""

LARGEST_REWARD = 3.4e38
"""The largest reward allowed, in absolute value: float32 cannot hold more."""

OPTIONAL = ("reference_logprobs", "log_kept", "rewards", "sampled", "answers", "contexts", "ending")
"""The fields of a trajectory that only some runs have."""


class Status(StrEnum):
    """Where a trajectory stands."""

    PARKED = "parked"
    """Unfinished: not started yet, or paused; it will be continued."""
    STOPPED = "stopped"
    """Finished by a stop token."""
    TRUNCATED = "truncated"
    """Finished by the length limit."""
    DROPPED = "dropped"
    """Given up, by the age policy or after a failure; never trained on."""


@dataclass(frozen=True)
class Problem:
    """A prompt with what its verifier needs."""

    id: str
    """Unique within its task and stable between runs."""
    prompt: str | list[Message]
    """Text to be continued as it stands, or chat messages, which the model's own template turns into text."""
    answer: Any
    """JSON-serialisable ground truth, read by the task's own scorer."""
    source: str = ""
    """Where it comes from: the name of its data set."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else its data set says about it: JSON-serialisable, for scorers that ask for it."""


@dataclass(frozen=True)
class Score:
    """What a verifier says about one response: a reward, or why it could not give one."""

    reward: float | None
    """None if the verifier failed. Such a response is never trained on."""
    failure: str = ""
    """The cause, if it failed: timeout, memory, crash, or the exception with its message."""
    answer: str | None = None
    """The final answer it found in the response, in a form that equal answers share; None if it found none."""
    read: int = 0
    """Tokens that a judge read for this score."""
    written: int = 0
    """Tokens that it wrote."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """If the reward is a weighted sum: its parts by name, without their weights; None where one does not apply."""


class ResponseText(str):
    """The text of a response that knows its tokens, for verifiers that ask for them."""

    tokens: Sequence[int]
    """With the stop token."""

    def __new__(cls, text: str, tokens: Sequence[int] = ()) -> ResponseText:
        """The text, with these tokens."""
        made = super().__new__(cls, text)
        made.tokens = tokens
        return made


@dataclass(frozen=True)
class Row:
    """A context and tokens after it: one sequence of a forward pass."""

    context: list[int]
    tokens: list[int]
    sampled: list[bool]
    """Which of the tokens the policy sampled. Empty: all."""

    def __len__(self) -> int:
        return len(self.context) + len(self.tokens)


@dataclass
class Trajectory:
    """One response as it grows, with the origin of every token.

    What is known of tokens (log-probs, entropies, versions, masses) has one entry for each sampled token, in order.
    """

    prompt: list[int]
    """Token ids of the prompt."""
    seed: int
    """The seed of this response's own random numbers. Token i draws from (seed, i), whatever else is in the batch."""
    tokens: list[int] = field(default_factory=list)
    """All tokens after the prompt, sampled and observed. Nothing is ever changed or removed."""
    behavior_logprobs: list[float] = field(default_factory=list)
    """Log-prob of each sampled token under the distribution it came from (temperature and truncation included)."""
    entropies: list[float] = field(default_factory=list)
    """Entropy of the distribution each of them was sampled from."""
    versions: list[int] = field(default_factory=list)
    """Version of the policy that sampled each of them; never decreases along a response."""
    status: Status = Status.PARKED
    reward: float | None = None
    """Set once, by the verifier, after the response is finished."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Set with it: the parts of the score (`Score.rewards`)."""
    shaping: float = 0.0
    """The penalty for long responses. It is added to the reward when advantages are computed, and nowhere else."""
    reference_logprobs: list[float] = field(default_factory=list)
    """With learn.kl: log-prob of each token under its reference, at the temperature of sampling.
    Set once, by the learner, when it first sees the response; empty before, and without learn.kl."""
    log_kept: list[float] = field(default_factory=list)
    """With top-p, top-k or min-p: log of the probability that they kept at each token. Added to `behavior_logprobs`, it
    gives the log-probs under the whole distribution. Empty where nothing was left out."""
    sampled: list[bool] = field(default_factory=list)
    """Whether the policy sampled each token, and not an environment said it. Empty: it sampled all of them."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """What the environment answered, each time that it was asked (`environments/conversations.py`). A resumed run gives
    a new environment the same turns, and compares."""
    contexts: list[dict[str, Any]] = field(default_factory=list)
    """Where it goes on after another context than what stands before (`at`), and that context (`tokens`): its chat
    template writes earlier turns in another way (task.history)."""
    ending: str = ""
    """How its episode ended; empty without an environment (`environments/conversations.py`)."""

    @property
    def own(self) -> list[int]:
        """The tokens that the policy sampled."""
        return list(compress(self.tokens, self.sampled)) if self.sampled else self.tokens

    @property
    def context(self) -> list[int]:
        """What the policy reads before the next token."""
        begin, context = self._begun[-1]
        return context + self.tokens[begin:]

    @property
    def rows(self) -> list[Row]:
        """What forward passes read: the prompt and all tokens, or a row for each context."""
        rows, end = [], len(self.tokens)
        for begin, context in reversed(self._begun):
            rows.append(Row(context, self.tokens[begin:end], self.sampled[begin:end]))
            end = begin
            while end and not self.sampled[end - 1]:  # what was said before the turn is in its context
                end -= 1
        return rows[::-1]

    @property
    def _begun(self) -> list[tuple[int, list[int]]]:
        """Where each row begins, and after what."""
        return [(0, self.prompt), *((one["at"], one["tokens"]) for one in self.contexts)]

    def observe(self, tokens: Sequence[int]) -> None:
        """Add what an environment said."""
        self.sampled = (self.sampled or [True] * len(self.tokens)) + [False] * len(tokens)
        self.tokens += tokens

    def mark(self) -> Callable[[], None]:
        """What takes a response that is not scored back to where it is now. Its lists only grow, but for the prompt."""
        grows = [name for name, value in vars(self).items() if isinstance(value, list) and name != "prompt"]
        lengths = {name: len(getattr(self, name)) for name in grows}
        others = {name: value for name, value in vars(self).items() if name not in lengths}

        def back() -> None:
            vars(self).update(others)
            for name, length in lengths.items():
                del getattr(self, name)[length:]

        return back

    @property
    def reference_gap(self) -> float:
        """Its log-prob when it was sampled, without truncation, minus that under the reference, in nats."""
        return math.fsum([*self.behavior_logprobs, *self.log_kept]) - math.fsum(self.reference_logprobs)

    @property
    def learning_reward(self) -> float | None:
        """The reward that advantages are computed from."""
        return None if self.reward is None else self.reward + self.shaping

    @property
    def finished(self) -> bool:
        """Whether the response is complete and may be scored."""
        return self.status in (Status.STOPPED, Status.TRUNCATED)


@dataclass
class Group:
    """The responses to one problem."""

    id: int
    """Running number in the order groups were admitted; unique within a run."""
    problem: Problem
    trajectories: list[Trajectory]
    uses: int = 0
    """How often it was trained on before. The buffer knows; a group outside an update has 0."""

    @property
    def oldest(self) -> int | None:
        """The version of its oldest token; None if it has no token. Versions never decrease along a response."""
        return min((t.versions[0] for t in self.trajectories if t.versions), default=None)

    def compared(self, truncated: Truncated) -> list[Trajectory]:
        """The responses whose rewards are compared: all of them, unless those cut off by the length limit drop out."""
        return self._uncut if truncated == "drop" else self.trajectories

    def trained(self, truncated: Truncated) -> list[Trajectory]:
        """The responses whose tokens are trained on."""
        return self.trajectories if truncated == "keep" else self._uncut

    @property
    def _uncut(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.status is not Status.TRUNCATED]

    @property
    def finished(self) -> bool:
        """Whether every response is complete."""
        return all(trajectory.finished for trajectory in self.trajectories)


Metrics = dict[str, float | list[float]]
"""What is logged about an update, by name."""
Record = Callable[..., None]
"""A function that is told what happens to a group: the event, the group's id, and facts by name."""


def nothing(event: str, group: int, **facts: Any) -> None:
    """A record that keeps nothing."""


Totals = TypeVar("Totals", bound="DataclassInstance")


def increased(totals: Totals, **more: int) -> Totals:
    """The same totals with these numbers added to their fields."""
    return replace(totals, **{name: getattr(totals, name) + value for name, value in more.items()})


def refuse(*cases: tuple[object, str]) -> None:
    """Raise a ValueError with the message of the first case whose condition holds. All messages are made beforehand."""
    for wrong, message in cases:
        if wrong:
            raise ValueError(message)


def batches_per_pass(groups: int, batch_groups: int) -> int:
    """Updates in one pass over this many groups: the groups over the batch size, rounded, and at least one."""
    return max(1, math.floor(groups / batch_groups + 0.5))


def even_part(count: int, parts: int, part: int) -> tuple[int, int]:
    """Where one of so many parts begins and ends, if things are cut into parts whose sizes differ by one at most."""
    return count * part // parts, count * (part + 1) // parts


def group_state(group: Group) -> dict[str, Any]:
    """A group as plain JSON data. Python writes floats so that they are read back exactly."""
    return {
        "id": group.id,
        "problem": dict(vars(group.problem)),
        "trajectories": [_trajectory_state(trajectory) for trajectory in group.trajectories],
    }


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    """What only some runs have is left out where it is empty."""
    known = {name: value for name, value in vars(trajectory).items() if name not in OPTIONAL or value}
    return {name: value.copy() if isinstance(value, list | dict) else value for name, value in known.items()}


def group_from_state(state: dict[str, Any]) -> Group:
    """The group that `group_state` wrote."""
    trajectories = [Trajectory(**{**saved, "status": Status(saved["status"])}) for saved in state["trajectories"]]
    return Group(id=state["id"], problem=Problem(**state["problem"]), trajectories=trajectories)


@dataclass(frozen=True)
class TokenBatch:
    """Sequences (prompt and response) for one forward pass, and their sampled tokens, laid end to end without padding.

    A place is one token of one sequence. What an environment said has places, and is otherwise left out.
    """

    input_ids: Tensor
    """[places] all sequences, one after the other."""
    position_ids: Tensor
    """[places] where in its sequence each place is, from 0."""
    offsets: Tensor
    """[sequences + 1] int32: where each sequence begins, and where the last one ends."""
    longest: int
    """Places of the longest sequence."""
    predicts: Tensor
    """[tokens] the places whose next token was sampled, ascending. The fields below follow the same order."""
    targets: Tensor
    """[tokens] the sampled tokens."""
    sequence_ids: Tensor
    """[tokens] which sequence each belongs to, from 0. A sequence without a sampled token has no number."""
    behavior_logprobs: Tensor
    """[tokens]"""
    advantages: Tensor
    """[tokens]"""
    versions: Tensor
    """[tokens]"""
    uses: Tensor
    """[tokens] how often each was trained on before this update"""
    reference_logprobs: Tensor | None = None
    """[tokens] under the reference of learn.kl; None if a response has none"""
    loss_weights: Tensor | None = None
    """[tokens] what a balanced loss multiplies the loss of each by (`core/reduction.py`)"""
    log_kept: Tensor | None = None
    """[tokens] log of the probability that truncated sampling kept; None if nothing was left out of any"""

    @property
    def sampler_logprobs(self) -> Tensor:
        """[tokens] float64, under the whole distribution that the sampler had"""
        return self.behavior_logprobs.double() + self.log_masses.double()

    @property
    def log_masses(self) -> Tensor:
        """[tokens] `log_kept`, or zeros"""
        return self.behavior_logprobs.new_zeros(len(self.targets)) if self.log_kept is None else self.log_kept
