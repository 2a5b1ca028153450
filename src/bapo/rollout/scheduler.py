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

Requests and groups are looked through only where something can have changed, so a cluster may call these verbs often.

A response that ended a turn gives its slot back, and its environment is asked while the engine samples others. `run`
waits for all answers before it submits again. So what is sampled together does not depend on how long an environment
takes. What it said has no version, and no number of tokens counts it.

Nothing here waits or runs in parallel: `run` returns when the engine has done its work.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from bapo.environments.conversations import Conversations
from bapo.rollout.engine import Engine, Request, Sampled, Sampling, Segment, TellSampled, sampled
from bapo.rollout.randomness import response_seed
from bapo.types import (
    Group,
    Problem,
    Record,
    Status,
    Trajectory,
    group_from_state,
    group_state,
    nothing,
    refuse,
)

ANSWER_SECONDS = 1.0
"""How long a run waits for environments before it tells how far it is."""


@dataclass
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


class Taken(NamedTuple):
    """The same without metrics, which look at every response."""

    groups: list[Group]
    dropped: list[Group]
    causes: dict[int, str]


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
    rested: bool = False
    """Whether it has asked for the responses that are not due. Sampling them can make their groups due."""
    forced: set[tuple[int, int, bool]] = field(default_factory=set)
    """Turns asked for because their group is due, each with what `rested` was then. None comes twice."""
    answered: dict[int, int] = field(default_factory=dict)
    """How many answers each response had when it was last asked for, by id(), since it has rested."""
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
        self._under_way: dict[int, Trajectory] = {}
        """Responses by the id of the request that continues them."""
        self._owners: dict[int, int] = {}
        """The id of each response's group, by id()."""
        self._nothing_idle = False
        """Whether no response has become idle since `requests` found none."""
        self._changed: set[int] = set()
        """Groups of which a response has ended since the last `take`."""

    def admit(self, groups: Iterable[Group]) -> None:
        """Take in new groups, which the next run may sample. Ids must increase: they are the order of admission."""
        self._nothing_idle = False
        for group in groups:
            who, last = f"group {group.id} (problem {group.problem.id!r})", self._next_id - 1
            begun = [t for t in group.trajectories if t.tokens or t.status is not Status.PARKED]
            refuse(
                (group.id <= last, f"{who} comes after group {last}. Number groups in the order they are drawn."),
                (not group.trajectories, f"{who} has no responses. Give it at least one."),
                (begun, f"{who} has responses that were begun. Only load_state_dict continues those."),
            )
            self._groups[group.id] = group
            self._owners |= {id(trajectory): group.id for trajectory in group.trajectories}
            self._next_id = group.id + 1
            self.record("admitted", group.id)
            if self.conversations is not None:
                self.conversations.admit([group])

    def run(self, engine: Engine, *, tell: TellSampled | None = None) -> Rollout:
        """Continue the admitted responses within the budget and return the groups that became complete.

        If the engine raises, nothing is lost: every response keeps the tokens that were collected. `tell` is called
        with how far the run is.
        """
        self._forget_requests()  # of a run that failed
        before = self._begin(engine.version).before.sampled_tokens
        asked = len(self._unfinished())

        def report() -> None:
            if tell is not None:
                tell(Sampled(asked - len(self._unfinished()), asked, self._totals.sampled_tokens - before))

        while True:
            while self.listen(ANSWER_SECONDS):
                report()
            if (work := self.requests(engine.version)) is None:
                return self.take()
            report()
            for collected in sampled(engine, work.requests, self.sampling, token_budget=work.token_budget):
                for request, segment in collected:
                    self.accept(request, segment)
                report()

    def listen(self, timeout: float) -> bool:
        """Take in what environments have answered, and wait so long for it at most. Whether more answers will come."""
        if self.conversations is None or not self.conversations.busy:
            return False
        self._nothing_idle = False
        self.conversations.listen(timeout)
        return self.conversations.busy

    def requests(self, version: int) -> Work | None:
        """What an engine with the weights of this version should do next, in this order; None if this run is done.

        Responses under way or with their environment are not asked for again. The first call after `take` begins a run
        and gives up the groups that are too old for it.
        """
        if self._nothing_idle and self.max_age is None:
            return None
        run = self._begin(version)
        due: list[Trajectory] = []  # of groups for which this run is the last chance
        if self.over_age == "finish":
            late = version + self.versions_per_run
            due = [t for group in self._groups.values() if self._too_old(group, late) for t in _parked(group)]
        chosen = [t for t in self._idle(due) if (*_turn(t), run.rested) not in run.forced]
        if chosen:
            run.forced |= {(*_turn(trajectory), run.rested) for trajectory in chosen}
            self._count(forced=len(chosen))
            return Work([self._request(trajectory) for trajectory in chosen], None)
        idle = self._idle(self._unfinished())
        self._nothing_idle = not idle
        if run.rested:
            idle = [t for t in idle if len(t.answers) > run.answered.get(id(t), len(t.answers))]
            if not idle:
                return None
        run.rested = True
        run.answered |= {id(t): len(t.answers) for t in (self._unfinished() if not run.answered else idle)}
        chosen = sorted(idle, key=lambda trajectory: not trajectory.tokens)
        sampled_tokens = self._totals.sampled_tokens - run.before.sampled_tokens
        left = None if self.token_budget is None else self.token_budget - sampled_tokens
        if chosen and (left is None or left > 0):
            return Work([self._request(trajectory) for trajectory in chosen], left)
        return self.requests(version)

    def accept(self, request: int, segment: Segment) -> None:
        """Add what an engine sampled for one request to its response."""
        if request not in self._under_way:
            raise RuntimeError(
                f"the engine returned a segment for request {request}, which is not under way. An engine must name "
                "requests that it was given, and return exactly one last segment for each."
            )
        trajectory = self._under_way[request]
        if segment.status is not None:
            del self._under_way[request]
            self._changed.add(self._owners.get(id(trajectory), -1))  # maybe it was given up and has left
            self._nothing_idle &= segment.status is not Status.PARKED
        if trajectory.status is Status.DROPPED:  # its group was given up meanwhile, and stays so
            self._count(sampled_tokens=len(segment.tokens), wasted_tokens=len(segment.tokens))
            return
        _append(trajectory, segment)
        if self.conversations is not None and trajectory.finished:
            self.conversations.ended(trajectory)
        if self._run is not None and segment.tokens:
            self._run.resumed |= {id(trajectory)} & self._run.begun
        self._count(sampled_tokens=len(segment.tokens))

    def take(self) -> Rollout:
        """Return the groups that are finished and those given up, with what the run did. The next run may begin."""
        before = replace(self._totals) if self._run is None else self._run.before
        groups, dropped, causes = self.take_groups()
        return Rollout(groups, dropped, self.since(before), causes)

    def take_groups(self) -> Taken:
        """Return the groups that are finished and those given up. The next run may begin."""
        everywhere = self.conversations is not None or self.max_age is not None
        changed = sorted(self._groups) if everywhere else sorted(self._changed & self._groups.keys())
        self._changed.clear()
        looked_at = [self._groups[id] for id in changed]
        _give_up(g for g in looked_at if any(t.status is Status.DROPPED for t in g.trajectories))
        finished = self._take(looked_at, Status.STOPPED, Status.TRUNCATED)
        dropped = self._take(looked_at, Status.DROPPED)
        causes = {} if self.conversations is None else dict(self.conversations.causes)
        for event, groups in (("finished", finished), ("dropped", dropped)):
            for group in groups:
                self.record(event, group.id, **({"cause": causes[group.id]} if group.id in causes else {}))
        if self.conversations is not None:
            self.conversations.forget([*finished, *dropped])
        self._count(
            returned_tokens=_tokens(finished),
            wasted_tokens=_tokens(dropped),
            finished_groups=len(finished),
            dropped_groups=len(dropped),
            dropped=sum(len(group.trajectories) for group in dropped),
            resumed=0 if self._run is None else len(self._run.resumed),
        )
        self._run = None
        return Taken(finished, dropped, causes)

    def _begin(self, version: int) -> _Run:
        """The run under way. If there is none, it begins, and gives up the groups that are too old for it."""
        if self._version is not None and version < self._version:
            raise ValueError(
                f"version={version} is older than the last run's {self._version}, but versions never decrease along "
                "a response. Load the learner's current weights first."
            )
        if self._run is None:
            begun = {id(trajectory) for trajectory in self._idle(self._unfinished()) if trajectory.tokens}
            self._version, self._run = version, _Run(replace(self._totals), begun)
            _give_up(group for group in self._groups.values() if self._too_old(group, version))
        return self._run

    def _request(self, trajectory: Trajectory) -> Request:
        """A request to continue this response, which is under way from now on."""
        self._next_request += 1
        self._under_way[self._next_request] = trajectory
        left = self.max_response_tokens - len(trajectory.tokens)
        return Request(
            context=trajectory.context,
            position=len(trajectory.tokens),
            seed=trajectory.seed,
            max_new_tokens=left if self.conversations is None else self.conversations.room(trajectory),
            id=self._next_request,
        )

    @property
    def in_progress(self) -> list[Group]:
        """The groups that are admitted and not yet returned or given up."""
        return list(self._groups.values())

    @property
    def sampled_tokens(self) -> int:
        """How many tokens all runs have sampled together."""
        return self._totals.sampled_tokens

    def totals(self) -> SchedulerMetrics:
        """The metrics of all runs together."""
        return replace(self._totals, **self._levels())

    def since(self, before: SchedulerMetrics) -> SchedulerMetrics:
        """What was done since the totals were these, and what there is now."""
        done = {name: value - getattr(before, name) for name, value in vars(self._totals).items()}
        return SchedulerMetrics(**done | self._levels())

    def bookmark(self) -> Callable[[], None]:
        """What takes this scheduler and its groups back to where they are now."""
        version, next_id, totals, groups = self._version, self._next_id, replace(self._totals), dict(self._groups)
        marks = [trajectory.mark() for group in groups.values() for trajectory in group.trajectories]

        def back() -> None:
            self._version, self._next_id, self._totals, self._groups = version, next_id, totals, groups
            self._forget_requests()
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
        self._forget_requests()
        self._restart()

    def _restart(self) -> None:
        """Begin the episodes of all groups in progress anew."""
        if self.conversations is not None:
            self.conversations.restart(self._groups.values())

    def _unfinished(self) -> list[Trajectory]:
        """Unfinished responses in the order of their groups, and within a group in the order of its responses."""
        return [trajectory for group in self._groups.values() for trajectory in _parked(group)]

    def _idle(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """The trajectories that no engine is working on, and that do not wait for their environment."""
        under_way = {id(trajectory) for trajectory in self._under_way.values()}
        idle = [trajectory for trajectory in trajectories if id(trajectory) not in under_way]
        return idle if self.conversations is None else [t for t in idle if not self.conversations.waits(t)]

    def _too_old(self, group: Group, version: int) -> bool:
        return self.max_age is not None and group.oldest is not None and version - group.oldest > self.max_age

    def _take(self, groups: Iterable[Group], *statuses: Status) -> list[Group]:
        """Remove and return those of these groups whose responses all have one of these statuses."""
        taken = [g for g in groups if all(t.status in statuses for t in g.trajectories)]
        for group in taken:
            del self._groups[group.id]
            for trajectory in group.trajectories:
                del self._owners[id(trajectory)]
        return taken

    def _count(self, **more: int) -> None:
        for name, value in more.items():
            setattr(self._totals, name, getattr(self._totals, name) + value)

    def _forget_requests(self) -> None:
        self._run, self._under_way, self._nothing_idle = None, {}, False
        self._changed = set(self._groups)
        self._owners = {id(t): group.id for group in self._groups.values() for t in group.trajectories}

    def _levels(self) -> dict[str, int]:
        unfinished = self._unfinished()
        parked = sum(1 for trajectory in unfinished if trajectory.tokens)
        held = _tokens(self._groups.values())
        return {"parked": parked, "waiting": len(unfinished) - parked, "held_tokens": held}


def _parked(group: Group) -> list[Trajectory]:
    return [trajectory for trajectory in group.trajectories if trajectory.status is Status.PARKED]


def _give_up(groups: Iterable[Group]) -> None:
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
