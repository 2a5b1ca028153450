"""Where a job reports what it did: the files of its run, the screen, and the trackers that it was asked to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bapo.runs.metrics import check_declared
from bapo.runs.write import RunDirectory
from bapo.screen.view import View
from bapo.train.trackers import Trackers


@dataclass(frozen=True)
class Log:
    """Where a job reports what it did."""

    run: RunDirectory
    view: View
    trackers: Trackers = field(default_factory=Trackers)

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Append lines to metrics.jsonl. Every key must be declared."""
        for line in lines:
            check_declared(line)
        self.run.append("metrics.jsonl", *lines)
        self.trackers.send(*lines)

    def timing(self, line: dict[str, Any]) -> None:
        """Append a line to timing.jsonl."""
        self.run.append("timing.jsonl", line)
        self.trackers.send({"kind": "timing"} | line)


@dataclass(frozen=True)
class Held(Log):
    """Keeps the lines of metrics.jsonl until others, which belong before them, are written."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    def metrics(self, *lines: dict[str, Any]) -> None:
        """Keep lines. Every key must be declared."""
        for line in lines:
            check_declared(line)
        self.lines.extend(lines)
