"""The ledger of a run: what happened to every group, from its admission to its last use, and whether it adds up.

    admitted -> finished -> held -> trained (any number of times) -> retired, expired or evicted
                        \\-> filtered (no signal), or unscored (the verifier failed on it)
            \\-> dropped (too old, or a response that could not go on)

`ledger.jsonl` has one line for each run of equal events. It is cut back to a checkpoint like every other log, so after
a resume it tells the story of the run that counts. `balance` reads it and says what does not add up: a group that is
lost, trained on before it was there, trained on twice in one update, or older than the staleness bound allowed.

    python -m bapo.runs.ledger RUN
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    **dict.fromkeys(RELEASED, ("held",)),
}
"""Each event, and the state that a group must be in before it. Training leaves the state as it is."""


class Ledger:
    """Events that are not written yet."""

    def __init__(self) -> None:
        self._lines: list[dict[str, Any]] = []

    def record(self, event: str, group: int, *, version: int | None = None, **facts: int) -> None:
        """Note what happened to a group. Equal events in a row share a line; facts become lists beside the groups."""
        line = self._lines[-1] if self._lines else {}
        if (line.get("event"), line.get("version")) != (event, version):
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


@dataclass(frozen=True)
class Balance:
    """What became of all groups."""

    states: dict[str, int]
    """Groups by their last state: admitted (in progress), held, filtered, unscored, dropped, or how they left."""
    uses: int
    """How often groups were trained on, all together."""
    stalest: int
    """The largest age at which a group was trained on, by its oldest token, in updates."""
    wrong: list[str]
    """What does not add up; empty if the ledger balances."""

    def line(self) -> str:
        """One line for people."""
        groups = sum(self.states.values())
        parts = ", ".join(f"{count:,} {_WORDS[state]}" for state, count in sorted(self.states.items()))
        verdict = "it balances" if not self.wrong else f"{len(self.wrong)} entries do not add up: {self.wrong[0]}"
        used = f"trained on {self.uses:,} times, at most {self.stalest} updates old"
        return f"{groups:,} groups ({parts}), {used}; {verdict}"


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
    seen: set[tuple[int, int]] = set()
    wrong: list[str] = []
    stalest = 0
    for line in lines:
        event = line["event"]
        for place, group in enumerate(line["groups"]):
            if state.get(group) not in AFTER[event]:
                wrong.append(f"group {group} is {event}, but was {state.get(group, 'never admitted')} before")
            if event != "trained":
                state[group] = event
                oldest |= {group: line["oldest"][place]} if event == "held" else {}
                continue
            version, age = line["version"], line["version"] - oldest.get(group, 0)
            stalest = max(stalest, age)
            if (group, version) in seen:
                wrong.append(f"group {group} is trained on twice in the update at version {version}")
            if line["uses"][place] != uses[group]:
                wrong.append(f"group {group} is trained on as if for use {line['uses'][place]}, not {uses[group]}")
            if max_staleness is not None and age > max_staleness:
                wrong.append(f"group {group} is trained on at age {age}, above the bound of {max_staleness}")
            seen.add((group, version))
            uses[group] += 1
    missing = sorted(set(range(max(state, default=-1) + 1)) - state.keys())
    wrong += [f"group {group} was never admitted" for group in missing]
    lost = (("finished",) if ended else ()) + (("admitted",) if ended and all_used else ())
    wrong += [f"group {group} is still {_WORDS[last]} at the end" for group, last in state.items() if last in lost]
    return Balance(dict(Counter(state.values())), uses.total(), stalest, wrong)


def in_state(lines: Iterable[dict[str, Any]], wanted: str) -> set[int]:
    """The groups whose last state is this one."""
    state = {group: line["event"] for line in lines if line["event"] != "trained" for group in line["groups"]}
    return {group for group, last in state.items() if last == wanted}


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledger."""
    return [json.loads(line) for line in (run / FILE).read_text().splitlines()]


def of_run(run: Path) -> Balance:
    """The balance of the run in this directory, by its own staleness bound."""
    config = json.loads((run / "config.json").read_text())
    return balance(
        read(run),
        max_staleness=config["offpolicy"]["max_staleness"],
        ended=(run / "summary.json").exists(),
        all_used=config.get("cluster", {}).get("rollouts", 0) > 0,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bapo.runs.ledger RUN")
    try:
        found = of_run(Path(sys.argv[1]))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{sys.argv[1]} is not a run with a readable ledger: {error}. Name the directory of a training run.")
    print(found.line())
    print(*found.wrong[1:], sep="\n")
    sys.exit(bool(found.wrong))
