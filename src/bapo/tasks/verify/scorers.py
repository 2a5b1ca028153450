"""What the reward of a response is: math, or a function of your own; and the penalty for overlong responses.

`reward = "math"` compares answers in processes of their own (`math.py`, `sandbox.py`), `reward = "judge"` asks a model
(`judge.py`). Any other name is a function, `module:function`, plain or async:

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
import weakref
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from bapo.process.limited_worker import describe
from bapo.process.stops import StopAsked
from bapo.tasks.judge import JUDGE, Judge
from bapo.tasks.task import LARGEST_REWARD, Following, Scorer, followed
from bapo.tasks.verify.finding import accepted_keywords, find_function, is_async, unharmed
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.types import Problem, Score, refuse

MATH = "math"


def check_answers(problems: Sequence[Problem], reward: str) -> None:
    """Refuse reference answers that the verifier cannot read: it would fail on every response."""
    for problem in problems if reward == MATH else ():
        answers = problem.answer if isinstance(problem.answer, list) and problem.answer else [problem.answer]
        if not all(isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in answers):
            raise ValueError(
                f"problem {problem.id} ({problem.source}) has the reference answer {problem.answer!r}, neither text "
                "nor number, so reward='math' cannot compare with it. Name another answer_column or a module:function."
            )


def open_scorer(
    reward: str,  # math, or module:function
    *,
    opens_thinking: bool,  # whether a response begins in the middle of the model's thinking, see bapo.tasks.verify.math
    seconds: float,
    memory_mb: int,
    workers: int | None = None,  # None: one per core, or 32 concurrent calls of an async function
    judge: Judge | None = None,  # which reward = "judge" asks
) -> tuple[Scorer, Callable[[], None]]:
    """A function that scores responses, and one that closes it. It also closes with the process."""
    if reward == JUDGE:
        if judge is None:
            raise ValueError("reward='judge' is for runs of `bapo train`, whose task.judge says which model to ask.")
        return judge.scores, judge.close
    if reward != MATH:
        function = FunctionReward(reward, seconds=seconds, concurrency=workers or 32)
        return function.scores, function.close
    if find_spec("math_verify") is None:
        raise ValueError(
            "reward='math' needs math-verify. Install it with `pip install 'bapo[math]'`, or name a module:function."
        )
    verifier = f"bapo.tasks.verify.math:{'verify_thinking' if opens_thinking else 'verify'}"
    pool = VerifierPool(verifier, workers=workers, seconds=seconds, memory_mb=memory_mb)

    def scores(responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        return pool.scores([(problem.answer, text) for problem, text in responses])

    return scores, pool.close


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

    def __init__(self, name: str, *, concurrency: int = 32, seconds: float = 60.0) -> None:
        refuse(
            (
                concurrency < 1 or not seconds > 0,
                f"reward function {name!r}: concurrency={concurrency} and seconds={seconds} must both be positive.",
            )
        )
        self.name, self.concurrency, self.seconds = name, concurrency, seconds
        self._function = find_function(name)
        self._keywords = accepted_keywords(name, self._function)
        self.is_async = is_async(self._function)
        self._runner = asyncio.Runner()
        self._finalizer = weakref.finalize(self, self._runner.close)

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score that the function gives each response, in order. No response text makes it raise."""
        follower = followed(len(responses))
        if not self.is_async:
            return [follower.known(self._one(problem, response)) for problem, response in responses]
        found: dict[int, Score] = {}
        stopped = Score(None)
        try:
            with unharmed():
                self._runner.run(self._all(responses, found, follower))
        except KeyboardInterrupt:
            raise
        except _Stopped:
            self._runner.run(_end_other_tasks())
            raise StopAsked from None
        except BaseException as error:  # of a task that the function started
            stopped = Score(None, failure=describe(error))
            self._runner.run(_end_other_tasks())
        return [found.get(index, stopped) for index in range(len(responses))]

    def close(self) -> None:
        """Close the event loop. Does nothing the second time."""
        self._finalizer()

    def _one(self, problem: Problem, response: str) -> Score:
        try:
            with unharmed():
                return _score(self._function(**self._arguments(problem, response)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Score(None, failure=describe(error))

    async def _all(
        self, responses: Sequence[tuple[Problem, str]], found: dict[int, Score], follower: Following
    ) -> None:
        """Put the score of each response into `found`, by its index, as soon as it is known."""
        places, stopped = asyncio.Semaphore(self.concurrency), False

        async def one(index: int, problem: Problem, response: str) -> None:
            nonlocal stopped
            async with places:
                if stopped:
                    return
                found[index] = await self._one_async(problem, response)
                try:
                    follower.known(found[index])
                except StopAsked:
                    stopped = True
                    raise _Stopped from None

        await asyncio.gather(*(one(index, *asked) for index, asked in enumerate(responses)))

    async def _one_async(self, problem: Problem, response: str) -> Score:
        try:
            async with asyncio.timeout(self.seconds) as limit:
                return _score(await self._function(**self._arguments(problem, response)))
        except TimeoutError as error:
            return Score(None, f"timeout after {self.seconds:g} s" if limit.expired() else describe(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by Ctrl-C, not by the function
                raise
            return Score(None, failure=describe(error))

    def _arguments(self, problem: Problem, response: str) -> dict[str, Any]:
        everything = {"response": response} | {key: getattr(problem, key) for key in ("answer", "prompt", "extra")}
        return {keyword: everything[keyword] for keyword in self._keywords}


async def _end_other_tasks() -> None:
    """Cancel everything that still runs in this loop, and wait until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _score(returned: Any) -> Score:
    reward, answer = returned, None
    if isinstance(returned, dict):
        if "reward" not in returned:
            raise TypeError(
                f"the reward function returned a dict without the key 'reward': {sorted(map(str, returned))}"
            )
        reward, answer = returned["reward"], returned.get("answer")
    if not isinstance(reward, numbers.Real):
        raise TypeError(f"the reward function returned a {type(reward).__name__}, not a number")
    if not abs(float(reward)) <= LARGEST_REWARD:
        raise ValueError(f"the reward function returned {reward}, which float32 cannot hold")
    return Score(float(reward), answer=None if answer is None else str(answer))
