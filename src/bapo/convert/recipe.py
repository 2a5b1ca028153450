"""From the settings of TRL or verl to the keys of a recipe, by the table of names (`config/known_names.toml`).

A setting that the table gives a key becomes that key; `rules.py` has what needs more. What TRL and verl do if nothing
is set is in the table, too: the recipe says it wherever we would do something else. Nothing is dropped in silence:
every setting ends in an `Outcome`, the keys that it became, or why it became none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bapo.config.known_names import NAMES, UNSET, Family, Known, find, names_of
from bapo.config.run import Config
from bapo.config.words import flat, leaves
from bapo.convert.rules import RULES, TOGETHER, same
from bapo.convert.settings import OFF, Left, Outcome, Setting, Theirs, Unknown, check_values
from bapo.types import batches_per_pass

NO_COUNTERPART, AT_RUN_TIME = "bapo has no such setting", "computed at run time"
HELD_OUT = 0.1
"""The share of the problems that is held out where nobody named others to evaluate on."""


@dataclass(frozen=True)
class Converted:
    """What settings became."""

    keys: dict[str, Any]
    """The keys of the recipe, with dots between tables."""
    outcomes: list[Outcome]
    """What became of each setting, in their order."""
    why: dict[str, str]
    """Why a key is there that no setting asks for, or why one is not there that the recipe should have."""


def convert(family: Family, settings: list[Setting], *, processes: int = 1) -> Converted:
    """The keys that settings become."""
    theirs, ours = Theirs(family, settings, processes), dict(flat(Config().model_dump()))
    keys: dict[str, Any] = {}
    became: dict[str, dict[str, Any] | str] = {}
    why: dict[str, str] = {}
    for key, known in _by_key(family).items():
        names = theirs.named(known)
        is_given = any(name in theirs.given for name in names)
        if not is_given and key not in RULES and not any(name in UNSET[family] for name in names):
            continue
        try:
            found = RULES.get(key, same)(theirs, key, known)
            check_values(found)
        except (Left, TypeError, ValueError, ArithmeticError) as error:
            told = str(error) if isinstance(error, Left) else f"a value of it cannot be read ({error})"
            became |= dict.fromkeys(names, told)
            why |= {} if is_given else {key: told}
            continue
        keys |= {name: value for name, value in found.items() if is_given or value != ours.get(name)}
        became |= dict.fromkeys(names, found)
    for key, value, reason in _completed(family, keys):
        keys[key], why[key] = value, reason
    outcomes = {id(setting): _outcome(theirs, name, became.get(name)) for name, setting in theirs.given.items()}
    outcomes |= {id(setting): Outcome(setting, remark=_why_not(family, setting)) for setting in theirs.unnamed}
    replaced = "it is given again, and the last one counts"
    return Converted(keys, [outcomes.get(id(one), Outcome(one, remark=replaced)) for one in settings], why)


def _by_key(family: Family) -> dict[str, list[Known]]:
    """The settings that make a key, for each key that exists; those that go together are under one of their keys."""
    known, found = leaves(Config), dict[str, list[Known]]()
    for row in NAMES:
        if row.key in known and names_of(row, family):
            found.setdefault(TOGETHER.get(row.key, row.key), []).append(row)
    return found


def _outcome(theirs: Theirs, name: str, became: dict[str, Any] | str | None) -> Outcome:
    """`became`: the keys that a rule made of a setting, or why it made none."""
    setting = theirs.given[name]
    if isinstance(setting.value, Unknown):
        return Outcome(setting, remark=AT_RUN_TIME)
    if name in theirs.left:
        return Outcome(setting, remark=theirs.left[name])
    if isinstance(became, dict):
        remark = theirs.remarks.get(name, setting.note)
        return Outcome(setting, became, remark if became else theirs.remarks.get(name, OFF))
    return Outcome(setting, remark=became or _why_not(theirs.family, setting))


def _why_not(family: Family, setting: Setting) -> str:
    """Why a setting has no key."""
    found = find(setting.name, [family])
    if isinstance(setting.value, Unknown):
        return AT_RUN_TIME
    if found is None:
        return NO_COUNTERPART
    known, name = found
    if name in UNSET[family] and setting.value == UNSET[family][name]:
        return OFF
    if known.key:
        return f"another setting of this name was taken. {known.remark}".strip()
    return known.remark.rstrip(".")


def _completed(family: Family, keys: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """What a recipe needs besides, so that its keys can work together, and why."""
    if not keys.get("task.train"):
        yield "task.name", "data", "set task.train"
    if not keys.get("task.test") and not keys.get("task.holdout"):
        yield "task.holdout", HELD_OUT, "every run is evaluated, and no other problems are named"
    if family == "verl" and not keys.get("task.reward"):
        yield "task.reward", "math", "verl chooses a verifier by data_source"
    if family == "trl":
        yield "model.chat", "no", "TRL leaves text prompts as they are"
    prompts, groups, reuse = (keys.get(key) for key in ("rollout.prompts", "learn.batch_groups", "offpolicy.reuse"))
    if prompts and groups:
        off, oldest = Config().offpolicy, (reuse or 1) * batches_per_pass(prompts, groups) - 1
        if oldest > off.max_staleness:
            yield "offpolicy.max_staleness", oldest, "the updates of one step"
        if 2 * prompts > off.replay_capacity:
            yield "offpolicy.replay_capacity", 2 * prompts, "twice rollout.prompts"
