"""Rewards by functions of the user's own: in this process, or in processes that they can harm and the run survives.

A function is named as `module:function`, and is plain or async:

    def reward(response, answer):
        return float(answer in response)

It is called with those of the following keywords that it names, or with all of them if it takes **kwargs:

    response    the text of the response, without its stop token
    answer      the problem's ground truth
    prompt      the problem's prompt: text, or chat messages
    extra       the other columns of its data set, as a dict

It returns a number, a bool, or a dict with "reward" (and, for majority votes, "answer"). Functions written for TRL and
verl are called as these do, and return what these expect. Anything else counts as a failure of the verifier, not as a
reward of 0: another type, a NaN, a number too large for float32, an exception, `sys.exit()`. Only Ctrl-C passes
through.

FunctionReward calls the function in our process: a plain one for one response after the other (TRL's for one group
after the other), without a time limit, and nothing protects the process from a crash in it. Async functions, such as
calls to a judge model, run concurrently in one event loop, at most `concurrency` at a time with `seconds` each. The
loop lives as long as the reward, so clients that the function keeps between calls stay valid. asyncio stops the whole
loop if a task that the function started itself calls `sys.exit()`. Then every response without a score yet is a
failure.

IsolatedReward does the same in a process that never forks: an async function has one, a plain one as many as `workers`.
A process that dies, hangs or needs too much memory is replaced, and the response that it was lost with is a failure. If
there were several, halves of them are asked about again, until it is known which one it was.

Several threads may ask for scores at once. A plain function in our process then serves one after the other. The calls
of an async one run beside each other in its loop, which one of those who wait drives until its own calls are done. An
isolated process may be lost to several callers together. Then each asks again for what is left, alone.
"""

from __future__ import annotations

import asyncio
import numbers
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from bapo.process.limited import GRACE_SECONDS, CannotStart, Lost, Worker
from bapo.process.limited_worker import describe
from bapo.process.stops import StopAsked
from bapo.tasks.task import followed
from bapo.tasks.verify.finding import Signature, Style, arguments_of, find_function, is_async, judged, unharmed
from bapo.tasks.verify.sandbox import Pool
from bapo.types import LARGEST_REWARD, Problem, ResponseText, Score

LOOK_SECONDS = 0.05
"""How often a thread that waits for its calls looks whether it must drive the loop."""
DOES_NOT_APPLY = "the reward function returned None: it does not apply"
"""The failure of a response to which a function of TRL gives no reward. In a sum of several, it has no part then."""


class Call(NamedTuple):
    """What a function is called for."""

    places: list[int]
    """Which responses they are."""
    problem: Problem
    texts: list[str]
    """One response, or all to one problem if the function takes lists."""

    def alone(self) -> list[Call]:
        """A call for each response."""
        return [Call([place], self.problem, [text]) for place, text in zip(self.places, self.texts, strict=True)]


class _Job:
    """What one caller asks of an async function."""

    def __init__(self, left: dict[int, Call], known: Callable[[Call, list[Score]], None]) -> None:
        self.left, self.known = left, known
        self.over, self.stopped, self.cause = threading.Event(), False, ""
        self.task: asyncio.Task[None] | None = None


class _Visit:
    """A caller's stay with an isolated process."""

    def __init__(self, *, alone: bool, shared: bool) -> None:
        self.alone, self.shared, self.lost = alone, shared, False


class _Gate:
    """Lets callers in beside each other, or one alone."""

    def __init__(self) -> None:
        self._changed, self._inside, self._waiting = threading.Condition(), list[_Visit](), 0

    @contextmanager
    def entered(self, *, alone: bool) -> Iterator[_Visit]:
        """Inside, a visit that knows whether anybody else was there during it."""
        with self._changed:
            self._waiting += alone
            try:
                free = (lambda: not self._inside) if alone else (lambda: not self._closed)
                self._changed.wait_for(free)
            finally:
                self._waiting -= alone
            visit = _Visit(alone=alone, shared=bool(self._inside))
            for other in self._inside:
                other.shared = True
            self._inside.append(visit)
        try:
            yield visit
        finally:
            with self._changed:
                self._inside.remove(visit)
                self._changed.notify_all()

    @property
    def _closed(self) -> bool:
        return self._waiting > 0 or any(visit.alone for visit in self._inside)


class _Found:
    """The scores that are known so far, and the calls that are left. Where one for several fails, each is left."""

    def __init__(self, signature: Signature, responses: Sequence[tuple[Problem, str]]) -> None:
        self.scores, self.left = [Score(None)] * len(responses), list[Call]()
        self._follower = followed(len(responses))
        for place, (problem, text) in enumerate(responses):
            if signature.style == "trl" and self.left and self.left[-1].problem is problem:
                self.left[-1].places.append(place)
                self.left[-1].texts.append(text)
            else:
                self.left.append(Call([place], problem, [text]))

    def known(self, call: Call, scores: Sequence[Score]) -> list[Call]:
        """Take in the scores of a call. Returns the calls to make in its place."""
        if len(scores) > 1 and all(score.reward is None and score.failure != DOES_NOT_APPLY for score in scores):
            return call.alone()
        for place, score in zip(call.places, scores, strict=True):
            self.scores[place] = self._follower.known(score)
        return []


class FunctionReward:
    """Scores responses with a function of the user's own."""

    def __init__(self, name: str, *, concurrency: int = 32, seconds: float = 60.0, retries: int = 0) -> None:
        self.name, self.concurrency, self.seconds, self.retries = name, concurrency, seconds, retries
        self._function = find_function(name)
        self.signature = judged(name, self._function)
        self.is_async = is_async(self._function)
        self._runner, self._places = asyncio.Runner(), asyncio.Semaphore(concurrency)
        self._finalizer = weakref.finalize(self, self._runner.close)
        self._alone = threading.Lock()
        """Held by whoever calls the plain function, or drives the loop of the async one."""
        self._making = threading.Lock()
        """Held while the loop may be made: two callers at once would make two, and one of them would never run."""
        self._jobs: set[_Job] = set()
        self.passes: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
        """What is not a failure of a response."""

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score that the function gives each response, in order. No response text makes it raise."""
        found = _Found(self.signature, responses)
        while calls := found.left:
            found.left = []
            self.each(calls, lambda call, scores: found.left.extend(found.known(call, scores)))
        return found.scores

    def each(self, calls: Sequence[Call], known: Callable[[Call, list[Score]], None]) -> None:
        """Make every call, and tell its scores as soon as they are known. Nothing but `known` makes it raise."""
        if not self.is_async:
            with self._alone:
                for call in calls:
                    known(call, self._call(call))
            return
        job = _Job(dict(enumerate(calls)), known)
        with self._making:
            loop = self._runner.get_loop()
        loop.call_soon_threadsafe(self._begin, job)
        while not job.over.is_set():
            if self._alone.acquire(blocking=False):
                try:
                    self._drive(job)
                finally:
                    self._alone.release()
            else:
                job.over.wait(LOOK_SECONDS)
        if job.stopped:
            raise StopAsked
        for call in job.left.values():
            known(call, [Score(None, job.cause)] * len(call.texts))

    def close(self) -> None:
        """Close the event loop. Does nothing the second time."""
        self._finalizer()

    def _call(self, call: Call) -> list[Score]:
        cause = ""
        for wait in self._waits():
            if wait:
                time.sleep(wait)
            try:
                with unharmed():
                    returned = self._function(**arguments_of(self.signature, call.problem, call.texts))
                    return _scores(self.signature.style, returned, len(call.texts))
            except self.passes:
                raise
            except BaseException as error:
                cause = describe(error)
        return [Score(None, cause)] * len(call.texts)

    def _drive(self, job: _Job) -> None:
        """Let the loop work until this job is over, and the others with it."""
        try:
            with unharmed():
                self._runner.run(_over(job))
        except self.passes:
            self._runner.run(_end_other_tasks())
            raise
        except BaseException as error:  # of a task that the function started
            for each in self._jobs:
                each.cause = describe(error)
            self._runner.run(_end_other_tasks())

    def _begin(self, job: _Job) -> None:
        """On the loop: begin the calls of a job."""

        def end(task: asyncio.Task[None]) -> None:
            self._jobs.discard(job)
            job.over.set()
            if not task.cancelled():
                task.exception()  # it is known

        self._jobs.add(job)
        job.task = asyncio.get_running_loop().create_task(self._all(job))
        job.task.add_done_callback(end)

    async def _all(self, job: _Job) -> None:
        """Make the calls that are left, which become fewer."""

        async def one(index: int, call: Call) -> None:
            async with self._places:
                if job.stopped:
                    return
                scores = await self._call_async(call)
                del job.left[index]
                try:
                    job.known(call, scores)
                except StopAsked:  # asyncio would let it escape from the loop, and forget the other calls
                    job.stopped = True
                    assert job.task is not None
                    job.task.cancel()

        await asyncio.gather(*(one(index, call) for index, call in job.left.items()))

    async def _call_async(self, call: Call) -> list[Score]:
        cause, seconds = "", self.seconds * len(call.texts)
        for wait in self._waits():
            try:
                if wait:
                    await asyncio.sleep(wait)
                async with asyncio.timeout(seconds) as limit:
                    returned = await self._function(**arguments_of(self.signature, call.problem, call.texts))
                    return _scores(self.signature.style, returned, len(call.texts))
            except TimeoutError as error:
                cause = f"timeout after {seconds:g} s" if limit.expired() else describe(error)
            except self.passes:
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # by Ctrl-C, not by the function
                    raise
                cause = describe(error)
        return [Score(None, cause)] * len(call.texts)

    def _waits(self) -> list[int]:
        return waits(self.retries)


def waits(retries: int) -> list[int]:
    """The seconds before each try: none, then 1, 2, 4 and so on."""
    return [0, *(2**retry for retry in range(retries))]


class IsolatedReward(Pool):
    """Scores responses with a function of the user's own, in processes that it can harm and the run survives."""

    def __init__(
        self, name: str, *, workers: int | None = None, seconds: float = 60.0, retries: int = 0, memory_mb: int = 2048
    ) -> None:
        options: dict[str, Any] = {"name": name, "concurrency": workers or 32, "seconds": seconds, "retries": retries}
        first = Worker(f"{__name__}:serve", memory_mb, options)
        super().__init__([first])
        about: Any = first.ready
        style, named, takes_all = about["signature"]
        self.signature, self.is_async = Signature(style, tuple(named), takes_all), bool(about["is_async"])
        self._wants_tokens = style == "trl" and (takes_all or "completion_ids" in named)
        more = 0 if self.is_async else (workers or 1) - 1
        self._workers += [Worker(first.function, memory_mb, options) for _ in range(more)]
        self.seconds, self.retries, self._gate = seconds, retries, _Gate()

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score that the function gives each response, in order. Neither text nor function makes it raise."""
        found, counting = _Found(self.signature, responses), threading.Lock()

        def one(worker: Worker, calls: list[Call], visit: _Visit | None = None) -> list[list[Call]]:
            left, again = dict(enumerate(calls)), list[Call]()
            data, patience = [self._as_data(call) for call in calls], self._patience(calls)
            try:
                for index, scores in worker.results(data, patience, beside=visit is not None):
                    with counting:
                        again += found.known(left.pop(index), [Score(**score) for score in scores])
            except Lost as lost:
                rest = list(left.values())
                if visit is not None:
                    visit.lost = True
                    if visit.shared:
                        return [part for part in (rest, *([call] for call in again)) if part]
                if len(rest) > 1:  # nobody knows which one it was
                    half = len(rest) // 2
                    return [rest[:half], rest[half:], *([call] for call in again)]
                for call in rest:
                    with counting:
                        again += found.known(call, [Score(None, str(lost))] * len(call.texts))
            return [[call] for call in again]

        each = [[call] for call in found.left]
        unable = self._beside(found.left, one) if self.is_async else self.work_on(each, one)
        return [score if score != Score(None) else Score(None, unable) for score in found.scores]

    def _beside(self, calls: list[Call], one: Callable[[Worker, list[Call], _Visit], list[list[Call]]]) -> str:
        """Make all calls at once, beside those of other callers; after a loss alone. Returns why some are left."""
        asked, alone = [calls] if calls else [], False
        try:
            while asked:
                with self._gate.entered(alone=alone) as visit:
                    asked += one(self._workers[0], asked.pop(0), visit)
                alone |= visit.lost
        except CannotStart as error:
            return str(error)
        return ""

    def _as_data(self, call: Call) -> list[Any]:
        tokens = [list(getattr(text, "tokens", ())) if self._wants_tokens else [] for text in call.texts]
        return [vars(call.problem), list(zip(call.texts, tokens, strict=True))]

    def _patience(self, calls: Sequence[Call]) -> float:
        """How long it may take until the next result is there. Async functions have a clock of their own."""
        tries = waits(self.retries)
        limit = self.seconds * max(len(call.texts) for call in calls)
        return limit * len(tries) + sum(tries) + self.is_async * GRACE_SECONDS


def serve(**options: Any) -> tuple[dict[str, Any], Callable[..., None]]:
    """What a process of an IsolatedReward says of itself, and what answers its calls."""
    reward = FunctionReward(**options)
    reward.passes += (MemoryError,)  # the process must end: nobody knows what it has lost

    def answer(calls: Sequence[Any], tell: Callable[[int, list[dict[str, Any]]], None]) -> None:
        made = [
            Call([index], Problem(**problem), [ResponseText(*text) for text in texts])
            for index, (problem, texts) in enumerate(calls)
        ]
        reward.each(made, lambda call, scores: tell(call.places[0], [vars(score) for score in scores]))

    return {"signature": reward.signature, "is_async": reward.is_async, "beside": reward.is_async}, answer


async def _over(job: _Job) -> None:
    """Wait until this job is over."""
    assert job.task is not None
    await asyncio.wait([job.task])


async def _end_other_tasks() -> None:
    """Cancel everything that still runs in this loop, and wait until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _scores(style: Style, returned: Any, count: int) -> list[Score]:
    """What a call returned, as one score per response."""
    if style != "trl":
        return [_score(returned, "score", "pred") if style == "verl" else _score(returned)]
    rewards = list(returned)
    if len(rewards) != count:
        raise ValueError(f"the reward function returned {len(rewards)} rewards for {count} completions")
    plain = (each.item() if hasattr(each, "item") else each for each in rewards)  # of numpy, torch
    return [Score(None, DOES_NOT_APPLY) if each is None else _score(each) for each in plain]


def _score(returned: Any, key: str = "reward", answer_key: str = "answer") -> Score:
    reward, answer = returned, None
    if isinstance(returned, dict):
        if key not in returned:
            raise TypeError(
                f"the reward function returned a dict without the key {key!r}: {sorted(map(str, returned))}"
            )
        reward, answer = returned[key], returned.get(answer_key)
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"the reward function returned a {type(reward).__name__}, not a number")
    if not abs(float(reward)) <= LARGEST_REWARD:
        raise ValueError(f"the reward function returned {reward}, which float32 cannot hold")
    return Score(float(reward), answer=None if answer is None else str(answer))
