"""The Engine protocol: what every sampler, in process or behind a server, must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bapo.screen.watch import Watch
from bapo.types import Status


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. No top-k or top-p: they would change the distribution the log-probs belong to."""

    temperature: float = 1.0
    """Divides the logits; log-probs and entropies are those of the tempered distribution. 0 is greedy."""
    stop_ids: frozenset[int] = frozenset()
    """A response ends with the first of these; it is kept as the last token."""


@dataclass(frozen=True)
class Request:
    """One response to start or to continue."""

    context: list[int]
    """Prompt and all response tokens so far."""
    position: int
    """How many response tokens there are already; the next one draws from (seed, position)."""
    seed: int
    max_new_tokens: int
    """The response is truncated after this many more."""


@dataclass(frozen=True)
class Segment:
    """What one sitting added to one response. The four lists have equal length; they may be empty."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    versions: list[int]
    status: Status
    """STOPPED or TRUNCATED if the response is complete, PARKED if it is not."""


class Engine(Protocol):
    """Samples tokens. Knows nothing about rewards, objectives or the learner."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        version: int,
        token_budget: int | None = None,
        watch: Watch | None = None,
    ) -> list[Segment]:
        """Continue every request, first come first served; one segment per request, in the same order.

        Stops when all are complete or when `token_budget` tokens have been sampled in this call; what is unfinished
        then comes back as PARKED with the tokens it got. `version` is stamped on every token sampled. `watch` may be
        told how far it is, about once a second and from this thread; an engine that cannot tell ignores it.
        """
        ...
