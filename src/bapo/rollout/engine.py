"""The Engine protocol: what every sampler must do, in this process, in another one, or on another machine.

    load      move the weights of a version to the engine, once per version that samples
    submit    add requests to the work under way
    collect   return what was sampled since the last call, as it comes
    park      stop, and return unfinished responses as they are

A caller submits requests and collects until every request has had its last segment, which is the one with a status. The
engine stamps its version on every token, so there is never a doubt about which policy sampled it. `sampled` and
`generate` are this loop, for callers that wait.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bapo.types import Status

if TYPE_CHECKING:
    from torch import Tensor

Precision = Literal["model", "fp8", "fp8-weights"]
"""In what the layers are multiplied: the model's dtype, weights and states in eight bits, or the weights alone."""
COLLECT_SECONDS = 1.0
"""How long a waiting caller lets the engine work before it looks at what was sampled."""
QUIET_SECONDS = 600.0
"""How long a waiting caller lets an engine sample nothing before it raises an error."""
NOTHING_LOADED = -1
"""The version of an engine that has no weights yet."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probs and entropies belong to the distribution that is left by temperature and
    truncation (`sittings.py`)."""

    temperature: float = 1.0
    """Divides the logits. 0 is greedy."""
    stop_ids: frozenset[int] = frozenset()
    """A response ends with the first of these tokens, which is kept as its last token."""
    top_p: float = 1.0
    """The likeliest tokens stay that together hold this share. 1 leaves out nothing."""
    top_k: int = 0
    """Only so many tokens stay. 0 leaves out nothing."""
    min_p: float = 0.0
    """Tokens stay that are this many times as likely as the likeliest. 0 leaves out nothing."""

    @property
    def truncates(self) -> bool:
        """Whether a part of the vocabulary is left out. Greedy sampling takes the best token either way."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def words(self) -> str:
        """`temperature 0.6, top-p 0.95`"""
        cuts = {"top-p": self.top_p % 1, "top-k": self.top_k, "min-p": self.min_p}
        return ", ".join(
            [f"temperature {self.temperature:g}", *(f"{name} {cut:g}" for name, cut in cuts.items() if cut)]
        )


@dataclass(frozen=True)
class Request:
    """One response to start or to continue."""

    context: list[int]
    """The prompt and all response tokens so far."""
    position: int
    """How many response tokens there are so far. The next one draws from (seed, position)."""
    seed: int
    max_new_tokens: int
    """The response is truncated after this many more tokens."""
    id: int = 0
    """Segments carry this id. It is unique among the requests under way."""


@dataclass(frozen=True)
class Segment:
    """Tokens added to one response. The first four lists have equal length and may be empty."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    """NaN from an engine that does not give entropies."""
    versions: list[int] = field(default_factory=list)
    status: Status | None = None
    """None: more will come. STOPPED or TRUNCATED: the response is complete. PARKED: it is incomplete, and the engine
    has stopped work on it. DROPPED: the engine cannot continue it."""
    log_kept: list[float] = field(default_factory=list)
    """Log of the probability that truncation kept at each token; empty if sampling does not truncate."""


class Engine(Protocol):
    """Samples tokens. Knows nothing about rewards, objectives or the learner."""

    @property
    def version(self) -> int:
        """The version of the weights it samples with; NOTHING_LOADED before the first `load`."""

    @property
    def draws_by_position(self) -> bool:
        """Whether token i of a response is drawn with the random number of (seed, i), so that equal distributions give
        equal tokens, whatever else is sampled. If not, a resumed run does not repeat an uninterrupted one.
        """

    @property
    def gives_entropies(self) -> bool:
        """Whether segments contain the entropy of every distribution that was sampled from."""

    @property
    def resting(self) -> bool | None:
        """Whether it rests in the middle of `turns`, until more is submitted. None: it never rests."""

    def takes(self, requests: Sequence[Request]) -> bool:
        """Whether these may be submitted now. An engine may have no place for them beside those under way."""

    def load(self, weights: Iterable[tuple[str, "Tensor"]], *, version: int) -> None:
        """Sample with these weights from now on. Nothing may be under way: park and collect first."""

    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        token_budget: int | None = None,
        turns: bool = False,
    ) -> None:
        """Start work on these requests, first come first served, beside those under way if it `takes` them.

        After `token_budget` tokens, all unfinished responses are parked. If any request is invalid, this call raises
        and starts none of them.

        `turns`: responses that stop may come back with what was said to them, until `park`. An engine may keep their
        keys and values. It rests when half of what is under way has ended, so that what it samples together does not
        depend on when they come back.
        """

    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """Return (request id, segment) for everything sampled since the last call.

        Each id has exactly one last segment, the one with a status. Waits until something was sampled, but not much
        longer than `timeout` seconds; None waits until all work is done. An engine in this process does its work inside
        this call.
        """

    def park(self) -> None:
        """Stop work. The next `collect` returns every unfinished response as PARKED."""


@dataclass(frozen=True)
class Sampled:
    """How far sampling is."""

    responses: int
    """Complete responses."""
    asked: int
    """All responses asked for, complete or not."""
    tokens: int
    """Tokens sampled so far, including those of incomplete responses."""

    def line(self, what: str, seconds: float) -> str:
        """`sampling: 412/2048 responses, 96,400 tokens, 1,240 tokens/s`, this many seconds after the start."""
        rate = self.tokens / seconds if seconds > 0 else 0.0
        return f"{what}: {self.responses}/{self.asked} responses, {self.tokens:,} tokens, {rate:,.0f} tokens/s"


TellSampled = Callable[[Sampled], None]
"""A function that is told how far sampling is, at the start and then about once a second."""


def sampled(
    engine: Engine, under_way: Collection[int], *, seconds: float | None = None
) -> Iterator[list[tuple[int, Segment]]]:
    """Collect until nothing is under way, or the engine rests. The caller takes out of `under_way` what has ended.

    An engine works for about so many seconds at a time; by default, `COLLECT_SECONDS`.
    """
    heard = time.monotonic()
    while under_way and not engine.resting:
        collected = engine.collect(COLLECT_SECONDS if seconds is None else seconds)
        if collected:
            heard = time.monotonic()
        elif time.monotonic() - heard > QUIET_SECONDS:
            raise RuntimeError(
                f"{type(engine).__name__} has sampled nothing for {QUIET_SECONDS:.0f} s while {len(under_way)} "
                "requests are under way. Look at the engine's own log, then start it again."
            )
        yield collected


@contextmanager
def left_idle(engine: Engine) -> Iterator[None]:
    """Inside, an engine works for us. Afterwards it works for nobody, even if somebody failed on the way."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # of an engine that died
            engine.park()
            engine.collect(0)
        raise
    if engine.resting:
        engine.park()
        engine.collect(0)


def generate(
    engine: Engine,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    token_budget: int | None = None,
    tell: TellSampled | None = None,
) -> list[Segment]:
    """Continue all requests and wait for them. Returns one segment per request, in their order, whatever their ids."""
    numbered = [replace(request, id=index) for index, request in enumerate(requests)]
    parts: list[list[Segment]] = [[] for _ in requests]
    complete = tokens = 0
    if tell is not None:
        tell(Sampled(0, len(requests), 0))
    under_way = set(range(len(requests)))
    with left_idle(engine):
        engine.submit(numbered, sampling, token_budget=token_budget)
        for collected in sampled(engine, under_way):
            for id, segment in collected:
                parts[id].append(segment)
                tokens += len(segment.tokens)
                complete += segment.status in (Status.STOPPED, Status.TRUNCATED)
                under_way -= {id} if segment.status is not None else set()
            if tell is not None:
                tell(Sampled(complete, len(requests), tokens))
    return [join(listed) for listed in parts]


def join(parts: Sequence[Segment]) -> Segment:
    """Join consecutive segments of one response into one, with the status of the last."""
    if len(parts) == 1:
        return parts[0]
    lists: dict[str, Any] = {
        each.name: [value for part in parts for value in getattr(part, each.name)]
        for each in fields(Segment)
        if each.name != "status"
    }
    return Segment(**lists, status=parts[-1].status)
