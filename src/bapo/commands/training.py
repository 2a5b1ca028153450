"""`bapo train`, `bapo sft` and `bapo resume`: from the words of the command line to a run.

A recipe is judged together with the keys on the command line, never alone: each may need the other.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from bapo.config.errors import ConfigError
    from bapo.config.run import Config
    from bapo.config.sft import SftConfig
    from bapo.config.words import Words
    from bapo.preflight.checks import Examined

Kind = TypeVar("Kind", "Config", "SftConfig")

SWITCHES = ("list",)
"""Options of `bapo train` and `bapo sft` that are not keys."""


def train(words: list[str]) -> None:
    """Carry out `bapo train`."""
    from bapo.config.run import Config

    config, found = configured(Config, words)

    from bapo.train.run import start

    start(config, data=found.data)


def sft(words: list[str]) -> None:
    """Carry out `bapo sft`."""
    from bapo.config.sft import SftConfig

    config, found = configured(SftConfig, words)

    from bapo.train.sft import start

    start(config, demonstrations=found.demonstrations)


def resume(words: list[str]) -> None:
    """Carry out `bapo resume`."""
    from bapo.config.command_line import parse_resume
    from bapo.config.run import Config
    from bapo.config.sft import SftConfig
    from bapo.runs.write import RunDirectory

    given, keys = parse_resume(words)
    path, source = given.run, given.start
    if RunDirectory(path).values().get("kind") == "sft":
        changed = _changed(SftConfig, path, keys)

        from bapo.train.sft import resume as resume_sft

        resume_sft(path, config=changed, source=source)
    else:
        wanted = _changed(Config, path, keys)

        from bapo.train.run import resume

        resume(path, config=wanted, source=source)


def configured(schema: type[Kind], words: list[str]) -> tuple[Kind, Examined]:
    """The configuration that a recipe and the keys on the command line describe together, and what it leads to.

    One error lists everything that is wrong with it, as far as it can be known without torch.
    """
    from bapo.config.recipe import COMMANDS, check, draft, read_recipe_for
    from bapo.config.shipped import listing
    from bapo.config.words import merged, read_words

    command = COMMANDS[schema]
    given = read_words(schema, words, switches=SWITCHES)
    if "list" in given.switches:
        print(listing(command))
        raise SystemExit(0)
    values = {} if given.recipe is None else read_recipe_for(command, given.recipe)
    if "help" in given.switches:
        show_help(schema, values, prog=f"{command} [RECIPE]")
    values = merged(values, given.values)
    config, wrong = check(schema, values)
    found = looked_at(config or draft(schema, values))
    if config is None or found.wrong:
        raise _all_wrong([*wrong, *found.wrong], given)
    return config, found


def looked_at(config: Config | SftConfig) -> Examined:
    """What can be known of a run without torch. The first rank speaks for all."""
    from bapo.config.sft import SftConfig
    from bapo.preflight.checks import Examined, examine, examine_sft

    if os.environ.get("RANK", "0") != "0":
        return Examined([])
    return examine_sft(config) if isinstance(config, SftConfig) else examine(config)


def show_help(schema: type[BaseModel], values: dict[str, Any], *, prog: str) -> None:
    """Print every key with its value in the recipe, and exit with 0."""
    from bapo.config.command_line import print_help
    from bapo.config.recipe import check

    print_help(check(schema, values)[0] or schema(), prog=prog)


def _all_wrong(wrong: list[str], given: Words) -> ConfigError:
    """One error about everything that is wrong."""
    from bapo.config.errors import UsageError
    from bapo.config.recipe import listed

    sources = [*([given.recipe] if given.recipe else []), *(["command line"] if given.values else [])]
    error = listed(" with the ".join(sources) or "defaults", wrong)
    return UsageError(str(error)) if given.unknown else error


def _changed(schema: type[Kind], path: Path, keys: list[str]) -> Kind | None:
    """The configuration of a run, changed by keys; None if there are none."""
    from bapo.config.errors import UsageError
    from bapo.config.recipe import check
    from bapo.config.words import merged, read_words
    from bapo.runs.write import RunDirectory

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
