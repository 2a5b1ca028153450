"""Whether a run may go on from a checkpoint: the same run, the same settings, the same logs.

    identity   a checkpoint of another run is refused
    settings   a checkpoint has a copy of the configuration that its steps were taken with. A setting that differs now
               is refused by name, unless it is one that may change on the way (MAY_CHANGE)
    logs       they must begin with what the run had written when the checkpoint was made
    groups     the ledger must have every group where the state of the checkpoint has it
    state      it must be one of this run: its values are of the right kind, its problems and tokens are the run's

Nothing is changed before all of these are known to be right. A value of the wrong kind would otherwise stop the run
somewhere in a later step.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from bapo.config.errors import CheckpointError
from bapo.config.recipe import COMMANDS, parse
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.config.words import flat
from bapo.runs import files, history, ledger
from bapo.runs.history import Changes
from bapo.runs.read import logged_steps
from bapo.runs.write import RunDirectory
from bapo.train import checkpoint
from bapo.types import Group, Problem, Trajectory

Kind = TypeVar("Kind", Config, SftConfig)

MAY_CHANGE = (
    *("steps", "out", "threads", "checkpoint_every", "checkpoint_minutes", "checkpoint_keep", "sample_every"),
    "eval.every",
    *("learn.micro_tokens", "learn.activation_checkpointing", "learn.compile", "learn.offload_optimizer"),
    *("rollout.slots", "rollout.cache_tokens", "learn.anchor_limit", "task.reward_isolated", "task.reward_workers"),
    *("task.judge.url", "task.judge.key_variable", "task.judge.seconds", "task.judge.retries"),
    *("model.path", "task.train", "task.test", "cluster.address", "log.to", "log.project"),
)
"""Settings that may change on the way: how long, how often, where things are, and how the work is divided. Data that
moved must still be the same data, which its fingerprint shows."""
NOT_BIT_FOR_BIT = ("threads", "learn.micro_tokens", "learn.activation_checkpointing", "learn.compile", "rollout.slots")
"""Those of them that change how numbers are rounded."""


@dataclass(frozen=True)
class Continued:
    """What a run goes on from, as JSON data, so that the first rank can tell the others."""

    checkpoint: str
    """Its path."""
    changes: Changes
    """Settings that differ from those of the checkpoint."""
    notes: list[str]
    """What a person should know."""

    @property
    def source(self) -> Path:
        """The path of the checkpoint."""
        return Path(self.checkpoint)


def examine(run: RunDirectory, config: Kind, name: str | None) -> Continued:
    """Decide which checkpoint the run goes on from, and that it may. Raises CheckpointError if it may not.

    `config`: the settings to go on with. `name`: the checkpoint that was asked for; None for the newest.
    """
    source = checkpoint.chosen(run.path / "checkpoints", name)
    state = checkpoint.read_state(source)
    notes = _check_identity(run, source, state)
    changes = _changes(source, config)
    refused = {key: values for key, values in changes.items() if key not in MAY_CHANGE}
    if refused:
        raise CheckpointError(_refusal(run.path, source, refused, config))
    if changes:
        notes.append(f"changed for the steps to come: {history.told(changes)}")
    if rounding := [key for key in changes if key in NOT_BIT_FOR_BIT]:
        notes.append(f"{', '.join(rounding)} changed, so the run does not go on bit for bit as it would have")
    if "steps" in changes and isinstance(config, Config) and config.learn.schedule != "constant":
        notes.append(f"learn.schedule={config.learn.schedule!r} now ends at step {config.steps}, and not as before")
    if (flaw := run.flaw(state)) is not None:
        raise CheckpointError(
            f"{flaw}, so the run cannot be continued from {source.name}. Nothing was changed. Put the file back as it "
            f"was. {checkpoint.advice(source, lambda other: run.flaw(other) is None)}"
        )
    try:
        logged_steps(run.path, state["logs"])
    except ValueError as error:
        raise CheckpointError(
            f"the logs of {run.path} are not those of a run: {error} Nothing was changed. Put back what the run wrote."
        ) from None
    return Continued(str(source), changes, notes)


def check_ledger(path: Path, state: dict[str, Any], *, max_staleness: int) -> None:
    """Raise CheckpointError if the ledger of the run in `path` and the state of a checkpoint disagree on a group."""

    def wrong(state: dict[str, Any]) -> list[str]:
        size = state["logs"][ledger.FILE]  # there is no file before the first step
        lines = ledger.read(path, size) if size else []
        return _disagreements(lines, state, max_staleness=max_staleness)

    if found := wrong(state):
        source = path / "checkpoints" / checkpoint.name_of(state["progress"]["step"])
        raise CheckpointError(
            f"{path / ledger.FILE} does not fit {source.name}: {found[0]}. Nothing was changed. Put the file back as "
            f"it was. {checkpoint.advice(source, lambda other: not wrong(other))}"
        )


def _disagreements(lines: list[dict[str, Any]], state: dict[str, Any], *, max_staleness: int) -> list[str]:
    """What a ledger and the state at its end say differently, and what is wrong with the ledger itself."""
    held = [each["group"] for each in state["buffer"]["held"]]
    with_rewards = [each["group"] for each in state.get("waiting", []) if each["group"] is not None]
    places = {
        "admitted": state["scheduler"]["groups"],
        "finished": [*state.get("scoring", []), *with_rewards],
        "held": held,
    }
    found = [str(wrong) for wrong in ledger.balance(lines, max_staleness=max_staleness).wrong]
    for place, groups in places.items():
        differ = ledger.in_state(lines, place) ^ {group["id"] for group in groups}
        found += [f"group {id} is {place} in one and not in the other" for id in sorted(differ)]
    return found


def _check_identity(run: RunDirectory, source: Path, state: dict[str, Any]) -> list[str]:
    """Set the run's identity. Returns what to tell if its history has lost it."""
    own, theirs = history.identity(run.path), state["run"]
    if own not in (None, theirs):
        raise CheckpointError(
            f"{source} belongs to another run: it has the identity {theirs}, and this run has {own}. Nothing was "
            f"changed. Move it out of {source.parent}. {checkpoint.advice(source, lambda s: s['run'] == own)}"
        )
    run.id = theirs
    return [] if own is not None else [f"{history.FILE} is lost, so {source.name} says which run this is"]


def _changes(source: Path, config: Config | SftConfig) -> Changes:
    """Settings that differ from those of a checkpoint."""
    kept = source / checkpoint.CONFIG
    try:
        before = parse(type(config), files.read_object(kept), source=str(kept))
    except ValueError as error:
        raise CheckpointError(
            f"{error}\nIt is not a configuration of this version of bapo. Resume with the version that wrote it."
        ) from None
    old, new = (dict(flat(settings.model_dump(mode="json"))) for settings in (before, config))
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def _refusal(run: Path, source: Path, refused: Changes, config: Config | SftConfig) -> str:
    listed = "\n".join(f"  {key} is {now!r} now, and was {before!r}" for key, (before, now) in refused.items())
    return (
        f"{run} cannot be continued from {source.name} with other settings than its steps were taken with:\n{listed}\n"
        f"Nothing was changed. Put these back, or start a new run with them: `{COMMANDS[type(config)]} "
        f"{run / checkpoint.CONFIG} --out OTHER`. What may change on the way: {', '.join(MAY_CHANGE)}."
    )


# The state of a run of reinforcement learning.

Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Scheduler(BaseModel):
    version: Count | None
    next_id: Count
    totals: dict[str, Count]
    groups: list[Group]


class _Held(BaseModel):
    group: Group
    rollout: Count
    passes: Count
    replays: Count
    skipped: Count


class _Buffer(BaseModel):
    version: Count | None
    open: bool
    batches_left: list[tuple[Count, int, Count]]
    totals: dict[str, Count]
    held: list[_Held]


class _Waiting(BaseModel):
    id: Count
    group: Group | None


class _Failing(BaseModel):
    groups: Count
    responses: Count
    since: Count
    cause: str


class _Progress(BaseModel):
    step: Count
    groups: Count
    owed: Count
    taken: Count
    skipped: Count
    failing: _Failing
    drift: str
    windows: list[Count]


class _State(BaseModel):
    version: Count
    progress: _Progress
    cursor: Count
    scheduler: _Scheduler
    buffer: _Buffer
    scoring: list[Group] = []
    waiting: list[_Waiting] = []


def check_state(state: dict[str, Any], problems: Iterable[Problem], vocabulary: int) -> None:
    """ValueError if it is no state of a run with these problems, whose tokens are below `vocabulary`."""
    try:
        found = _State.model_validate_json(json.dumps(state), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    held = [each.group for each in found.buffer.held]
    others = [*found.scheduler.groups, *found.scoring, *(each.group for each in found.waiting if each.group)]
    named = {group.problem.id for group in held + others}
    known = {json.dumps(vars(problem)) for problem in problems if problem.id in named}
    for group in held + others:
        if json.dumps(vars(group.problem)) not in known:
            raise ValueError(f"the problem of group {group.id} is not one of the run")
        if not group.trajectories:
            raise ValueError(f"group {group.id} has no responses")
        if wrong := _wrong_in(group, newest=found.version, vocabulary=vocabulary):
            raise ValueError(f"a response of group {group.id} has {wrong}")
    if unscored := [group.id for group in held if any(trajectory.reward is None for trajectory in group.trajectories)]:
        raise ValueError(f"the buffer holds group {unscored[0]}, which lacks a reward")
    if found.scheduler.next_id != (made := found.progress.groups):
        raise ValueError(f"scheduler.next_id is {found.scheduler.next_id}, but {made} groups were made")
    for name, part in (("scheduler", found.scheduler), ("buffer", found.buffer)):
        if (part.version or 0) > found.version:
            raise ValueError(f"{name}.version is newer than the learner's, {found.version}")


def _wrong_in(group: Group, *, newest: int, vocabulary: int) -> str:
    """What cannot be in one of its responses; empty if all of them are possible."""
    for each in group.trajectories:
        tokens, versions, sampled = each.tokens, each.versions, len(each.own)
        if len(each.sampled) not in (0, len(tokens)) or not sampled == len(each.behavior_logprobs) == len(versions):
            return "lists of different lengths"
        if len(each.log_kept) not in (0, sampled):
            return "log-masses of some tokens only"
        if not _answered(each):
            return "answers of its environment that are not where its tokens have them"
        if len(each.entropies) > sampled:  # some engines give none
            return "more entropies than tokens"
        if versions != sorted(versions) or not all(0 <= version <= newest for version in versions):
            return "versions that are not in order, or newer than the learner's"
        known = [each.prompt, tokens, *(one["tokens"] for one in each.contexts)]
        if not each.prompt or not all(0 <= token < vocabulary for ids in known for token in ids):
            return "no prompt, or tokens that the model does not know"
        if not all(isfinite(reward or 0.0) for reward in (each.reward, each.shaping, *each.rewards.values())):
            return "a reward that is not finite"
    return ""


def _answered(response: Trajectory) -> bool:
    """Whether what is recorded of its environment is what its tokens say."""
    kinds = {"at": int, "tokens": int, "text": str | list, "over": bool, "reward": float | None}
    for answer in response.answers:
        if answer.keys() - {"state"} != kinds.keys():
            return False
        if not all(isinstance(answer[name], kind) for name, kind in kinds.items()):
            return False
    begins = [answer["at"] + answer["tokens"] for answer in response.answers if answer["tokens"]]
    forks = [(one.get("at"), one.get("tokens")) for one in response.contexts]
    if not all(isinstance(ids, list) and ids and all(isinstance(each, int) for each in ids) for _, ids in forks):
        return False
    if [at for at, _ in forks] != [begin for begin in begins if begin in dict(forks)]:
        return False
    spans = ((answer["at"], answer["tokens"]) for answer in response.answers)
    said = [place for begin, count in spans for place in range(begin, begin + min(count, len(response.tokens)))]
    return said == [place for place, own in enumerate(response.sampled) if not own]
