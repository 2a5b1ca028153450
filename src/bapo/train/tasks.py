"""The task of a run: problems and verifier from the configuration, fitted to the model that will answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from bapo.config.numerals import counted
from bapo.config.run import Config
from bapo.models import Policy
from bapo.preflight.examine import TaskData, load_task
from bapo.tasks.countdown import Countdown
from bapo.tasks.data.problems import within, without_overlap
from bapo.tasks.task import DataTask, Task
from bapo.tasks.verify.scorers import check_answers, open_scorer
from bapo.types import Problem


@dataclass(frozen=True)
class PreparedTask:
    """A task, and what a person should know about how it was made."""

    task: Task
    notes: list[str] = field(default_factory=list)


def make_task(config: Config, policy: Policy, data: TaskData | None = None) -> PreparedTask:
    """Make the task that the configuration names. It does not depend on the seed: all seeds see the same problems.

    `data`: its problems, if they were read already.
    """
    chosen = config.task
    if chosen.name == "countdown":
        return PreparedTask(Countdown())
    if chosen.name == "gym":
        if find_spec("reasoning_gym") is None:
            raise ValueError(
                "task.name='gym' needs reasoning-gym, which is not installed. Install it with: pip install 'bapo[math]'"
            )
        from bapo.tasks.gym import Gym

        gym = Gym(
            chosen.gym,
            train_size=chosen.gym_train,
            test_size=chosen.gym_test,
            chat=policy.chat,
            thinking=policy.opens_thinking,
            workers=chosen.reward_workers or None,
            seconds=chosen.reward_seconds,
            memory_mb=chosen.reward_memory_mb,
        )
        return PreparedTask(gym)
    return _from_data(config, policy, load_task(chosen) if data is None else data)


def _from_data(config: Config, policy: Policy, data: TaskData) -> PreparedTask:
    chosen = config.task
    notes = list(data.notes)
    loaded: dict[str, Sequence[Problem]] = {}
    for name, problems in (("train", data.train), ("test", data.test)):
        if chosen.max_prompt_tokens is not None:
            problems, long = within(problems, lambda prompt: len(policy.encode(prompt)), chosen.max_prompt_tokens)
            if long:
                told = counted(len(long), "prompt")
                notes.append(f"task.{name}: left out {told} over {chosen.max_prompt_tokens} tokens")
        loaded[name] = problems
    train, shared = without_overlap(loaded["train"], loaded["test"])
    if shared:
        notes.append(f"task.train: left out {counted(len(shared), 'problem')} that task.test has too")
    if not train or not loaded["test"]:
        empty = "train" if not train else "test"
        remedy = "Give other data to train on." if shared and empty == "train" else "Raise task.max_prompt_tokens."
        raise ValueError(f"task.{empty} has no problem left. {'; '.join(notes)}. {remedy}")
    check_answers([*train, *loaded["test"]], chosen.reward)
    scorer, _ = open_scorer(
        chosen.reward,
        opens_thinking=policy.opens_thinking,
        seconds=chosen.reward_seconds,
        memory_mb=chosen.reward_memory_mb,
        workers=chosen.reward_workers or None,
    )
    return PreparedTask(DataTask(train, loaded["test"], scorer), notes)
