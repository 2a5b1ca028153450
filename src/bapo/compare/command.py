"""`bapo compare`: its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from bapo.compare import compare
from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.recipe import listing
from bapo.screen.terminal import say


@dataclass(frozen=True)
class Arguments:
    """Compare objectives and settings over several seeds.

    Starts the runs of a grid that are missing, several at a time, continues those that were stopped, and prints a table
    of all of them.
    """

    grid: Annotated[Positional[Path | None], arg(metavar="GRID", help_behavior_hint="(required)")] = None
    """The objectives, settings and seeds: a TOML file, or the name of a grid that comes with bapo, such as quick."""
    parallel: Annotated[int | None, option(default="one per core; 4 on a GPU", metavar="N")] = None
    """How many runs at a time."""
    only: Annotated[tuple[str, ...], UseAppendAction, option(default="all runs", metavar="PATTERN")] = ()
    """Run only the runs whose SETTING/OBJECTIVE/seed-N matches, e.g. 'reuse-16/*' or '*/grpo/seed-0'. May be given more
    than once."""
    retry: bool = False
    """Set damaged runs aside and start them again."""
    dry_run: bool = False
    """Check the grid and print what would be done."""
    list: bool = False
    """Print the grids that come with bapo."""


def run(arguments: Arguments) -> int:
    """Carry out the command; returns its exit code."""
    if arguments.list:
        say(listing("bapo compare"))
        return 0
    if arguments.grid is None:
        raise ConfigError("no grid given. Try `bapo compare quick`; `bapo compare --list` shows all of them.")
    return compare(
        arguments.grid,
        parallel=arguments.parallel,
        only=arguments.only,
        retry=arguments.retry,
        dry_run=arguments.dry_run,
    )
