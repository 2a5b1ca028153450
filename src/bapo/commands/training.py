"""`bapo train`, `bapo sft` and `bapo resume`: from the words of the command line to a run.

A recipe is judged together with the keys on the command line, never alone: each may need the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from bapo.config.run import Config
    from bapo.config.sft import SftConfig
    from bapo.config.words import Words

Schema = TypeVar("Schema", bound="BaseModel")
Kind = TypeVar("Kind", "Config", "SftConfig")


def train(words: list[str]) -> None:
    """Carry out `bapo train`."""
    from bapo.config.run import Config

    config = configured(Config, words)

    from bapo.train.run import start

    start(config)


def sft(words: list[str]) -> None:
    """Carry out `bapo sft`."""
    from bapo.config.sft import SftConfig

    config = configured(SftConfig, words)

    from bapo.train.sft import start

    start(config)


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


def configured(schema: type[Schema], words: list[str]) -> Schema:
    """The configuration that a recipe and the keys on the command line describe together."""
    from bapo.config.recipe import COMMANDS, read_recipe_for
    from bapo.config.words import merged, read_words

    command = COMMANDS[schema]
    given = read_words(schema, words)
    values = {} if given.recipe is None else read_recipe_for(command, given.recipe)
    if "help" in given.switches:
        show_help(schema, values, prog=f"{command} [RECIPE]")
    return checked(schema, merged(values, given.values), given)


def show_help(schema: type[BaseModel], values: dict[str, Any], *, prog: str) -> None:
    """Print every key with its value in the recipe, and exit with 0."""
    from bapo.config.command_line import print_help
    from bapo.config.recipe import check

    print_help(check(schema, values)[0] or schema(), prog=prog)


def checked(schema: type[Schema], values: dict[str, Any], given: Words) -> Schema:
    """The configuration with these keys, or one error that lists everything that is wrong with them."""
    from bapo.config.errors import UsageError
    from bapo.config.recipe import check, listed

    config, wrong = check(schema, values)
    if config is None:
        sources = [*([given.recipe] if given.recipe else []), *(["command line"] if given.values else [])]
        error = listed(" with the ".join(sources), wrong)
        raise UsageError(str(error)) if given.unknown else error
    return config


def _changed(schema: type[Kind], path: Path, keys: list[str]) -> Kind | None:
    """The configuration of a run, changed by keys; None if there are none."""
    from bapo.config.errors import UsageError
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
    return checked(schema, merged(RunDirectory(path).config(schema).model_dump(mode="json"), given.values), given)
