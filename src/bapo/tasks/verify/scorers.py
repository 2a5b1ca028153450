"""What the reward of a response is: math, functions of your own, or their sum; and the penalty for overlong responses.

`reward = "math"` compares answers in processes of their own (`math.py`, `sandbox.py`), `reward = "judge"` asks a model
(`judge.py`). Any other name is a function (`functions.py`). Of several, the reward is the weighted sum, and a response
that one of them fails on has none.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from bapo.tasks.judge import JUDGE, Judge
from bapo.tasks.task import Scorer, following, listener
from bapo.tasks.verify.finding import CALLED_WITH
from bapo.tasks.verify.functions import DOES_NOT_APPLY, FunctionReward, IsolatedReward
from bapo.tasks.verify.sandbox import VerifierPool
from bapo.types import LARGEST_REWARD, Problem, Score

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


@dataclass(eq=False)
class DataTask:
    """Problems to train on, problems to test on, and a scorer for the responses."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    scores: Scorer
    judge: Judge | None = None  # the model that the scorer asks, if any


def open_scorer(
    rewards: Sequence[str],  # math, or module:function
    *,
    opens_thinking: bool,  # whether a response begins in the middle of the model's thinking, see bapo.tasks.verify.math
    weights: Sequence[float] = (),  # of the rewards; 1 if there are none
    seconds: float,
    memory_mb: int,
    workers: int | None = None,  # None: one per core, or 32 concurrent calls of an async function
    retries: int = 0,  # of a function that fails
    isolated: bool = False,  # whether functions run in processes of their own
    judge: Judge | None = None,  # which reward = "judge" asks
) -> Verifier:
    """What scores responses by one reward, or by the weighted sum of several."""
    limits: dict[str, Any] = {"seconds": seconds, "memory_mb": memory_mb, "workers": workers}
    with ExitStack() as opened:
        parts = []
        for reward in rewards:
            if reward == JUDGE:
                if judge is None:
                    raise ValueError("reward='judge' is for runs of `bapo train`: task.judge says which model to ask.")
                part = Verifier(judge.scores, judge.close)
            elif reward == MATH:
                part = _open_math(opens_thinking, **limits)
            else:
                part = open_function(reward, retries=retries, isolated=isolated, **limits)
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
    answer = next((part.answer for part in parts.values() if part.answer is not None), None)
    read, written = (sum(getattr(part, name) for part in parts.values()) for name in ("read", "written"))
    return Score(total, answer=answer, rewards=rewards, read=read, written=written)


def _open_math(opens_thinking: bool, **limits: Any) -> Verifier:
    if find_spec("math_verify") is None:
        raise ValueError(
            "reward='math' needs math-verify. Install it with `pip install 'bapo[math]'`, or name a module:function."
        )
    pool = VerifierPool(f"bapo.tasks.verify.math:{'verify_thinking' if opens_thinking else 'verify'}", **limits)

    def scores(responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        return pool.scores([(problem.answer, text) for problem, text in responses])

    return Verifier(scores, pool.close)


def open_function(
    reward: str, *, seconds: float, memory_mb: int, workers: int | None, retries: int, isolated: bool
) -> Verifier:
    """What scores responses with a function of the user's, in this process or isolated in others."""
    options: dict[str, Any] = {"seconds": seconds, "retries": retries}
    function: FunctionReward | IsolatedReward
    if isolated:
        function = IsolatedReward(reward, workers=workers, memory_mb=memory_mb, **options)
    else:
        function = FunctionReward(reward, concurrency=workers or 32, **options)
    style = function.signature.style
    may_be_tried = isolated or not function.is_async
    return Verifier(function.scores, function.close, style != "ours", CALLED_WITH[style], may_be_tried)


def overlong_penalty(length: int, *, max_tokens: int, buffer: int, penalty: float = 1.0) -> float:
    """What to add to the reward of a response of `length` tokens: DAPO's soft punishment (arXiv:2503.14476, eq. 13).

                        0                                   |y| <= L - B
        penalty x       ((L - B) - |y|) / B         L - B < |y| <= L
                        -1                              L < |y|

    L is the length limit and B the buffer before it. Without the penalty, a response that is cut off just before its
    answer looks the same as one that never got anywhere. The paper's L is a soft limit, and its responses may be longer
    than L. Ours cannot be: those that are cut off have the length L.

    The penalty changes the rewards that advantages are computed from. It is not part of the reward that is reported or
    evaluated.
    """
    return -penalty * min(buffer, max(0, length - (max_tokens - buffer))) / buffer
