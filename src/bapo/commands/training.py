"""`bapo train`, `bapo sft` and `bapo resume`: from the words of the command line to a run.

A recipe is judged together with the keys on the command line, never alone: each may need the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bapo.config.errors import Answered, ConfigError, UsageError
from bapo.config.recipe import COMMANDS, check, draft, listed, listing, read_recipe_for
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.config.words import Words, merged, read_words
from bapo.preflight.examine import Examined, examine
from bapo.runs.write import RunDirectory
from bapo.screen.terminal import say

Kind = TypeVar("Kind", Config, SftConfig)

SWITCHES = {"bapo train": ("list", "dry-run"), "bapo sft": ("list",)}
"""Options that are not keys."""


def train(words: list[str]) -> int:
    """Carry out `bapo train`."""
    request = read_request(Config, words)
    if "dry-run" in request.given.switches:
        return show_plan(request)
    config = request.checked_config()

    from bapo.train.run import start

    start(config, data=request.found.data)
    return 0


def sft(words: list[str]) -> None:
    """Carry out `bapo sft`."""
    request = read_request(SftConfig, words)
    config = request.checked_config()

    from bapo.train.sft import start

    start(config, demonstrations=request.found.demonstrations)


def resume(words: list[str]) -> None:
    """Carry out `bapo resume`."""
    from bapo.config.command_line import parse_resume

    given, keys = parse_resume(words)
    if RunDirectory(given.run).values().get("kind") == "sft":
        changed = _changed(SftConfig, given.run, keys)

        from bapo.train.sft import resume as resume_sft

        resume_sft(given.run, config=changed, source=given.start)
    else:
        wanted = _changed(Config, given.run, keys)

        from bapo.train.run import resume

        resume(given.run, config=wanted, source=given.start)


@dataclass(frozen=True)
class Request(Generic[Kind]):
    """What a command line asks for, and everything that is wrong with it as far as it can be known without torch."""

    given: Words
    config: Kind | None
    """The configuration; None if it is wrong."""
    draft: Kind
    """The configuration, or as much of it as can be read."""
    wrong: list[str]
    found: Examined

    def checked_config(self) -> Kind:
        """The configuration. Raises one error that lists everything that is wrong with it."""
        if self.config is None or self.wrong:
            raise _all_wrong(self.wrong, self.given)
        return self.config


def read_request(schema: type[Kind], words: list[str], *, prog: str | None = None) -> Request[Kind]:
    """The configuration that a recipe and the keys on the command line describe together.

    Answers --list and --help by itself. Of several ranks, the first one looks for mistakes, and speaks for all.
    """
    command = COMMANDS[schema]
    given = read_words(schema, words, switches=SWITCHES[command])
    if "list" in given.switches:
        say(listing(command))
        raise Answered(0)
    values = {} if given.recipe is None else read_recipe_for(command, given.recipe)
    if "help" in given.switches:
        from bapo.config.command_line import print_help

        print_help(check(schema, values)[0] or schema(), prog=f"{prog or command} [RECIPE]")
    values = merged(values, given.values)
    wrong: list[str]
    config, wrong = check(schema, values)
    readable = draft(schema, values) if config is None else config
    found: Examined = Examined([]) if os.environ.get("RANK", "0") != "0" else examine(readable)
    return Request(given, config, readable, [*wrong, *found.wrong], found)


def show_plan(request: Request[Config]) -> int:
    """Print what a run would be, and everything that is wrong with it. Returns the exit code.

    Keys that cannot be read have no plan: one with defaults in their place would be the plan of another run. So they
    are told at once, before torch is imported.
    """
    if request.config is None:
        raise _all_wrong(request.wrong, request.given)

    from bapo.train.dry_run import WARNING, dry_run

    lines, wrong = dry_run(request.config, request.found.data, request.wrong)
    say("\n".join(lines))
    if wrong:
        raise _all_wrong(wrong, request.given)
    verdict = "Nothing stops this run" if any(line.startswith(WARNING) for line in lines) else "Nothing is wrong"
    say(f"\n{verdict}. Without --dry-run, the same command starts the run.")
    return 0


def _all_wrong(wrong: list[str], given: Words) -> ConfigError:
    """One error about everything that is wrong."""
    sources = [*([given.recipe] if given.recipe else []), *(["command line"] if given.values else [])]
    error = listed(" with the ".join(sources) or "defaults", wrong)
    return UsageError(str(error)) if given.unknown else error


def _changed(schema: type[Kind], path: Path, keys: list[str]) -> Kind | None:
    """The configuration of a run, changed by keys; None if there are none."""
    if not keys:
        return None
    given = read_words(schema, keys)
    if given.recipe is not None:
        raise UsageError(
            f"{given.recipe!r} is neither a key nor the value of one. A resumed run takes no recipe; its settings are "
            f"in {path / 'config.json'}. Give changed keys as options, such as --steps 80."
        )
    config, wrong = check(schema, merged(RunDirectory(path).config(schema).model_dump(mode="json"), given.values))
    if config is None:
        raise _all_wrong(wrong, given)
    return config
