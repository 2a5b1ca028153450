"""What the state of a run of reinforcement learning looks like: it is checked as a whole before any of it is used.

A value of the wrong kind would otherwise stop the run somewhere in a later step. Each part (scheduler, buffer, loop)
still decides what its own numbers mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from bapo.types import Problem

Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Trajectory(_Part):
    prompt: list[Count]
    seed: int
    tokens: list[Count]
    behavior_logprobs: list[float]
    entropies: list[float]
    versions: list[Count]
    status: Literal["parked", "stopped", "truncated", "dropped"]
    reward: FiniteFloat | None
    shaping: FiniteFloat
    reference_logprobs: list[float] = []


class _Group(_Part):
    id: Count
    problem: dict[str, Any]
    trajectories: list[_Trajectory]


class _Scheduler(_Part):
    version: Count | None
    next_id: Count
    totals: dict[str, Count]
    groups: list[_Group]


class _Held(_Part):
    group: _Group
    rollout: Count
    passes: Count
    replays: Count
    skipped: Count = 0


class _Buffer(_Part):
    version: Count | None
    open: bool
    batches_left: list[list[int]] = []
    totals: dict[str, Count]
    held: list[_Held]


class _Waiting(_Part):
    id: Count
    group: _Group | None


class _State(_Part):
    version: Count
    cursor: Count
    scheduler: _Scheduler
    buffer: _Buffer
    scoring: list[_Group] = []
    waiting: list[_Waiting] = []


def check(state: dict[str, Any], problems: Iterable[Problem], vocabulary: int) -> None:
    """ValueError if it is no state of a run with these problems, whose tokens are below `vocabulary`."""
    try:
        _State.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    held = [(f"buffer.held.{i}.group", each["group"]) for i, each in enumerate(state["buffer"]["held"])]
    groups = [(f"scheduler.groups.{i}", group) for i, group in enumerate(state["scheduler"]["groups"])]
    groups += [(f"scoring.{i}", group) for i, group in enumerate(state.get("scoring", ()))]
    groups += [
        (f"waiting.{i}.group", each["group"]) for i, each in enumerate(state.get("waiting", ())) if each["group"]
    ]
    named = {group["problem"].get("id") for _, group in held + groups}
    known = {_problem(problem) for problem in problems if problem.id in named}
    for where, group in held + groups:
        if _problem(Problem(**group["problem"])) not in known:
            raise ValueError(f"{where}.problem: it is not a problem of the run")
        for trajectory in group["trajectories"]:
            _check_trajectory(trajectory, where, newest=state["version"], vocabulary=vocabulary)
    for where, group in held:
        if any(trajectory["reward"] is None for trajectory in group["trajectories"]):
            raise ValueError(f"{where}: it lacks a reward")
    if (following := state["scheduler"]["next_id"]) != state["progress"]["groups"]:
        raise ValueError(f"scheduler.next_id: it is {following}, but {state['progress']['groups']} groups were made")
    for part in ("scheduler", "buffer"):
        if (state[part]["version"] or 0) > state["version"]:
            raise ValueError(f"{part}.version: it is newer than the learner's, {state['version']}")


def _problem(problem: Problem) -> str:
    return json.dumps(vars(problem))


def _check_trajectory(trajectory: dict[str, Any], where: str, *, newest: int, vocabulary: int) -> None:
    tokens, versions = trajectory["tokens"], trajectory["versions"]
    if any(len(trajectory[name]) != len(tokens) for name in ("behavior_logprobs", "versions")):
        raise ValueError(f"{where}: a response has lists of different lengths")
    if len(trajectory["entropies"]) > len(tokens):  # some engines give none
        raise ValueError(f"{where}: a response has more entropies than tokens")
    if versions != sorted(versions) or (versions and versions[-1] > newest):
        raise ValueError(f"{where}: a response has versions that are not in order, or newer than the learner's")
    if not trajectory["prompt"] or max(trajectory["prompt"] + tokens) >= vocabulary:
        raise ValueError(f"{where}: a response has no prompt, or tokens that the model does not know")
