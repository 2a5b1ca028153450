"""A reward function of your own: any `module:function`, plain or async.

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

from __future__ import annotations

import asyncio
import numbers
import weakref
from collections.abc import Sequence
from typing import Any

from bapo.process.limited_worker import describe
from bapo.tasks.task import LARGEST_REWARD
from bapo.tasks.verify.finding import accepted_keywords, find_function, is_async, unharmed
from bapo.types import Problem, Score

__all__ = ["FunctionReward"]


class FunctionReward:
    """Scores responses with a function of the user's own."""

    def __init__(self, name: str, *, concurrency: int = 32, seconds: float = 60.0) -> None:
        if concurrency < 1 or not seconds > 0:
            raise ValueError(
                f"reward function {name!r}: concurrency={concurrency} and seconds={seconds} must both be positive. "
                "Allow at least one call at a time, and more than 0 seconds for each."
            )
        self.name, self.concurrency, self.seconds = name, concurrency, seconds
        self._function = find_function(name)
        self._keywords = accepted_keywords(name, self._function)
        self.is_async = is_async(self._function)
        self._runner = asyncio.Runner()
        self._finalizer = weakref.finalize(self, self._runner.close)

    def scores(self, responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        """The score that the function gives each response, in order. No response text makes it raise."""
        if not self.is_async:
            return [self._one(problem, response) for problem, response in responses]
        found: dict[int, Score] = {}
        stopped = Score(None)
        try:
            with unharmed():
                self._runner.run(self._all(responses, found))
        except KeyboardInterrupt:
            raise
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

    async def _all(self, responses: Sequence[tuple[Problem, str]], found: dict[int, Score]) -> None:
        """Put the score of each response into `found`, by its index, as soon as it is known."""
        places = asyncio.Semaphore(self.concurrency)

        async def one(index: int, problem: Problem, response: str) -> None:
            async with places:
                found[index] = await self._one_async(problem, response)

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
        everything = {
            "response": response,
            "answer": problem.answer,
            "prompt": problem.prompt,
            "extra": problem.extra,
        }
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
