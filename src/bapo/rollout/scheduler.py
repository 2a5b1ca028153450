"""Partial rollout: which responses are sampled when, and how old a response may become.

Each run may sample a limited number of tokens. A response that is not complete by then is parked with its tokens, their
log-probs and versions, and is continued in a later run under newer weights. It is neither thrown away nor waited for.
Parked responses go first, then new ones, each in the order of their groups, oldest first. So nothing starves, and the
order is a function of the groups alone.

A group is returned when all its responses are complete, because rewards are compared within it. Until then its complete
responses wait for the slowest one, and age. So age belongs to the group:

    age(group, v) = v - version of the oldest token in any of its responses      (a group without tokens has no age)

The staleness bound. Let `max_age` = A and let the learner advance by at most `versions_per_run` = d between two runs.
Every group returned by a run at version v has age at most A, under either policy:

    - before sampling, a run gives up every group of age > A, so no group older than A is ever sampled or returned;
    - tokens sampled in the run have version v and age 0, so sampling makes no group older.

Under `drop` nothing else happens, and the bound holds whatever d is. Under `finish` a run also completes, regardless of
its token budget, each group that would be too old the next time, age + d > A. What stays parked has age + d <= A, so
at the next run its age is at most A and nothing is given up: `finish` wastes no token as long as d is honest. If the
learner outruns d the bound still holds, and the groups it outran are given up as under `drop` (and counted). With d > A
no group may be left half sampled, so every response that is started is completed in the same run; A = 0 is on-policy.
The bound holds when a group leaves the scheduler. Its tokens grow older while the group waits in the buffer.

Giving up a group. A group needs all of its responses for its baseline, and replacing one would favour short responses.
So if one response is dropped, its whole group is given up: every response is marked DROPPED, its tokens are counted as
wasted, and the caller gets the group in `Rollout.dropped` (to draw the problem again, or to see which problems are
lost: those with long responses). The group is never in `Rollout.groups`.

A run is made of four verbs. A caller that does not wait for its engines can call them itself:

    requests   say what to submit next, with its token budget; None when this run has nothing more to ask for
    accept     take in one segment of one request
    listen     take in what environments have answered, if there are any; those responses can be continued again
    take       return the groups that are finished and those given up; the next run begins

What an environment said has no version, and no number of tokens counts it. `rounds.run` is a run for callers that wait.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from bapo.environments.conversations import Conversations
from bapo.rollout.engine import Request, Sampling, Segment
from bapo.rollout.randomness import response_seed
from bapo.types import (
    Group,
    Problem,
    Record,
    Status,
    Trajectory,
    group_from_state,
    group_state,
    increased,
    nothing,
    refuse,
)


@dataclass(frozen=True)
class SchedulerMetrics:
    """What one run did (or all runs so far), and what it left behind; `bapo.runs.metrics` explains every field.

    In the totals, sampled = returned + held + wasted tokens at all times.
    """

    sampled_tokens: int = 0
    returned_tokens: int = 0
    wasted_tokens: int = 0
    finished_groups: int = 0
    dropped_groups: int = 0
    dropped: int = 0
    resumed: int = 0
    forced: int = 0
    parked: int = 0
    waiting: int = 0
    held_tokens: int = 0


@dataclass(frozen=True)
class Rollout:
    """What a run returns. Both lists are ordered by group id."""

    groups: list[Group]
    """Finished groups: every response is complete."""
    dropped: list[Group]
    """Groups given up: every response is DROPPED."""
    metrics: SchedulerMetrics
    causes: dict[int, str] = field(default_factory=dict)
    """Why groups were given up whose environment or grader failed, by id."""


class Work(NamedTuple):
    """Work for an engine."""

    requests: list[Request]
    token_budget: int | None
    """How many tokens the engine may sample for them; None for as many as they need."""


@dataclass
class _Run:
    """What one run must remember until `take`."""

    before: SchedulerMetrics
    """The totals when the run began."""
    begun: set[int]
    """Responses that had tokens when the run began, by id()."""
    forced: set[tuple[int, int]] = field(default_factory=set)
    """Turns asked for because their group is due. None comes twice."""
    tried: set[tuple[int, int]] = field(default_factory=set)
    """Turns asked for within the budget. None comes twice. Sampling them can make their groups due."""
    resumed: set[int] = field(default_factory=set)
    """Responses in `begun` that have been given tokens in this run."""


def new_group(
    id: int, problem: Problem, prompt_ids: Sequence[int], *, responses: int, seed: int, opened: bool = True
) -> Group:
    """A group of empty responses to one problem, each with its own seed, from (run seed, group id, index).

    `opened`: the prompt is complete, and no environment has to say something first.
    """
    refuse(
        (responses < 1, f"responses={responses} makes an empty group {id}. Set responses >= 1."),
        (
            opened and not prompt_ids,
            f"problem {problem.id!r} has no prompt tokens. Encode it with a beginning-of-sequence token.",
        ),
    )
    return Group(
        id=id,
        problem=problem,
        trajectories=[Trajectory(list(prompt_ids), response_seed(seed, id, index)) for index in range(responses)],
    )


@dataclass(eq=False)
class Scheduler:
    """Keeps the groups in progress and decides, run by run, which of their responses are continued."""

    sampling: Sampling
    _: KW_ONLY
    max_response_tokens: int
    token_budget: int | None = None
    """Tokens per run; with None, every response is completed in the first run after its admission."""
    max_age: int | None = None
    """The bound A of this module; None for no bound."""
    over_age: Literal["finish", "drop"] = "finish"
    versions_per_run: int = 1
    """The most updates between two runs."""
    record: Record = nothing
    """It is told which groups come and go."""
    conversations: Conversations | None = None
    """The environments beside the responses; None: every response has one turn."""

    def __post_init__(self) -> None:
        most, budget, versions = self.max_response_tokens, self.token_budget, self.versions_per_run
        refuse(
            (most < 1, f"max_response_tokens={most} allows no response. Set it to 1 or more."),
            (budget is not None and budget < 1, f"token_budget={budget} would never finish anything. Set 1 or more."),
            ((self.max_age or 0) < 0, f"max_age={self.max_age} is negative; 0 is on-policy. Set 0 or more, or None."),
            (self.over_age not in ("finish", "drop"), f"over_age={self.over_age!r} is neither 'finish' nor 'drop'."),
            (versions < 1, f"versions_per_run={versions}: the learner advances between runs. Set it to 1 or more."),
        )
        if self.conversations is not None:
            self.sampling = replace(self.sampling, stop_ids=self.conversations.ends)
        self._groups: dict[int, Group] = {}
        self._version: int | None = None
        self._next_id = self._next_request = 0
        self._totals = SchedulerMetrics()
        self._run: _Run | None = None
        self.under_way: dict[int, Trajectory] = {}
        """Responses by the id of the request that continues them."""

    def admit(self, groups: Iterable[Group]) -> None:
        """Take in new groups, which the next run may sample. Ids must increase: they are the order of admission."""
        for group in groups:
            who, last = f"group {group.id} (problem {group.problem.id!r})", self._next_id - 1
            begun = [t for t in group.trajectories if t.tokens or t.status is not Status.PARKED]
            refuse(
                (group.id <= last, f"{who} comes after group {last}. Number groups in the order they are drawn."),
                (not group.trajectories, f"{who} has no responses. Give it at least one."),
                (begun, f"{who} has responses that were begun. Only load_state_dict continues those."),
            )
            self._groups[group.id] = group
            self._next_id = group.id + 1
            self.record("admitted", group.id)
            if self.conversations is not None:
                self.conversations.admit([group])

    def listen(self, timeout: float) -> None:
        """Take in what environments have answered, and wait so long for the first answer at most."""
        if self.conversations is not None and self.conversations.busy:
            self.conversations.listen(timeout)

    def requests(self, version: int) -> Work | None:
        """What an engine with the weights of this version should do next, in this order; None if this run is done.

        Responses under way or with their environment are not asked for again. The first call after `take` begins a run
        and gives up the groups that are too old for it.
        """
        run = self._begin(version)
        due: list[Trajectory] = []  # of groups for which this run is the last chance
        if self.over_age == "finish":
            late = version + self.versions_per_run
            due = [t for group in self._groups.values() if self._too_old(group, late) for t in _parked(group)]
        chosen = [trajectory for trajectory in self.idle(due) if _turn(trajectory) not in run.forced]
        if chosen:
            run.forced |= set(map(_turn, chosen))
            self._count(forced=len(chosen))
            return Work([self._request(trajectory) for trajectory in chosen], None)
        idle = [trajectory for trajectory in self.idle(self.unfinished()) if _turn(trajectory) not in run.tried]
        run.tried |= set(map(_turn, idle))
        chosen = sorted(idle, key=lambda trajectory: not trajectory.tokens)
        sampled_tokens = self._totals.sampled_tokens - run.before.sampled_tokens
        left = None if self.token_budget is None else self.token_budget - sampled_tokens
        if chosen and (left is None or left > 0):
            return Work([self._request(trajectory) for trajectory in chosen], left)
        return None

    def accept(self, request: int, segment: Segment) -> list[Trajectory]:
        """Add what an engine sampled for one request to its response. Returns that if its environment is asked now."""
        if request not in self.under_way:
            raise RuntimeError(
                f"the engine returned a segment for request {request}, which is not under way. An engine must name "
                "requests that it was given, and return exactly one last segment for each."
            )
        trajectory = self.under_way[request]
        if segment.status is not None:
            del self.under_way[request]
        if trajectory.status is Status.DROPPED:  # its group was given up meanwhile, and stays so
            self._count(sampled_tokens=len(segment.tokens), wasted_tokens=len(segment.tokens))
            return []
        _append(trajectory, segment)
        ends: list[Trajectory] = []  # a turn
        if self.conversations is not None and trajectory.finished:
            self.conversations.ended(trajectory)
            ends.append(trajectory)
        if self._run is not None and segment.tokens:
            self._run.resumed |= {id(trajectory)} & self._run.begun
        self._count(sampled_tokens=len(segment.tokens))
        return ends

    def take(self) -> Rollout:
        """Return the groups that are finished and those given up, with what the run did. The next run may begin."""
        give_up(g for g in self._groups.values() if any(t.status is Status.DROPPED for t in g.trajectories))
        finished = self._take(Status.STOPPED, Status.TRUNCATED)
        dropped = self._take(Status.DROPPED)
        causes = {} if self.conversations is None else dict(self.conversations.causes)
        for event, groups in (("finished", finished), ("dropped", dropped)):
            for group in groups:
                self.record(event, group.id, **({"cause": causes[group.id]} if group.id in causes else {}))
        if self.conversations is not None:
            self.conversations.forget([*finished, *dropped])
        before = self._totals if self._run is None else self._run.before
        self._count(
            returned_tokens=_tokens(finished),
            wasted_tokens=_tokens(dropped),
            finished_groups=len(finished),
            dropped_groups=len(dropped),
            dropped=sum(len(group.trajectories) for group in dropped),
            resumed=0 if self._run is None else len(self._run.resumed),
        )
        self._run = None
        return Rollout(finished, dropped, self.since(before), causes)

    def begin(self, version: int) -> None:
        """Begin a run with the weights of this version, also if the last one failed on the way."""
        self._run, self.under_way = None, {}
        self._begin(version)

    def _begin(self, version: int) -> _Run:
        """The run under way. If there is none, it begins, and gives up the groups that are too old for it."""
        if self._version is not None and version < self._version:
            raise ValueError(
                f"version={version} is older than the last run's {self._version}, but versions never decrease along "
                "a response. Load the learner's current weights first."
            )
        if self._run is None:
            begun = {id(trajectory) for trajectory in self.idle(self.unfinished()) if trajectory.tokens}
            self._version, self._run = version, _Run(self._totals, begun)
            give_up(group for group in self._groups.values() if self._too_old(group, version))
        return self._run

    def _request(self, trajectory: Trajectory) -> Request:
        """A request to continue this response, which is under way from now on."""
        self._next_request += 1
        self.under_way[self._next_request] = trajectory
        left = self.max_response_tokens - len(trajectory.tokens)
        return Request(
            context=trajectory.context,
            position=len(trajectory.tokens),
            seed=trajectory.seed,
            max_new_tokens=left if self.conversations is None else self.conversations.room(trajectory),
            id=self._next_request,
        )

    def unfinished(self) -> list[Trajectory]:
        """Unfinished responses in the order of their groups, and within a group in the order of its responses."""
        return [trajectory for group in self._groups.values() for trajectory in _parked(group)]

    def idle(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """The trajectories that no engine is working on, and that do not wait for their environment."""
        under_way = {id(trajectory) for trajectory in self.under_way.values()}
        return [each for each in trajectories if id(each) not in under_way and not self.waits(each)]

    def waits(self, trajectory: Trajectory) -> bool:
        """Whether it waits for its environment."""
        return self.conversations is not None and self.conversations.waits(trajectory)

    def again(self, responses: Iterable[Trajectory]) -> list[Request]:
        """Requests to continue those of these that are unfinished, in the order of their groups."""
        wanted = {id(trajectory) for trajectory in responses}
        return [self._request(trajectory) for trajectory in self.idle(self.unfinished()) if id(trajectory) in wanted]

    def given_up(self, responses: Iterable[Trajectory]) -> list[Group]:
        """The groups of which one of these was given up."""
        gone = {id(trajectory) for trajectory in responses if trajectory.status is Status.DROPPED}
        return [g for g in self._groups.values() if gone and any(id(t) in gone for t in g.trajectories)]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens were sampled in all runs together."""
        return self._totals.sampled_tokens

    @property
    def in_progress(self) -> list[Group]:
        """The groups that are admitted and not yet returned or given up."""
        return list(self._groups.values())

    def totals(self) -> SchedulerMetrics:
        """The metrics of all runs together."""
        return replace(self._totals, **self._levels())

    def since(self, before: SchedulerMetrics) -> SchedulerMetrics:
        """What was done since the totals were these, and what there is now."""
        done = {name: value - getattr(before, name) for name, value in vars(self._totals).items()}
        return SchedulerMetrics(**done | self._levels())

    def bookmark(self) -> Callable[[], None]:
        """What takes this scheduler and its groups back to where they are now."""
        version, next_id, totals, groups = self._version, self._next_id, self._totals, dict(self._groups)
        marks = [trajectory.mark() for group in groups.values() for trajectory in group.trajectories]

        def back() -> None:
            self._version, self._next_id, self._totals, self._groups = version, next_id, totals, groups
            self._run, self.under_way = None, {}
            for mark in marks:
                mark()
            self._restart()

        return back

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what this scheduler does next, as plain JSON data. Settings are not included."""
        return {
            "version": self._version,
            "next_id": self._next_id,
            "totals": dict(vars(self._totals)),
            "groups": [group_state(group) for group in self._groups.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Whatever this scheduler held before is forgotten."""
        self._version = state["version"]
        self._next_id = state["next_id"]
        self._totals = SchedulerMetrics(**state["totals"])
        self._groups = {group.id: group for group in map(group_from_state, state["groups"])}
        self._run, self.under_way = None, {}
        self._restart()

    def _restart(self) -> None:
        """Begin the episodes of all groups in progress anew."""
        if self.conversations is not None:
            self.conversations.restart(self._groups.values())

    def _too_old(self, group: Group, version: int) -> bool:
        return self.max_age is not None and group.oldest is not None and version - group.oldest > self.max_age

    def _take(self, *statuses: Status) -> list[Group]:
        """Remove and return the groups whose responses all have one of these statuses."""
        taken = [g for g in self._groups.values() if all(t.status in statuses for t in g.trajectories)]
        for group in taken:
            del self._groups[group.id]
        return taken

    def _count(self, **more: int) -> None:
        self._totals = increased(self._totals, **more)

    def _levels(self) -> dict[str, int]:
        unfinished = self.unfinished()
        parked = sum(1 for trajectory in unfinished if trajectory.tokens)
        held = _tokens(self._groups.values())
        return {"parked": parked, "waiting": len(unfinished) - parked, "held_tokens": held}


def _parked(group: Group) -> list[Trajectory]:
    return [trajectory for trajectory in group.trajectories if trajectory.status is Status.PARKED]


def give_up(groups: Iterable[Group]) -> None:
    """Let no response of these groups be sampled any more. The next `take` returns them as dropped."""
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.status = Status.DROPPED


def _tokens(groups: Iterable[Group]) -> int:
    """How many tokens of these groups were sampled."""
    return sum(len(trajectory.versions) for group in groups for trajectory in group.trajectories)


def _turn(trajectory: Trajectory) -> tuple[int, int]:
    """Which turn of which response comes next: a response that was answered since is another turn."""
    return id(trajectory), len(trajectory.answers)


def _append(trajectory: Trajectory, segment: Segment) -> None:
    if segment.versions and trajectory.versions and segment.versions[0] < trajectory.versions[-1]:
        raise RuntimeError(
            f"the engine sampled with version {segment.versions[0]} after version {trajectory.versions[-1]}, but "
            "versions never decrease along a response. Load the newest weights before every run."
        )
    if trajectory.sampled:
        trajectory.sampled += [True] * len(segment.tokens)
    trajectory.tokens += segment.tokens
    trajectory.behavior_logprobs += segment.logprobs
    trajectory.entropies += segment.entropies
    trajectory.versions += segment.versions
    trajectory.log_kept += segment.log_kept
    if segment.status is not None:
        trajectory.status = segment.status
