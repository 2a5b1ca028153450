"""Sampling and learning as events in time: the loops that tools/async_schedule.py compares, without a model.

Engines. A decoding step of an engine with n running responses takes 1 / alone + n / saturated seconds, because the
weights are read once for all responses and the keys once for each. A response that starts or resumes is prefilled
first, and the engine decodes nothing meanwhile. A response goes to the engine with the fewest responses, if it has a
free slot.

The asynchronous loop is the one of bapo.train.cluster.loop. With u updates per rollout and the staleness bound S:

    window      `prompts` groups; window k opens when the updates on rollout k - 1 - ahead are done
    rollout k   whole when as many groups have finished as windows 0..k admitted, and no group in flight is due. It
                takes its share of them in the order in which they finished, and every group that is due. At version v,
                a group whose oldest token has version o is due if (v + u) + (u - 1) - o > S: with the next rollout it
                would be too old. The learner waits for groups that are due and drops none.
    weights     move to the engines after the updates on a rollout, to each by itself (or, `rolling`, to one after the
                other). An engine parks its responses, loads, and prefills them again. It starts new responses only with
                the newest weights.

So ahead = 0 is the synchronous loop. `synchronous` plays that one independently, also `together` (the same GPUs sample
and learn in turns) and with a token budget (partial rollout). A test compares the two.

What is left out: groups without a signal, scoring, evaluations, checkpoints and faults.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Lengths = list[list[int]]  # tokens of each response of each group, in the order of admission
SLACK = 1e-6  # tokens by which a response may seem incomplete, because of rounding


@dataclass(frozen=True)
class Setting:
    """What is simulated. Speeds are in tokens per second."""

    prompts: int = 64
    responses: int = 8
    steps: int = 40
    batches: int = 4
    """Updates in one pass over a rollout."""
    passes: int = 1
    ahead: int = 1
    staleness: int = 16
    engines: int = 4
    slots: int = 128
    """Responses that an engine runs side by side."""
    alone: float = 150.0
    """Speed of a response that is alone on its engine."""
    saturated: float = 12_000.0
    """Speed that an engine tends to as more responses run on it."""
    prefill: float = 25_000.0
    prompt_tokens: int = 200
    learn: float = 26_000.0
    """Tokens that all learners together train on per second."""
    update_seconds: float = 0.5
    """What an update takes beside its tokens."""
    gather_seconds: float = 1.0
    """What the learner takes to give out its weights, once per rollout."""
    load_seconds: float = 2.0
    """What one engine takes to load them."""
    rolling: bool = False
    """Whether engines load one after the other. Otherwise each loads by itself, at the same time."""
    budget: int | None = None
    """Partial rollout: tokens per step, in the synchronous loop only. It is checked whenever a response completes."""

    @property
    def updates(self) -> int:
        return self.passes * self.batches

    def check(self) -> None:
        needed = (self.ahead + 1) * self.updates - 1
        if self.staleness < needed:
            raise ValueError(
                f"staleness={self.staleness} is too small: with ahead={self.ahead} and {self.updates} updates per "
                f"rollout, groups that finish on time grow {needed} updates old. Set staleness >= {needed}, or lower "
                "ahead, batches or passes."
            )


@dataclass(frozen=True)
class Outcome:
    """What a loop did."""

    setting: Setting
    seconds: float
    rollouts: list[list[int]]
    """The groups of each rollout, by number."""
    tokens: int
    """Response tokens in them."""
    engines_idle: float
    """Share of the time in which an engine does nothing, a mean over engines."""
    slots_used: float
    """Share of the slots that hold a response, a mean over time and engines."""
    learner_idle: float
    waited_for_due: float
    """Seconds in which the learner waited only for groups that would have become too old."""
    staleness_mean: float
    """Over all tokens of all updates."""
    staleness_max: int
    late: float
    """Share of the groups that are used after the rollout of their own window."""
    latest: int
    """By how many rollouts, at most."""

    @property
    def step_seconds(self) -> float:
        """Seconds per `prompts` groups: partial rollout finishes fewer than that in a step."""
        groups = sum(len(rollout) for rollout in self.rollouts)
        return self.seconds * self.setting.prompts / max(1, groups)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(eq=False)
class _Response:
    group: _Group
    length: int
    done: float = 0.0
    """Tokens it had when its engine last started it; in the end, its length."""
    marks: list[tuple[int, float]] = field(default_factory=list)
    """(version, tokens that came before it)."""

    def sampled_by(self, version: int, done: float) -> None:
        """From this token on, this version samples it."""
        if self.marks and self.marks[-1][1] == done:
            self.marks.pop()
        self.marks.append((version, done))

    def parts(self) -> Iterable[tuple[int, float]]:
        """(version, tokens that it sampled)."""
        ends = [begin for _, begin in self.marks[1:]] + [float(self.length)]
        return ((version, end - begin) for (version, begin), end in zip(self.marks, ends, strict=True))


class _Group:
    """The responses to one prompt."""

    def __init__(self, id: int, lengths: Sequence[int]) -> None:
        self.id = id
        self.responses = [_Response(self, length) for length in lengths]
        self.left = len(lengths)

    @property
    def oldest(self) -> int | None:
        """Version of its oldest token; None without tokens."""
        return min((response.marks[0][0] for response in self.responses if response.marks), default=None)


class _Engine:
    """Decodes all its responses at the same speed, so they share one count of decoding steps."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.version = 0
        self.running: list[tuple[float, int, _Response]] = []  # a heap: (count at its end, tie-breaker, response)
        self.waiting: list[_Response] = []  # given to this engine before it has the newest weights
        self.count, self.time, self.stalled = 0.0, 0.0, 0.0
        self.busy, self.held, self.sampled, self._started = 0.0, 0.0, 0.0, 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def _speed(self) -> float:
        return 1 / (1 / self.setting.alone + len(self.running) / self.setting.saturated)

    def stall(self, seconds: float) -> None:
        self.stalled = max(self.time, self.stalled) + seconds

    def start(self, response: _Response) -> None:
        response.sampled_by(self.version, response.done)
        self.stall((self.setting.prompt_tokens + response.done) / self.setting.prefill)
        self._started += 1
        heapq.heappush(self.running, (self.count + response.length - response.done, self._started, response))

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        return max(self.time, self.stalled) + max(0.0, self.running[0][0] - self.count) / self._speed()

    def advance(self, time: float) -> None:
        begun = min(time, max(self.time, self.stalled))
        self.busy += (time if self.running else begun) - self.time
        self.held += self.load * (time - self.time)
        steps = (time - begun) * self._speed()
        self.count += steps
        self.sampled += steps * len(self.running)
        self.time = time

    def completed(self) -> list[_Group]:
        """Let go of the responses that are complete. Return the groups that are complete with them."""
        groups = []
        while self.running and self.running[0][0] <= self.count + SLACK:
            response = heapq.heappop(self.running)[2]
            response.done = float(response.length)
            response.group.left -= 1
            groups += [] if response.group.left else [response.group]
        return groups

    def reload(self, version: int) -> None:
        """Park, load, resume: what runs is prefilled again, what waits begins."""
        self.version = version
        self.stall(self.setting.load_seconds)
        for end, _, response in self.running:
            done = response.length - (end - self.count)
            response.sampled_by(version, done)
            self.stall((self.setting.prompt_tokens + done) / self.setting.prefill)
        waiting, self.waiting = self.waiting, []
        for response in waiting:
            self.start(response)

    def park(self) -> None:
        for end, _, response in self.running:
            response.done = response.length - (end - self.count)
        self.running = []


def _assign(queue: deque[_Response], engines: Sequence[_Engine], newest: int) -> None:
    while queue:
        engine = min(engines, key=lambda engine: engine.load)
        if engine.load >= engine.setting.slots:
            return
        response = queue.popleft()
        if engine.version == newest:
            engine.start(response)
        else:
            engine.waiting.append(response)


class _Books:
    """What was trained on, when, and how old it was."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rollouts: list[list[int]] = []
        self.tokens, self.trained, self.aged, self.oldest, self.busy = 0, 0.0, 0.0, 0, 0.0

    def train(self, groups: list[_Group], version: int) -> tuple[int, float]:
        """Take the updates on a rollout. Return how many there are and how long they take."""
        s, size = self.setting, len(groups)
        batches = min(s.batches, max(1, math.floor(size * s.batches / s.prompts + 0.5))) if groups else 0
        seconds = s.gather_seconds + s.passes * batches * s.update_seconds if groups else 0.0
        for index, group in enumerate(groups):
            length = sum(response.length for response in group.responses)
            self.tokens += length
            seconds += s.passes * (length + s.prompt_tokens * len(group.responses)) / s.learn
            for a_pass in range(s.passes):
                used = version + a_pass * batches + index * batches // size
                self._age(group, used)
        self.rollouts.append([group.id for group in groups])
        self.busy += seconds
        return s.passes * batches, seconds

    def _age(self, group: _Group, used: int) -> None:
        for response in group.responses:
            for version, tokens in response.parts():
                self.trained += tokens
                self.aged += tokens * (used - version)
                self.oldest = max(self.oldest, used - version)

    def outcome(self, engines: Sequence[_Engine], seconds: float, waited: float) -> Outcome:
        s, whole = self.setting, max(seconds, 1e-9) * len(engines)
        lateness = [k - id // s.prompts for k, rollout in enumerate(self.rollouts) for id in rollout]
        return Outcome(
            setting=s,
            seconds=seconds,
            rollouts=self.rollouts,
            tokens=self.tokens,
            engines_idle=1 - sum(engine.busy for engine in engines) / whole,
            slots_used=sum(engine.held for engine in engines) / (whole * s.slots),
            learner_idle=1 - self.busy / max(seconds, 1e-9),
            waited_for_due=waited,
            staleness_mean=self.aged / max(1.0, self.trained),
            staleness_max=self.oldest,
            late=sum(late > 0 for late in lateness) / max(1, len(lateness)),
            latest=max([0, *lateness]),
        )


class _Asynchronous:
    """The asynchronous loop, event by event. Nothing here waits except the learner, for a whole rollout."""

    def __init__(self, setting: Setting, lengths: Lengths) -> None:
        setting.check()
        self.s, self.books = setting, _Books(setting)
        self.engines = [_Engine(setting) for _ in range(setting.engines)]
        self.groups = [_Group(id, group) for id, group in enumerate(lengths)]
        self.queue: deque[_Response] = deque()
        self.flying: dict[int, _Group] = {}
        self.ready: list[_Group] = []
        self.time = self.waited = 0.0
        self.version = self.newest = self.windows = self.rollout = self.finished = self.taking = self.taken = 0
        self.learned, self.next_load = math.inf, 0.0

    def run(self) -> Outcome:
        for _ in range(1 + self.s.ahead):
            self._open_window()
        while self.rollout < self.s.steps:
            _assign(self.queue, self.engines, self.newest)
            self._begin_updates()
            self._next_event()
        return self.books.outcome(self.engines, self.time, self.waited)

    def _open_window(self) -> None:
        if self.windows < self.s.steps:
            opened = self.groups[self.windows * self.s.prompts : (self.windows + 1) * self.s.prompts]
            self.flying |= {group.id: group for group in opened}
            self.queue.extend(response for group in opened for response in group.responses)
            self.windows += 1

    def _enough(self) -> bool:
        return self.finished >= (self.rollout + 1) * self.s.prompts

    def _due(self) -> bool:
        return any(self._is_due(group) for group in self.flying.values())

    def _is_due(self, group: _Group) -> bool:
        last, oldest = self.version + 2 * self.s.updates - 1, group.oldest
        return oldest is not None and last - oldest > self.s.staleness

    def _begin_updates(self) -> None:
        if self.learned == math.inf and self._enough() and not self._due():
            share = (self.rollout + 1) * self.s.prompts - self.taken
            taken = [group for place, group in enumerate(self.ready) if place < share or self._is_due(group)]
            self.ready = [group for group in self.ready if group not in taken]
            self.taken += len(taken)
            taken.sort(key=lambda group: group.id)
            self.taking, seconds = self.books.train(taken, self.version)
            self.learned = self.time + seconds

    def _next_event(self) -> None:
        behind = [engine for engine in self.engines if engine.version < self.newest]
        loads = max(self.time, self.next_load) if behind else math.inf
        time = min(self.learned, loads, *(engine.next_end() for engine in self.engines))
        if self.learned == math.inf and self._enough():
            self.waited += time - self.time
        self.time = time
        for engine in self.engines:
            engine.advance(time)
            for group in engine.completed():
                self.finished += 1
                self.ready.append(self.flying.pop(group.id))
        if behind and time >= loads:
            for engine in behind[:1] if self.s.rolling else behind:
                engine.reload(self.newest)
            self.next_load = time + self.s.load_seconds
        if time >= self.learned:
            self.learned, self.version = math.inf, self.version + self.taking
            self.newest, self.rollout = self.version, self.rollout + 1
            self._open_window()


def asynchronous(setting: Setting, lengths: Lengths) -> Outcome:
    """Rollout engines and learners apart; sampling runs `ahead` rollouts ahead of learning."""
    return _Asynchronous(setting, lengths).run()


def synchronous(setting: Setting, lengths: Lengths, *, together: bool = False) -> Outcome:
    """Sampling and learning take turns. `together`: in the same processes, so weights need only be gathered."""
    s, books = setting, _Books(setting)
    engines = [_Engine(s) for _ in range(s.engines)]
    groups = deque(_Group(id, group) for id, group in enumerate(lengths[: s.steps * s.prompts]))
    time, version, open_groups = 0.0, 0, list[_Group]()
    for step in range(s.steps):
        room = s.prompts if s.budget is None else min(s.prompts, 2 * s.prompts - len(open_groups))
        open_groups += [groups.popleft() for _ in range(min(room, len(groups)))]
        for number, engine in enumerate(engines):
            engine.version = version
            if step > 0 and not together:
                turn = number * s.load_seconds if s.rolling else 0.0
                engine.stall(turn + s.load_seconds)
                engine.busy -= turn  # it waits
        time = _sample(engines, open_groups, version, time)
        done = [group for group in open_groups if not group.left]
        open_groups = [group for group in open_groups if group.left]
        taken, seconds = books.train(done, version)
        version, time = version + taken, time + seconds
        for engine in engines:
            engine.advance(time)
            engine.busy += seconds if together else 0.0
    return books.outcome(engines, time, 0.0)


def _sample(engines: list[_Engine], groups: list[_Group], version: int, time: float) -> float:
    """One sampling phase: groups that would become too old, then parked ones, then new ones. Return when it ends."""
    s = engines[0].setting
    largest_age = s.staleness - (s.updates - 1)  # what stays parked must not be older at the next run
    due = [group for group in groups if group.oldest is not None and version - group.oldest + s.updates > largest_age]
    forced = _unfinished(due)
    rest = _unfinished(group for group in groups if group not in due)
    queue = deque(forced + sorted(rest, key=lambda response: not response.marks))
    before = sum(engine.sampled for engine in engines)
    while True:
        _assign(queue, engines, version)
        ends = min(engine.next_end() for engine in engines)
        if ends == math.inf:
            return time
        time = ends
        for engine in engines:
            engine.advance(time)
            engine.completed()
        spent = s.budget is not None and sum(engine.sampled for engine in engines) - before >= s.budget
        if spent and all(response.done >= response.length for response in forced):
            for engine in engines:
                engine.park()
            return time


def _unfinished(groups: Iterable[_Group]) -> list[_Response]:
    return [response for group in groups for response in group.responses if response.done < response.length]
