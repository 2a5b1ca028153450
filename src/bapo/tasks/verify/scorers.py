"""What the reward of a response is: the verifier that `task.reward` names, and the penalty for overlong responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from bapo.tasks.task import Scorer
from bapo.tasks.verify.function import FunctionReward
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.types import Problem, Score

__all__ = ["MATH", "check_answers", "open_scorer", "overlong_penalty"]

MATH = "math"


def check_answers(problems: Sequence[Problem], reward: str) -> None:
    """Refuse reference answers that the verifier cannot read: it would fail on every response."""
    for problem in problems if reward == MATH else ():
        answers = problem.answer if isinstance(problem.answer, list) and problem.answer else [problem.answer]
        if not all(isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in answers):
            raise ValueError(
                f"problem {problem.id} ({problem.source}) has the reference answer {problem.answer!r}, which is "
                "neither text nor number, so reward='math' cannot compare with it. Name another answer_column, or set "
                "reward to a module:function that can."
            )


def open_scorer(
    reward: str,  # math, or module:function
    *,
    opens_thinking: bool,  # whether a response begins in the middle of the model's thinking, see bapo.tasks.verify.math
    seconds: float,
    memory_mb: int,
    workers: int | None = None,  # None: one per core, or 32 concurrent calls of an async function
) -> tuple[Scorer, Callable[[], None]]:
    """A function that scores responses, and one that closes it. It also closes with the process."""
    if reward != MATH:
        function = FunctionReward(reward, seconds=seconds, concurrency=workers or 32)
        return function.scores, function.close
    if find_spec("math_verify") is None:
        raise ValueError(
            "reward='math' needs math-verify, which is not installed. Install it with `pip install 'bapo[math]'`, or "
            "name a function of your own as module:function."
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
    if not 0 < buffer <= max_tokens:
        raise ValueError(
            f"overlong buffer={buffer} does not fit max_tokens={max_tokens}: the buffer is the last part of that "
            "length. Set it between 1 and max_tokens; DAPO uses a fifth."
        )
    if penalty < 0:
        raise ValueError(f"overlong penalty={penalty} is negative and would reward length. Set it to 0 or more.")
    if truncated or length > max_tokens:
        return -penalty
    return -penalty * max(0, length - (max_tokens - buffer)) / buffer
