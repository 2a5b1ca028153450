"""The task of a run: problems and verifier from the configuration, fitted to the model that will answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bapo.config import Config, TaskConfig
from bapo.models import Policy
from bapo.tasks.countdown import Countdown
from bapo.tasks.data import load_problems, within, without_overlap
from bapo.tasks.dataset import DataTask, Scorer
from bapo.tasks.task import Task
from bapo.types import Problem, Score


@dataclass(frozen=True)
class PreparedTask:
    """A task, and what a person should know of how it came about."""

    task: Task
    notes: list[str] = field(default_factory=list)


def make_task(config: Config, policy: Policy) -> PreparedTask:
    """The task that the configuration names. It does not depend on the run's seed: all seeds see the same problems."""
    chosen = config.task
    if chosen.name == "countdown":
        return PreparedTask(Countdown())
    if chosen.name == "gym":
        from bapo.tasks.gym import Gym  # needs reasoning-gym

        gym = Gym(
            chosen.gym,
            train_size=chosen.gym_train,
            test_size=chosen.gym_test,
            chat=policy.chat,
            workers=chosen.reward_workers or None,
            seconds=chosen.reward_seconds,
            memory_mb=chosen.reward_memory_mb,
        )
        return PreparedTask(gym)
    return _from_data(config, policy)


def _from_data(config: Config, policy: Policy) -> PreparedTask:
    chosen = config.task
    notes = []
    loaded: dict[str, Sequence[Problem]] = {}
    for name, sources in (("train", chosen.train), ("test", chosen.test)):
        problems, report = load_problems(
            sources,
            prompt_column=chosen.prompt_column,
            answer_column=chosen.answer_column,
            template=chosen.template,
        )
        notes.append(f"task.{name}: {report}")
        if chosen.max_prompt_tokens is not None:
            problems, long = within(problems, lambda prompt: len(policy.encode(prompt)), chosen.max_prompt_tokens)
            if long:
                notes.append(f"task.{name}: {len(long):,} prompts over {chosen.max_prompt_tokens} tokens left out")
        loaded[name] = problems
    train, shared = without_overlap(loaded["train"], loaded["test"])
    if shared:
        notes.append(f"task.train: {len(shared):,} problems left out that are in task.test too")
    if not train or not loaded["test"]:
        empty = "train" if not train else "test"
        raise ValueError(
            f"task.{empty} has no problem left. " + " ".join(notes) + " Raise task.max_prompt_tokens or give more data."
        )
    return PreparedTask(DataTask(train, loaded["test"], make_scorer(chosen, policy)), notes)


def make_scorer(config: TaskConfig, policy: Policy) -> Scorer:
    """What says how good a response is: math-verify in processes of its own, or a function of the user's."""
    if config.reward != "math":
        from bapo.tasks.function import FunctionReward

        reward = FunctionReward(config.reward, seconds=config.reward_seconds, concurrency=config.reward_workers or 32)
        return reward.scores
    from bapo.tasks.sandbox import VerifierPool

    pool = VerifierPool(
        f"bapo.tasks.math:{'verify_thinking' if policy.opens_thinking else 'verify'}",
        workers=config.reward_workers or None,
        seconds=config.reward_seconds,
        memory_mb=config.reward_memory_mb,
    )

    def scores(responses: Sequence[tuple[Problem, str]]) -> list[Score]:
        return pool.scores([(problem.answer, text) for problem, text in responses])

    return scores
