"""What the reward of a response is: math, or a function of your own; and the penalty for overlong responses.

`reward = "math"` compares answers in processes of their own (`math.py`, `sandbox.py`). Any other name is a function,
`module:function`, plain or async:

    def reward(response, answer):
        return float(answer in response)

It is called with those of the following keywords that it names, or with all of them if it takes **kwargs:

    response    the text of the response, without its stop token
    answer      the problem's ground truth
    prompt      the problem's prompt: text, or chat messages
    extra       the other columns of its data set, as a dict

It returns a number, a bool, or a dict with "reward" (and, for majority votes, "answer"). Anything else counts as a
failure of the verifier, not as a reward of 0: another type, a NaN, a number too large for float32, an exception,
`sys.exit()`. Only Ctrl-C passes through.

The function runs in the training process. A plain function is called for one response after the other, without a time
limit, and nothing protects the process from a crash in it. Async functions, such as calls to a judge model, run
concurrently in one event loop, at most `concurrency` at a time with `seconds` each. The loop lives as long as the
reward, so clients that the function keeps between calls stay valid. asyncio stops the whole loop if a task that the
function started itself calls `sys.exit()`. Then every response without a score yet is a failure.
"""

import asyncio
import numbers
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, NamedTuple

from bapo.process.limited_worker import describe
from bapo.process.stops import StopAsked
from bapo.tasks.task import LARGEST_REWARD, Following, Scorer, followed, following, listener
from bapo.tasks.verify.finding import (
    CALLED_WITH,
    Signature,
    Style,
    arguments_of,
    find_function,
    is_async,
    judged,
    unharmed,
)
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.types import Problem, Score, refuse

MATH = "math"


def check_answers(problems: Sequence[Problem], rewards: Sequence[str]) -> None:
    """Refuse reference answers that the verifier cannot read: it would fail on every response."""
    for problem in problems if MATH in rewards else ():
        answers = problem.answer if isinstance(problem.answer, list) and problem.answer else [problem.answer]
        if not all(isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in answers):
            raise ValueError(
                f"problem {problem.id} ({problem.source}) has the reference answer {problem.answer!r}, neither text "
                "nor number, so reward='math' cannot compare with it. Name another answer_column or a module:function."
            )


class Verifier(NamedTuple):
    """What scores responses."""

    scores: Scorer
    close: Callable[[], None]
    """Ends it. It also ends with the process."""
    takes_columns: bool = False
    """Whether it was written for another trainer and expects all columns of the data, as they are."""
    called_with: str = ""
    """What its function is called with, in words."""
    may_be_tried: bool = True
    """Whether a trial leaves nothing behind: clients of an async function would stay bound to its event loop."""


def open_scorer(
    rewards: Sequence[str],  # math, or module:function
    *,
    opens_thinking: bool,  # whether a response begins in the middle of the model's thinking, see bapo.tasks.verify.math
    weights: Sequence[float] = (),  # of the rewards; 1 if there are none
    seconds: float,
    memory_mb: int,
    workers: int | None = None,  # None: one per core, or 32 concurrent calls of an async function
    retries: int = 0,  # of a function that fails
) -> Verifier:
    """What scores responses by one reward, or by the weighted sum of several."""
    limits: dict[str, Any] = {"seconds": seconds, "memory_mb": memory_mb, "workers": workers}
    with ExitStack() as opened:
        parts = []
        for reward in rewards:
            own = reward != MATH
            part = open_function(reward, retries=retries, **limits) if own else _open_math(opens_thinking, **limits)
            parts.append(part)
            opened.callback(part.close)
        closing = opened.pop_all()
    if len(parts) == 1 and not weights:
        return parts[0]
    names, scorers = names_of(rewards), [part.scores for part in parts]

    def scores(responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        found = []
        for scorer in scorers:
            with following(len(responses), listener()):
                found.append(scorer(responses))
        return [_sum(dict(zip(names, each, strict=True)), weights) for each in zip(*found, strict=True)]

    return Verifier(scores, closing.close, any(part.takes_columns for part in parts))


def names_of(rewards: Sequence[str]) -> list[str]:
    """What each reward is called in metrics: its function, with the module if another function has the same name."""
    last = [reward.rpartition(":")[2] for reward in rewards]
    return [
        name if last.count(name) == 1 else reward.replace(":", ".") for name, reward in zip(last, rewards, strict=True)
    ]


def _sum(parts: dict[str, Score], weights: Sequence[float]) -> Score:
    """The weighted sum of scores. It fails where one of them does, or if none applies."""
    for name, part in parts.items():
        if part.reward is None and part.failure != DOES_NOT_APPLY:
            return Score(None, f"{name}: {part.failure}")
    rewards = {name: part.reward for name, part in parts.items()}
    weighted = [w * r for w, r in zip(weights or [1.0] * len(parts), rewards.values(), strict=True) if r is not None]
    if not weighted:
        return Score(None, DOES_NOT_APPLY)
    if not abs(total := sum(weighted)) <= LARGEST_REWARD:
        return Score(None, f"the weighted sum of the rewards is {total}, which float32 cannot hold")
    return Score(total, answer=next((p.answer for p in parts.values() if p.answer is not None), None), rewards=rewards)


def _open_math(opens_thinking: bool, **limits: Any) -> Verifier:
    if find_spec("math_verify") is None:
        raise ValueError(
            "reward='math' needs math-verify. Install it with `pip install 'bapo[math]'`, or name a module:function."
        )
    pool = VerifierPool(f"bapo.tasks.verify.math:{'verify_thinking' if opens_thinking else 'verify'}", **limits)

    def scores(responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        return pool.scores([(problem.answer, text) for problem, text in responses])

    return Verifier(scores, pool.close)


def open_function(reward: str, *, seconds: float, memory_mb: int, workers: int | None, retries: int) -> Verifier:
    """What scores responses with a function of the user's."""
    function = FunctionReward(reward, seconds=seconds, concurrency=workers or 32, retries=retries)
    style = function.signature.style
    return Verifier(function.scores, function.close, style != "ours", CALLED_WITH[style], not function.is_async)


def overlong_penalty(
    length: int, *, max_tokens: int, buffer: int, penalty: float = 1.0, truncated: bool = False
) -> float:
    """What to add to the reward of a response of `length` tokens: DAPO's soft punishment (arXiv:2503.14476, eq. 13).

                        0                                   |y| <= L - B
        penalty x       ((L - B) - |y|) / B         L - B < |y| <= L
                        -1                              L < |y|

    L is the length limit and B the buffer before it. Without the penalty, a response that is cut off just before its
    answer looks the same as one that never got anywhere. The paper's L is a soft limit, and its responses may be longer
    than L. Ours cannot be, so the third case is a response that was cut off at L (truncated).

    The penalty changes the rewards that advantages are computed from. It is not part of the reward that is reported or
    evaluated.
    """
    refuse(
        (
            not 0 < buffer <= max_tokens,
            f"overlong buffer={buffer} does not fit max_tokens={max_tokens}, of which it is the last part. Set it "
            "between 1 and max_tokens; DAPO uses a fifth.",
        ),
        (penalty < 0, f"overlong penalty={penalty} is negative and would reward length. Set it to 0 or more."),
    )
    if truncated or length > max_tokens:
        return -penalty
    return -penalty * max(0, length - (max_tokens - buffer)) / buffer


class _Stopped(Exception):  # noqa: N818
    """StopAsked in a coroutine: asyncio lets a KeyboardInterrupt escape from the loop and forgets the other calls."""


class FunctionReward:
    """Scores responses with a function of the user's own."""

    def __init__(self, name: str, *, concurrency: int = 32, seconds: float = 60.0, retries: int = 0) -> None:
        refuse(
            (
                concurrency < 1 or not seconds > 0,
                f"reward function {name!r}: concurrency={concurrency} and seconds={seconds} must both be positive.",
            )
        )
        self.name, self.concurrency, self.seconds, self.retries = name, concurrency, seconds, retries
        self._function = find_function(name)
        self.signature = judged(name, self._function)
        self.is_async = is_async(self._function)
        self._runner = asyncio.Runner()
        self._finalizer = weakref.finalize(self, self._runner.close)

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score that the function gives each response, in order. No response text makes it raise."""
        follower, calls = followed(len(responses)), calls_of(self.signature, responses)
        if not self.is_async:
            return [follower.known(score) for call in calls for score in self._call(*call)]
        found: dict[int, list[Score]] = {}
        stopped = Score(None)
        try:
            with unharmed():
                self._runner.run(self._all(calls, found, follower))
        except KeyboardInterrupt:
            raise
        except _Stopped:
            self._runner.run(_end_other_tasks())
            raise StopAsked from None
        except BaseException as error:  # of a task that the function started
            stopped = Score(None, failure=describe(error))
            self._runner.run(_end_other_tasks())
        return [s for index, (_, texts) in enumerate(calls) for s in found.get(index, [stopped] * len(texts))]

    def close(self) -> None:
        """Close the event loop. Does nothing the second time."""
        self._finalizer()

    def _call(self, problem: Problem, texts: Sequence[str]) -> list[Score]:
        """The scores of one call. If it fails on several responses, each is asked about alone."""
        cause = ""
        for wait in self._waits():
            if wait:
                time.sleep(wait)
            try:
                with unharmed():
                    returned = self._function(**arguments_of(self.signature, problem, texts))
                    return _scores(self.signature.style, returned, len(texts))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                cause = describe(error)
        return [s for text in texts for s in self._call(problem, [text])] if len(texts) > 1 else [Score(None, cause)]

    async def _all(
        self, calls: Sequence[tuple[Problem, Sequence[str]]], found: dict[int, list[Score]], follower: Following
    ) -> None:
        """Put the scores of each call into `found`, by its index, as soon as they are known."""
        places, stopped = asyncio.Semaphore(self.concurrency), False

        async def one(index: int, problem: Problem, texts: Sequence[str]) -> None:
            nonlocal stopped
            async with places:
                if stopped:
                    return
                found[index] = await self._call_async(problem, texts)
                try:
                    for score in found[index]:
                        follower.known(score)
                except StopAsked:
                    stopped = True
                    raise _Stopped from None

        await asyncio.gather(*(one(index, *call) for index, call in enumerate(calls)))

    async def _call_async(self, problem: Problem, texts: Sequence[str]) -> list[Score]:
        cause, seconds = "", self.seconds * len(texts)
        for wait in self._waits():
            try:
                if wait:
                    await asyncio.sleep(wait)
                async with asyncio.timeout(seconds) as limit:
                    returned = await self._function(**arguments_of(self.signature, problem, texts))
                    return _scores(self.signature.style, returned, len(texts))
            except TimeoutError as error:
                cause = f"timeout after {seconds:g} s" if limit.expired() else describe(error)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # by Ctrl-C, not by the function
                    raise
                cause = describe(error)
        if len(texts) == 1:
            return [Score(None, cause)]
        return [score for text in texts for score in await self._call_async(problem, [text])]

    def _waits(self) -> list[int]:
        """The seconds before each try: none, then 1, 2, 4 and so on."""
        return [0, *(2**retry for retry in range(self.retries))]


def calls_of(signature: Signature, responses: Sequence[tuple[Problem, str]]) -> list[tuple[Problem, list[str]]]:
    """What a function is called for: one response after the other, or all to one problem if it takes lists."""
    calls: list[tuple[Problem, list[str]]] = []
    for problem, text in responses:
        if signature.style == "trl" and calls and calls[-1][0] is problem:
            calls[-1][1].append(text)
        else:
            calls.append((problem, [text]))
    return calls


async def _end_other_tasks() -> None:
    """Cancel everything that still runs in this loop, and wait until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


DOES_NOT_APPLY = "the reward function returned None: it does not apply"
"""The failure of a response to which a function of TRL gives no reward. In a sum of several, it has no part then."""


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
