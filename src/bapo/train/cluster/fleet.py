"""Many engines in other processes as one engine, which goes on when some of them die.

    member     a place in the cluster, with the actor that lives there now. It keeps what is left of each of its
               requests, so that nothing that has arrived is sampled again after a death
    call       a member has at most one call under way: start, load, work, park or end. It answers, dies or falls
               silent
    request    at most one member works on it. Its tokens stream here with every answer, so whoever continues it after
               a death begins where the last answer ended

Who waits for whom. A member waits only for its next call, and `collect` gives it one as soon as it has answered. New
weights reach a member between two calls to work, each member by itself, so no engine waits for another one. A member
that dies, does not answer within `silence_seconds`, or samples with wrong weights is killed with its process tree. A
new actor starts in its place, loads the newest weights, is checked, and only then is given requests. Nobody waits for
it unless no member is left. The fleet raises an error when no member has been fit to work for twice `start_seconds`, or
when actors cannot even start.

If published weights are lost with the machine that kept them, the fleet has no version until they are published again.
Requests are given to members with the newest weights only. So versions never decrease along a response, wherever it
continues. With `even`, all requests of a submission are divided at once and evenly, in their order, when all members
are fit: without faults, the same requests then give the same responses. Otherwise members take from one line as they
have room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bapo.config.errors import ClusterError, ConfigError
from bapo.config.numerals import counted
from bapo.rollout.engine import NOTHING_LOADED, Request, Sampling, Segment
from bapo.rollout.worker import continued
from bapo.runs.history import Restart
from bapo.screen.watch import ActorLine
from bapo.train.cluster.hosts import Published
from bapo.train.cluster.ray import END_SECONDS, Actor, Call, Hello, Lost, Missing, Silent, answered, end
from bapo.types import Status

if TYPE_CHECKING:
    from torch import Tensor

TRIES = 3
"""The failure in a row that ends the run: of a start, or at the same weights. Deaths and silence do not count."""
Doing = Literal["start", "load", "work", "park", "end", "nothing"]
DOING: dict[Doing, str] = {
    "start": "starting",
    "load": "loading weights",
    "work": "sampling",
    "park": "parking",
    "end": "being replaced",
    "nothing": "idle",
}
"""What a member does, in words."""
WORK_SECONDS = 0.5
"""How long a member samples before it answers."""
RECENT_ANSWERS = 32
"""The speed of a member is that of so many answers."""


class Member:
    """One place of the fleet. Which requests it gets, and when its actor is given up, is for the fleet to decide."""

    def __init__(self, name: str, actor: Actor) -> None:
        self.name = name
        self.restarts = -1
        self.asked: Published | None = None
        """The weights that it was last asked to load."""
        self.given: dict[int, Request] = {}
        """What is left of each request that it works on, as another member could continue it."""
        self.portion: list[Request] = []
        """What it is given with its next call."""
        self.failures = 0
        """Failures in a row that are not deaths."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_ANSWERS)
        """When its last answers came, and with how many tokens."""
        self.renew(actor)

    def renew(self, actor: Actor) -> None:
        """Let this actor live here, and wait for it to start."""
        self.actor = actor
        self.hello: Hello | None = None
        self.version = NOTHING_LOADED
        self.restarts += 1
        self._recent.clear()
        self.call: Call | None = actor.call("hello", what="start")
        self.doing: Doing = "start"

    def end(self) -> None:
        """Begin to end the actor, and take its requests away. Without a call, there is nothing to wait for."""
        self.given, self.portion = {}, []
        self.hello, self.version = None, NOTHING_LOADED
        self.call, self.doing = self.actor.kill(), "end"

    def ask(self, doing: Literal["load", "work", "park"], *given: Any, what: str) -> None:
        """Give it a call."""
        self.call, self.doing = self.actor.call(doing, *given, what=what), doing

    def load(self, published: Published) -> None:
        """Ask it to load these weights and to check them."""
        self.asked = published
        given = (published.parcel, published.version, published.fingerprint, published.probe)
        self.ask("load", *given, what=f"load the weights of version {published.version}")

    def work(self, sampling: Sampling) -> None:
        """Ask it to sample for its requests, old and new, for a moment."""
        requests, self.portion = self.portion, []
        self.given |= {request.id: request for request in requests}
        self.ask("work", requests, sampling, WORK_SECONDS, what="sample")

    def keep(self, segments: Iterable[tuple[int, Segment]]) -> None:
        """Remember what it has sampled since its last answer."""
        tokens = 0
        for id, segment in segments:
            self.given[id] = continued(self.given[id], segment.tokens)
            tokens += len(segment.tokens)
            if segment.status is not None:
                del self.given[id]
        self._recent.append((time.monotonic(), tokens))

    @property
    def unfinished(self) -> list[Request]:
        """What is left of its requests, whether it has begun them or not."""
        return [*self.given.values(), *self.portion]

    def line(self) -> ActorLine:
        """What a person sees of it: what it does, and since when if it starts, which may take long."""
        doing = DOING["nothing" if self.call is None and not self.unfinished else self.doing]
        if self.doing == "start" and self.call is not None:
            doing = f"{doing} for {self.call.seconds:.0f} s"
        rate = self._rate() if self.given else 0.0
        return ActorLine(self.name, doing, self.version, rate, len(self.given), self.restarts)

    def _rate(self) -> float:
        """Tokens per second over the last answers."""
        if len(self._recent) < 2:
            return 0.0
        seconds = time.monotonic() - self._recent[0][0]
        return sum(tokens for _, tokens in list(self._recent)[1:]) / max(1e-9, seconds)


class Fleet:
    """An Engine made of engines elsewhere."""

    def __init__(
        self,
        spawn: Callable[[int], Actor],  # number of the place -> a new actor in it
        size: int,
        *,
        slots: int,
        even: bool,
        silence_seconds: float,
        start_seconds: float,
    ) -> None:
        self.spawn, self.slots, self.even = spawn, slots, even
        self.restarted: Callable[[Restart], None] = lambda restart: None
        """Is told who was replaced."""
        self.say: Callable[[str], None] = lambda text: None
        """Is told what else a person should know."""
        self.watch: Callable[[], None] = lambda: None
        """Called whenever members were listened to, at least twice a second while somebody waits for them."""
        self.silence_seconds, self.start_seconds = silence_seconds, start_seconds
        self.published: Published | None = None
        self.sampling = Sampling()
        self.line: deque[Request] = deque()
        self.known: set[int] = set()
        """Requests under way, in the line or with a member."""
        self.gap_max = 0.0
        """The largest log-prob gap that a probe has found since the last `take_gap`."""
        self._found: list[tuple[int, Segment]] = []
        self._listened = time.monotonic()
        """When we last listened to members."""
        self._unfit_seconds = 0.0
        """For how long we have listened without hearing of a member that is fit to sample."""
        self._busy, self._busy_since = 0.0, self._listened
        """How many seconds all members together have sampled, and since when we count."""
        self._faulty = False
        """Whether a member was replaced since the last submission."""
        self._broken: ClusterError | None = None
        """Why the fleet has given up. Whoever cleans up after it is told the same."""
        self._gone: Published | None = None
        """Weights that nobody can load any more: the machine that kept them is lost."""
        self.members = [Member(f"rollout {place}", spawn(place)) for place in range(size)]

    # The Engine protocol.

    @property
    def version(self) -> int:
        """The version that members sample with, or will before they are given anything."""
        return NOTHING_LOADED if self.published is None else self.published.version

    @property
    def draws_by_position(self) -> bool:
        """Whether equal requests give equal tokens. Unless divided evenly, it depends on time who samples them."""
        return self.even and self._all_can("draws_by_position")

    @property
    def gives_entropies(self) -> bool:
        """Whether samples come with entropies."""
        return self._all_can("gives_entropies")

    resting = None

    def takes(self, requests: Sequence[Request]) -> bool:
        """It always does."""
        return True

    def load(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Give these weights to every member, each at its next opportunity. `weights` must be published."""
        assert isinstance(weights, Published), "a fleet loads weights that the learner has published"
        assert weights.version == version
        self.published, self._unfit_seconds = weights, 0.0
        for member in self.members:
            if member.hello is not None:  # these weights are not why an actor cannot start
                member.failures = 0

    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        token_budget: int | None = None,
        turns: bool = False,
    ) -> None:
        """Put these requests in line. A fleet has no token budget."""
        assert token_budget is None, "a fleet samples without a budget"
        if self.known and sampling != self.sampling:
            raise RuntimeError("requests with another sampling are under way. First park and collect them.")
        self.sampling, self._faulty = sampling, False
        self.line.extend(requests)
        self.known |= {request.id for request in requests}

    def collect(self, timeout: float | None = None) -> list[tuple[int, Segment]]:
        """Keep the members at work until something has come or time is up; without a timeout, until all is done."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._engage()
            left = WORK_SECONDS if deadline is None else min(WORK_SECONDS, max(0.0, deadline - time.monotonic()))
            self._listen(left)
            if not self.known or (deadline is not None and (self._found or time.monotonic() >= deadline)):
                found, self._found = self._found, []
                return found

    def park(self) -> None:
        """Let the members return what they are working on. It is collected as parked."""
        deadline = time.monotonic() + self.start_seconds
        while True:
            self._recall_waiting()
            if not (busy := [member for member in self.members if member.given]):
                return
            if time.monotonic() > deadline:
                names = ", ".join(member.name for member in busy)
                raise ClusterError(f"{names} did not park within cluster.start_seconds={self.start_seconds:g}.")
            for member in busy:
                if member.call is None:
                    member.ask("park", what="park its responses")
            self._listen(WORK_SECONDS)

    def _recall_waiting(self) -> None:
        """Take back, as parked, what no member has begun, or what a member that died had begun."""
        waiting = [*self.line, *(request for member in self.members for request in member.portion)]
        self.line.clear()
        for member in self.members:
            member.portion = []
        self.known -= {request.id for request in waiting}
        self._found += [(request.id, Segment(status=Status.PARKED)) for request in waiting]

    # More than an engine.

    def ready(self) -> None:
        """Wait until a member has started. Others may follow later, or wait for a machine."""
        while all(member.hello is None for member in self.members):
            self._engage()
            self._listen(WORK_SECONDS)

    def hear(self) -> None:
        """Take in what members have answered so far, and replace whoever has failed, without giving out new work."""
        self._listen(0)

    @property
    def lacking(self) -> bool:
        """Whether the present weights must be published again before a member can load them."""
        return self._gone is not None and self._gone is self.published

    @property
    def oldest(self) -> int | None:
        """The oldest version that a member is sampling with; None if nobody samples. What a member has sampled and not
        sent yet may be as old.
        """
        return min((member.version for member in self.members if member.given), default=None)

    def lines(self) -> list[ActorLine]:
        """What a person sees of every member."""
        return [member.line() for member in self.members]

    def take_gap(self) -> float:
        """The largest log-prob gap that was found by a probe since the last call."""
        gap, self.gap_max = self.gap_max, 0.0
        return gap

    def take_busy(self) -> float:
        """The share of the time since the last call that members sampled, on average."""
        busy, since = self._busy, self._busy_since
        self._busy, self._busy_since = 0.0, time.monotonic()
        return min(1.0, busy / max(1e-9, (self._busy_since - since) * len(self.members)))

    def close(self) -> None:
        """End all members."""
        end([member.actor for member in self.members])

    # Calls and answers.

    def _engage(self) -> None:
        """Give a call to every member that has none and can do something."""
        self._divide()
        for member in self.members:
            if member.call is not None:
                continue
            published = self.published
            newer = published if published and member.version != published.version else None
            if newer and not self.lacking:
                member.load(newer)
            elif member.unfinished and not newer:
                member.work(self.sampling)
            else:
                member.doing = "nothing"

    def _divide(self) -> None:
        """Give requests of the line to members that have the newest weights."""
        fit = [member for member in self.members if self._is_fit(member)]
        if not fit or not self.line:
            return
        if self.even and (len(fit) == len(self.members) or self._faulty):
            for place in range(len(self.line)):
                fit[place % len(fit)].portion.append(self.line.popleft())
        elif not self.even:
            for place, member in enumerate(fit):
                member.portion += [self.line.popleft() for _ in range(self._room(member, len(fit) - place))]

    def _is_fit(self, member: Member) -> bool:
        """Whether it can be given requests."""
        return member.hello is not None and member.version == self.version != NOTHING_LOADED

    def _room(self, member: Member, sharing: int) -> int:
        """How many requests it takes next: it always has some in line, so that no slot waits for the next call."""
        share = -(-len(self.line) // sharing)  # others want some, too
        return max(0, min(2 * self.slots - len(member.unfinished), share))

    def _listen(self, seconds: float) -> None:
        """Take in the answers that have come, after waiting at most this long, and replace whoever has failed."""
        if self._broken is not None:
            raise self._broken
        calls = [member.call for member in self.members if member.call is not None]
        if not calls:
            time.sleep(min(seconds, 0.05))  # nobody has anything to do
        heard = {id(call) for call in answered(calls, seconds)}
        for place, member in enumerate(self.members):
            call = member.call
            if call is None or (id(call) not in heard and call.seconds < self._patience(member)):
                continue
            if member.doing == "end":
                member.renew(self.spawn(place))
                continue
            try:
                answer = call.answer(0 if id(call) not in heard else self.silence_seconds)
            except (Lost, Silent) as error:
                self._replace(member, place, error)
            except Missing as error:
                if member.doing == "load":
                    self.say(f"the weights must be published again: {error}")
                    member.call, self._gone = None, member.asked
                else:  # its answer is lost, and with it some tokens that it believes we have
                    self._replace(member, place, error)
            except Exception as error:
                self._failed(member, place, error)
            else:
                member.call = None
                self._take_in(member, answer)
        now = time.monotonic()
        passed, self._listened = min(now - self._listened, WORK_SECONDS), now  # more of it went by unheard
        fit = any(self._is_fit(member) or (member.hello and self.published is None) for member in self.members)
        self._unfit_seconds = 0.0 if fit else self._unfit_seconds + passed
        if self._unfit_seconds > 2 * self.start_seconds:
            told = "; ".join(f"{line.name}: {line.doing}, {counted(line.restarts, 'restart')}" for line in self.lines())
            raise ClusterError(
                f"no rollout actor has been fit to sample for {2 * self.start_seconds:.0f} s ({told}). Look at the "
                "nodes of the cluster, then continue with `bapo resume`."
            )
        self.watch()

    def _patience(self, member: Member) -> float:
        """How many seconds a member may take for what it is doing."""
        return {"end": END_SECONDS, "start": self.start_seconds}.get(member.doing, self.silence_seconds)

    def _take_in(self, member: Member, answer: Any) -> None:
        """Use what a member has answered to its last call."""
        if member.doing == "start":
            member.actor.greet(answer)
            member.hello, member.doing = answer, "nothing"
        elif member.doing == "load":
            assert member.asked is not None
            member.version, member.failures = member.asked.version, 0
            self.gap_max = max(self.gap_max, answer)
        else:
            segments, seconds = answer
            member.keep(segments)
            self.known -= {id for id, segment in segments if segment.status is not None}
            self._found += segments
            self._busy += seconds

    def _failed(self, member: Member, place: int, error: Exception) -> None:
        """The actor itself reported an error: start another, but not for ever. Deaths go to `_replace` directly."""
        member.failures += 1
        if member.failures >= TRIES or isinstance(error, ConfigError):
            told = f"{member.name} failed {counted(member.failures, 'time')} while {DOING[member.doing]}: {error}"
            self._broken = ClusterError(told)
            raise self._broken from error
        self._replace(member, place, error)

    def _replace(self, member: Member, place: int, error: Exception) -> None:
        """End the actor of a member and start another one. Its requests go to the front of the line."""
        unfinished, cause = member.unfinished, str(error)
        streamed = sum(request.position for request in unfinished)
        self.restarted(Restart(member.name, cause, responses=len(unfinished), tokens=streamed))
        self.line.extendleft(reversed(unfinished))
        self._faulty = True
        member.end()
        if member.call is None:
            member.renew(self.spawn(place))

    def _all_can(self, what: str) -> bool:
        """Whether the engines of all members can do this; they are alike. Waits until one has started."""
        self.ready()
        return all(getattr(member.hello, what) for member in self.members if member.hello is not None)
