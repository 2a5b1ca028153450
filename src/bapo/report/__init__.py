"""`bapo report`: one HTML file that shows what runs did, or a page that follows them.

    write_report([Path("runs/quick")], Path("report.html"))

The page has a verdict, tables, the paper's figures from our own metrics, and responses. Nothing here computes what a
run should have logged, and nothing imports torch. The page draws from the values embedded in it, so a report can be
read without the run directories.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.numerals import counted
from bapo.report.arms import Arm, Found, find_arms
from bapo.report.contents import contents, page
from bapo.report.live import serve
from bapo.report.verdict import verdict
from bapo.runs import files
from bapo.screen.terminal import say

__all__ = ["Arguments", "Arm", "Found", "contents", "find_arms", "run", "write_report"]


@dataclass(frozen=True)
class Arguments:
    """Write one HTML file with the table, the figures and the responses of runs. It can be read offline.

    Directories are searched for runs. Runs that are damaged or unfinished are named.
    """

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...", help_behavior_hint="(required)")] = ()
    """Runs, or directories with runs below them."""
    out: Annotated[
        Path | None, option(default="RUN/report.html for one directory, otherwise report.html", metavar="FILE")
    ] = None
    """The file to write."""
    live: bool = False
    """Write no file. Serve the report on 127.0.0.1 and follow the runs."""
    port: Annotated[int | None, option(default="the first free one from 8377 on", metavar="N")] = None
    """The port of --live."""


def run(arguments: Arguments) -> int:
    """Carry out the command; returns its exit code."""
    if not arguments.runs:
        raise ConfigError("no RUN given. Name a run, or a directory with runs below it; see `bapo report --help`.")
    if arguments.live:
        return _follow(arguments.runs, arguments.port)
    return _write(arguments.runs, arguments.out)


def _write(paths: Sequence[Path], out: Path | None) -> int:
    if out is None:
        out = paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")
    found = write_report(paths, out)
    for defect in found.defects:
        say(f"bapo: {defect}", error=True)
    if not found.arms:
        raise ConfigError("there is no run to report on, so nothing was written.")
    runs, arms = sum(len(arm.runs) for arm in found.arms), len(found.arms)
    say(f"{out}: {counted(runs, 'run')} of {counted(arms, 'configuration')}")
    shown = verdict(found.arms)["verdict"]
    for line in (*shown["lines"], *shown["notes"], *(f"Sign of trouble: {sign}" for sign in shown["warnings"])):
        say(f"  {line}")
    return 0


def write_report(paths: Sequence[Path], out: Path) -> Found:
    """Read the runs at or below the paths and write their report, whole or not at all. Without a run, write nothing."""
    found = find_arms(paths)
    if not found.arms:
        return found
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with files.made(partial) as file:
            file.write(page(contents(found)).encode("utf-8"))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return found


def _follow(paths: Sequence[Path], port: int | None) -> int:
    with serve(paths, port) as server:
        try:
            for path in (path for path in paths if not path.exists()):
                say(f"{path} does not exist yet; waiting for it")
            say(f"following {', '.join(map(str, paths))} on {server.url} (Ctrl-C ends)")
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nno longer following; the runs go on")
    return 0
