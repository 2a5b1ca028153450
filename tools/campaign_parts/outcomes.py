"""What a case can end in, and the table of all of them.

    equal               the result is the one of an undisturbed twin, byte for byte
    our error           an error of ours, in words, with an exit code; and what it advises works
    MISMATCH            the result differs from the twin's
    FOREIGN TRACEBACK   somebody else's error reached the user
    HANG                the deadline passed, or a process was left behind
    SILENT EXIT         no result and no words

The last four are failures. Their directory is kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

OUR_CODES = (1, 2, 3, 4, 5, 130)
"""The exit codes in bapo.config.errors."""


class Kind(StrEnum):
    """The end of a case."""

    EQUAL = "equal"
    OUR_ERROR = "our error"
    MISMATCH = "MISMATCH"
    TRACEBACK = "FOREIGN TRACEBACK"
    HANG = "HANG"
    SILENT = "SILENT EXIT"


FAILURES = (Kind.MISMATCH, Kind.TRACEBACK, Kind.HANG, Kind.SILENT)


class Failed(Exception):  # noqa: N818
    """A case that failed."""

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind, self.what = kind, what


def judge(words: tuple[str, ...], code: int | None, said: str, *, sent: tuple[int, ...] = ()) -> Kind | None:
    """What the end of one command was: None if it was done or died of a signal that we sent. Raises Failed.

    `sent`: the signals that it was sent.
    """
    command = " ".join(("bapo", *words))
    if code is None:
        raise Failed(Kind.HANG, f"`{command}` did not end in time. It had said:\n{tail(said)}")
    if "Traceback (most recent call last)" in said:
        raise Failed(Kind.TRACEBACK, f"`{command}` ended with code {code}:\n{tail(said, 30)}")
    if -code in sent:
        return None
    if code == 0:
        if not said.strip():
            raise Failed(Kind.SILENT, f"`{command}` ended with code 0 and without a word")
        return None
    if code in OUR_CODES and ("bapo: " in said or "the same command continues: " in said):
        return Kind.OUR_ERROR
    raise Failed(Kind.SILENT, f"`{command}` ended with code {code} and without words of ours:\n{tail(said)}")


def tail(text: str, lines: int = 12) -> str:
    """The last lines of a text, indented."""
    return "\n".join(f"    {line[:300]}" for line in text.splitlines()[-lines:])


@dataclass
class Row:
    """What came of one kind of attack."""

    tries: int = 0
    equal: int = 0
    our_errors: int = 0
    failures: int = 0


@dataclass
class Tally:
    """The counts of a campaign, and its failures."""

    seed: int
    rows: dict[str, Row] = field(default_factory=dict)
    failed: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def row(self, name: str) -> Row:
        """The counts of one kind of attack."""
        return self.rows.setdefault(name, Row())

    def add(self, name: str, *, tries: int = 1, equal: int = 0, our_errors: int = 0) -> None:
        """Count tries of one kind that did not fail."""
        row = self.row(name)
        row.tries += tries
        row.equal += equal
        row.our_errors += our_errors

    def fail(self, name: str, error: Failed, place: str, *, tries: int = 1) -> None:
        """Count a failure and say it at once."""
        row = self.row(name)
        row.tries += tries
        row.failures += 1
        self.failed.append({"kind": str(error.kind), "attack": name, "place": place, "what": error.what})
        print(f"\n{error.kind}  {name}  {place}\n{error.what}\n", flush=True)

    def progress(self, what: str) -> None:
        """One line that says how far things are."""
        total = self.total()
        minutes = (time.monotonic() - self.began) / 60
        line = f"{minutes:5.1f} min  {total.tries} tries, {total.equal} equal, {total.our_errors} errors of ours, "
        print(f"{line}{total.failures} failures  {what}", flush=True)

    def total(self) -> Row:
        """The sum of all rows."""
        summed: Counter[str] = Counter()
        for row in self.rows.values():
            summed.update(asdict(row))
        return Row(**{name: summed[name] for name in asdict(Row())})

    def table(self) -> str:
        """All counts, for people."""
        rows = [*sorted(self.rows.items()), ("all", self.total())]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'':<{width}}  {'tries':>7}  {'equal':>7}  {'our errors':>10}  {'failures':>8}"]
        for name, row in rows:
            lines.append(f"{name:<{width}}  {row.tries:>7}  {row.equal:>7}  {row.our_errors:>10}  {row.failures:>8}")
        return "\n".join([*lines, *self.notes])

    def write(self, path: Path) -> None:
        """All counts, for programs."""
        minutes = round((time.monotonic() - self.began) / 60, 1)
        rows = {name: asdict(row) for name, row in sorted(self.rows.items())} | {"all": asdict(self.total())}
        found = {"seed": self.seed, "minutes": minutes, "rows": rows, "failed": self.failed, "notes": self.notes}
        path.write_text(json.dumps(found, indent=2) + "\n")

    def end(self, path: Path | None) -> int:
        """Show the table; returns the exit code."""
        print(f"\n{self.table()}")
        if path is not None:
            self.write(path)
        if self.failed:
            print(f"\n{len(self.failed)} failures:", file=sys.stderr)
            for failure in self.failed:
                print(f"  {failure['kind']}  {failure['attack']}  {failure['place']}", file=sys.stderr)
        return 1 if self.failed else 0
