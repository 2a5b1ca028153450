"""The ledger of a run: what happened to every group, from its admission to its last use, and whether it adds up.

    admitted -> finished -> held -> trained (any number of times) -> retired, expired or evicted
                        \\-> filtered (no signal), or unscored (the verifier failed on it)
            \\-> dropped (too old, or a response that could not go on, or its environment or grader failed: `cause`)

An update that was skipped because its numbers are not finite (`learn/health.py`) has used none of its groups: `skipped`
takes `trained` back.

`ledger.jsonl` has one line for each run of equal events. It is cut back to a checkpoint like every other log, so after
a resume it tells the story of the run that counts. `balance` reads it and says what does not add up: a group that is
lost, trained on before it was there, trained on twice in one update, or older than the staleness bound allowed.
`bapo ledger RUN` prints that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from bapo.config.errors import CheckpointError, ConfigError
from bapo.config.numerals import counted
from bapo.runs import files

FILE = "ledger.jsonl"
RELEASED = ("retired", "expired", "evicted")
AFTER = {
    "admitted": (None,),
    "finished": ("admitted",),
    "dropped": ("admitted",),
    "held": ("finished",),
    "filtered": ("finished",),
    "unscored": ("finished",),
    "trained": ("held",),
    "skipped": ("held", *RELEASED),
    **dict.fromkeys(RELEASED, ("held",)),
}
"""Each event, and the state that a group must be in before it."""
USES = ("trained", "skipped")  # events that leave the state as it is
_COMMON = {"event", "version", "groups"}
NEEDED = {"held": ("oldest",), "trained": ("uses",)}  # facts that an event has for each of its groups


class Ledger:
    """Events that are not written yet."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []

    def record(self, event: str, group: int, *, version: int | None = None, **facts: int | str) -> None:
        """Note what happened to a group. Equal events in a row share a line; facts become lists beside the groups."""
        line = self._lines[-1] if self._lines else {}
        if (line.get("event"), line.get("version")) != (event, version) or facts.keys() != line.keys() - _COMMON:
            line = {"event": event} | ({} if version is None else {"version": version}) | {"groups": []}
            line |= {name: [] for name in facts}
            self._lines.append(line)
        line["groups"].append(group)
        for name, value in facts.items():
            line[name].append(value)

    def take(self) -> list[dict[str, Any]]:
        """The lines to write now."""
        lines, self._lines = self._lines, []
        return lines

    @property
    def written(self) -> bool:
        """Whether no event is left to be written."""
        return not self._lines


@dataclass(frozen=True)
class Balance:
    """What became of all groups."""

    states: dict[str, int]
    """Groups by their last state: admitted (in progress), held, filtered, unscored, dropped, or how they left."""
    uses: int
    """How often groups were trained on, all together."""
    stalest: int
    """The largest age at which a group was trained on, by its oldest token, in updates."""
    mistakes: dict[str, list[str]]
    """What does not add up: each kind of mistake, with a sentence for each time that it was made."""

    @property
    def wrong(self) -> list[str]:
        """All mistakes; empty if the ledger balances."""
        return [told for listed in self.mistakes.values() for told in listed]

    def line(self) -> str:
        """One line for people."""
        states = ", ".join(f"{count:,} {_WORDS[state]}" for state, count in sorted(self.states.items()))
        used = f"trained on {counted(self.uses, 'time')}, at most {counted(self.stalest, 'update')} old"
        verdict = f"{len(self.wrong):,} entries do not add up: {self.wrong[0]}" if self.wrong else "it balances"
        return f"{counted(sum(self.states.values()), 'group')} ({states}), {used}; {verdict}"

    def table(self) -> str:
        """The same, and below it each kind of mistake once."""
        lines = [self.line()]
        for kind, told in sorted(self.mistakes.items(), key=lambda item: -len(item[1])):
            lines += [f"  {counted(len(told), 'time')}: {kind}", *(f"      {one}" for one in told[:EXAMPLES])]
            lines += [f"      and {len(told) - EXAMPLES:,} more"] if len(told) > EXAMPLES else []
        return "\n".join(lines)


MOST_MISSING = 10_000
"""How many groups that were never admitted are counted. A damaged ledger may skip billions."""
EXAMPLES = 3  # how many mistakes of the same kind are told
_WORDS = {
    "admitted": "in progress",
    "finished": "waiting for a rollout",
    "held": "held",
    "dropped": "dropped",
    "filtered": "without a signal",
    "unscored": "without rewards",
    "retired": "used up",
    "expired": "too old",
    "evicted": "evicted",
}


def balance(
    lines: Iterable[dict[str, Any]], *, max_staleness: int | None = None, ended: bool = False, all_used: bool = False
) -> Balance:
    """Follow every group through the ledger.

    `ended`: the run is over, so no group may be left between its last response and its rollout. `all_used`: it finishes
    what it admits, as a run on a cluster does, so none may be in progress.
    """
    state: dict[int, str] = {}
    oldest: dict[int, int] = {}
    uses: Counter[int] = Counter()
    ages: dict[tuple[int, int], int] = {}  # of every group in every update that used it
    mistakes: dict[str, list[str]] = {}

    def add_mistake(group: int, what: str, where: str = "") -> None:
        mistakes.setdefault(f"a group {what}", []).append(f"group {group} {what}{where}")

    for line in lines:
        event = line["event"]
        for place, group in enumerate(line["groups"]):
            if state.get(group) not in AFTER[event]:
                add_mistake(group, f"is {event}, but was {state.get(group, 'never admitted')} before")
            if event not in USES:
                state[group] = event
                oldest |= {group: line["oldest"][place]} if event == "held" else {}
                continue
            version = line.get("version", 0)
            if event == "skipped":
                if ages.pop((group, version), None) is None:
                    add_mistake(group, "is skipped in an update that has not used it", f", at version {version}")
                else:
                    uses[group] -= 1
                continue
            age = version - oldest.get(group, 0)
            if (group, version) in ages:
                add_mistake(group, "is trained on twice in one update", f", at version {version}")
            if line["uses"][place] != uses[group]:
                where = f": {line['uses'][place]} instead of {uses[group]}, at version {version}"
                add_mistake(group, "is trained on with a wrong number of uses", where)
            if max_staleness is not None and age > max_staleness:
                where = f": at age {age}, at version {version}"
                add_mistake(group, f"is trained on above the staleness bound of {max_staleness}", where)
            ages[group, version] = age
            uses[group] += 1
    missing = (group for last, next in pairwise([-1, *sorted(state)]) for group in range(last + 1, next))
    for group in islice(missing, MOST_MISSING):
        add_mistake(group, "was never admitted")
    for group, last in state.items() if ended else ():
        if last == "finished" or (last == "admitted" and all_used):
            add_mistake(group, f"is still {_WORDS[last]} at the end")
    return Balance(dict(Counter(state.values())), uses.total(), max(ages.values(), default=0), mistakes)


def in_state(lines: Iterable[dict[str, Any]], wanted: str) -> set[int]:
    """The groups whose last state is this one."""
    state = {group: line["event"] for line in lines if line["event"] not in USES for group in line["groups"]}
    return {group for group, last in state.items() if last == wanted}


def read(run: Path, size: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run's ledger. A process that is at work, or was killed, may leave half a line, which is left out.

    `size`: look only at so many bytes. Raises CheckpointError if the file is damaged.
    """
    *whole, _ = files.read(run / FILE)[:size].split(b"\n")
    return [_line(data, f"{run / FILE}, line {number},") for number, data in enumerate(whole, start=1)]


def _line(data: bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(data)
        columns = [line[name] for name in ("groups", *NEEDED.get(line["event"], ()))]
        numbers = [number for column in columns for number in column] + [line.get("version", 0)]
        even = all(len(column) == len(columns[0]) for column in columns)
        if line["event"] in AFTER and even and all(isinstance(each, int) and 0 <= each < 2**53 for each in numbers):
            return dict(line)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{where} is damaged: it is not an entry of a ledger. Restore the file from a copy.")


def of_run(run: Path) -> Balance:
    """The balance of the run in this directory, by its own staleness bound."""
    try:
        config = files.read_object(run / "config.json")
        bound, cluster = config["offpolicy"]["max_staleness"], config.get("cluster", {})
        rollouts = cluster.get("rollouts", 0) if isinstance(cluster, dict) else None
        if not isinstance(bound, int) or not isinstance(rollouts, int):
            raise ValueError("offpolicy.max_staleness and cluster.rollouts must be whole numbers")
        lines = read(run)
    except (FileNotFoundError, NotADirectoryError, KeyError):
        which = f"Name the directory of a run of `bapo train`, which holds {FILE}."
        raise ConfigError(f"{run} has no ledger. {which}") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{run / 'config.json'} is damaged: {error}. Restore the file from a copy.") from None
    return balance(lines, max_staleness=bound, ended=(run / "summary.json").exists(), all_used=rollouts > 0)
