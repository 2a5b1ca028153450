"""The history of a run: one line in history.jsonl for each time that it was started or resumed.

A line has the run's identity (`id`), the step it went on from, the settings that changed (`changed`), and what else
decides the bits of a result (`environment`). The file is never cut back, and nothing is computed from it: it answers
what happened. Every checkpoint has the identity, too, so that a checkpoint of another run is refused.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from bapo.runs import files

FILE = "history.jsonl"
Changes = dict[str, tuple[Any, Any]]
"""Settings that changed, each with its value before and after."""


def new_id() -> str:
    """An identity that no other run has."""
    return uuid.uuid4().hex


def record(run: Path, event: str, **facts: Any) -> None:
    """Add a line, and wait until it is on the disk."""
    line = {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | facts
    path = run / FILE
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")  # by a kill
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
    files.flush(run)


def read(run: Path) -> list[dict[str, Any]]:
    """The lines that can be read. A run of an earlier version has none."""
    try:
        found = files.read(run / FILE).splitlines()
    except OSError:
        return []
    lines = []
    for line in found:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # a killed process may leave half a line
            continue
        lines += [value] if isinstance(value, dict) else []
    return lines


def identity(run: Path) -> str | None:
    """The identity of the run in a directory; None if none is recorded."""
    return next((str(line["id"]) for line in read(run) if "id" in line), None)


def told(changes: Changes) -> str:
    """Changed settings in words."""
    return ", ".join(f"{key} from {before!r} to {after!r}" for key, (before, after) in changes.items())


def changes_of(run: Path) -> list[str]:
    """What was changed on the way, one sentence for each time."""
    return [f"after {line.get('step')}: {told(line['changed'])}" for line in read(run) if line.get("changed")]
