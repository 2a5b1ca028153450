"""What stands around an engine that works for others: a worker keeps it busy, and a probe checks what it samples from.

A worker keeps one engine at work on requests that come and go, and moves them to new weights without losing a token:

    give    add requests; they begin at the next `work`
    work    let the engine sample for some time; returns what was sampled
    load    change the weights under the requests: park them, load, continue them from their own tokens
    park    give everything back unfinished

An engine in this process may have no place for new requests beside those under way. Then all are parked and submitted
again together, which costs a prefill. An interrupted response is not parked for the caller: its segment has no status,
and more will come.

After every transfer of weights, a probe shows whether the engine samples from the policy that it was given. The learner
publishes, with each version of its weights, the log-probs of all next tokens after a few fixed contexts. The engine
samples tokens after the same contexts, in its ordinary way, and says how likely each was:

    gap(context, token) = | log-prob that the engine gives  -  the table's value at (context, token) |

Two programs that compute the same policy differ by rounding. Wrong weights differ by more, whatever the reason is: a
tensor that was skipped, a head that stayed as it was, keys and values of an older version. The probe needs only
`submit` and `collect`, so it serves every engine, and it sees what any response would be sampled from.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bapo.rollout.engine import Engine, Request, Sampling, Segment, generate
from bapo.types import Status

PARK_SECONDS = 60.0
"""How long an engine may take to return what it was working on."""


@dataclass(eq=False)
class Worker:
    """An engine with the requests that it is working on."""

    engine: Engine
    waiting: list[Request] = field(default_factory=list)
    under_way: dict[int, Request] = field(default_factory=dict)
    """What each request under way would ask for if it were submitted now."""
    sampling: Sampling = field(default_factory=Sampling)
    _found: list[tuple[int, Segment]] = field(default_factory=list)

    def give(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Work on these requests, too, after those that were given before."""
        if sampling != self.sampling and (self.waiting or self.under_way):
            raise RuntimeError("requests with another sampling are under way. First park them.")
        self.sampling = sampling
        self.waiting += requests

    def work(self, seconds: float) -> list[tuple[int, Segment]]:
        """Sample for about this long, and return (request id, segment) for everything sampled since the last call."""
        if self.waiting:
            if not self.engine.takes(self.waiting):
                self._interrupt()
            self.engine.submit(self.waiting, self.sampling)
            self.under_way |= {request.id: request for request in self.waiting}
            self.waiting = []
        if self.under_way:
            self._take_in(self.engine.collect(seconds))
        found, self._found = self._found, []
        return found

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Continue everything under these weights."""
        self._interrupt()
        self.engine.load(weights, version=version)

    def park(self) -> list[tuple[int, Segment]]:
        """Stop all work. Returns what was sampled since the last call; unfinished responses come back as PARKED."""
        self._interrupt()
        parked = [(request.id, Segment(status=Status.PARKED)) for request in self.waiting]
        found, self._found, self.waiting = self._found + parked, [], []
        return found

    def _interrupt(self) -> None:
        """Take everything back from the engine. What is unfinished waits before all others, in the same order."""
        if not self.under_way:
            return
        before = dict(self.under_way)
        self.engine.park()
        deadline = time.monotonic() + PARK_SECONDS
        while self.under_way:
            self._take_in(self.engine.collect(0), interrupted=True)
            if self.under_way and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{type(self.engine).__name__} was asked to park {len(before)} responses, and has not returned "
                    f"{len(self.under_way)} of them for {PARK_SECONDS:.0f} s. Start it again."
                )
        order = {id: place for place, id in enumerate(before)}
        self.waiting.sort(key=lambda request: order.get(request.id, len(order)))  # stable: newcomers keep their order

    def _take_in(self, collected: Iterable[tuple[int, Segment]], *, interrupted: bool = False) -> None:
        for id, segment in collected:
            request = continued(self.under_way.pop(id), segment.tokens)
            if interrupted and segment.status is Status.PARKED:
                self.waiting.append(request)
                segment = replace(segment, status=None)
            elif segment.status is None:
                self.under_way[id] = request
            if segment.tokens or segment.status is not None:
                self._found.append((id, segment))


def continued(request: Request, tokens: Sequence[int]) -> Request:
    """The request for what is left after these tokens."""
    return replace(
        request,
        context=[*request.context, *tokens],
        position=request.position + len(tokens),
        max_new_tokens=request.max_new_tokens - len(tokens),
    )


class WrongWeights(RuntimeError):  # noqa: N818
    """The engine does not sample from the policy that it was given."""


@dataclass(frozen=True)
class Probed:
    """How far the engine's log-probs were from those of the table."""

    gap_max: float
    gap_mean: float
    tokens: int
    """How many tokens were compared."""


def probe(
    engine: Engine,
    contexts: Sequence[Sequence[int]],
    table: Tensor,  # [contexts, vocabulary] log-probs at temperature 1
    *,
    temperature: float = 1.0,
    draws: int = 4,
    tolerance: float,
    mean_tolerance: float = math.inf,
) -> Probed:
    """Sample `draws` tokens after each context and compare their log-probs with the table's.

    The table holds log-probs at temperature 1. The tempered ones follow from them: log_softmax(table / temperature).
    `tolerance` is for the largest gap, `mean_tolerance` for the mean: in 16 bits single tokens may be far off.
    """
    expected = torch.log_softmax(table.double() / temperature, dim=-1)
    requests = [
        Request(list(context), position=0, seed=draw, max_new_tokens=1) for context in contexts for draw in range(draws)
    ]
    segments = generate(engine, requests, Sampling(temperature=temperature))
    tokens = torch.tensor([segment.tokens[0] for segment in segments])
    logprobs = torch.tensor([segment.logprobs[0] for segment in segments], dtype=torch.float64)
    rows = torch.arange(len(contexts)).repeat_interleave(draws)
    gaps = (logprobs - expected.cpu()[rows, tokens]).abs()
    found = Probed(gap_max=float(gaps.max()), gap_mean=float(gaps.mean()), tokens=len(gaps))
    if not (found.gap_max <= tolerance and found.gap_mean <= mean_tolerance):
        worst = int(gaps.nan_to_num(nan=torch.inf).argmax())
        raise WrongWeights(
            f"{type(engine).__name__} with weights of version {engine.version} does not sample from the policy of that "
            f"version: after context {int(rows[worst])} it gave token {int(tokens[worst])} the log-prob "
            f"{float(logprobs[worst]):.4f}, where the learner has {float(expected[rows[worst], tokens[worst]]):.4f}. "
            f"The gaps of {found.tokens} tokens are {found.gap_mean:.2g} in the mean and {found.gap_max:.2g} at most; "
            f"{mean_tolerance:.2g} and {tolerance:.2g} are allowed for rounding. A weight is wrong or stale: load all "
            "of them again. If the gap stays, start the engine again; then, use another dtype or engine."
        )
    return found
