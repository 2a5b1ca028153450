"""The history of a run: one line in history.jsonl for each time that it, or a part of it, was started again.

    start, resume    the run's identity (`id`), the step it went on from, the settings that changed (`changed`), and
                     what else decides the bits of a result (`environment`)
    restart          on a cluster, a rollout actor or all learner ranks: who, why, after how many steps, what became of
                     the work

The file is never cut back, and no result is computed from it: it answers what happened. Every checkpoint has the
identity, too, so that a checkpoint of another run is refused.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bapo.config.numerals import counted
from bapo.runs import files

FILE = "history.jsonl"
LEARNER = "learner"  # how a restart names all learner ranks together
Changes = dict[str, tuple[Any, Any]]  # settings that changed, each with its value before and after


@dataclass(frozen=True)
class Restart:
    """A rollout actor that was replaced, or the learner, whose ranks all start again."""

    who: str
    why: str
    responses: int = 0
    """Responses that a rollout actor was given. They continue elsewhere."""
    tokens: int = 0
    """Tokens of these responses that had arrived."""
    updates: int = 0
    """Updates that the learner takes again."""

    def line(self) -> str:
        """One sentence for people."""
        if self.who == LEARNER:
            return f"all learner ranks start again, with {counted(self.updates, 'update')} to repeat: {self.why}"
        if not self.responses:
            return f"{self.who}, which had no responses, is replaced: {self.why}"
        theirs = f"{counted(self.responses, 'response')} ({counted(self.tokens, 'token')} already streamed)"
        return f"{self.who} is replaced, and others go on with its {theirs}: {self.why}"


def record(run: Path, event: str, **facts: Any) -> None:
    """Add a line, and wait until it is on the disk."""
    line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | facts
    files.append(run / FILE, json.dumps(line).encode() + b"\n")


def read(run: Path) -> list[dict[str, Any]]:
    """The lines that can be read."""
    try:
        found = files.read(run / FILE).splitlines()
    except OSError:
        return []
    lines = []
    for line in found:
        with suppress(ValueError, RecursionError, TypeError, AttributeError):  # a killed process may leave half a line
            value = json.loads(line)
            pairs = value.get("changed", {}).values()
            whole = isinstance(value.get("environment", {}), dict)
            lines += [value] if whole and all(isinstance(p, list) and len(p) == 2 for p in pairs) else []
    return lines


def record_restart(run: Path, restart: Restart, *, step: int) -> None:
    """Add the line of a restart after this many completed steps."""
    record(run, "restart", step=step, **{name: value for name, value in asdict(restart).items() if value != 0})


def restarts(run: Path) -> dict[str, int]:
    """How often each actor of a run was restarted, over all times that the run was started or resumed."""
    return dict(sorted(Counter(str(line.get("who")) for line in read(run) if line.get("event") == "restart").items()))


def identity(run: Path) -> str | None:
    """The identity of the run in a directory; None if none is recorded."""
    return next((str(line["id"]) for line in read(run) if "id" in line), None)


def told(changes: Changes) -> str:
    """Changed settings in words."""
    return ", ".join(f"{key} from {before!r} to {after!r}" for key, (before, after) in changes.items())


def changes_of(run: Path) -> list[str]:
    """What was changed on the way, one sentence for each time."""
    return [f"after {line.get('step')}: {told(line['changed'])}" for line in read(run) if line.get("changed")]
