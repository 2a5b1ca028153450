"""`bapo eval`: arguments, and what a person is told at the end. Imports no torch before the arguments are checked."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo.config.errors import ConfigError, DamagedError
from bapo.evaluate.settings import DEFAULT_K, DEFAULT_MAX_TOKENS, Settings, data_names

__all__ = ["run"]

EXAMPLES = """\
examples:
  bapo eval --model demo --data countdown --k 8 --problems 64
  bapo eval --model runs/my-run/model --data aime24,aime25,math500 --k 16 --max-tokens 8192
  bapo eval --model Qwen/Qwen3-1.7B --data gsm8k=data/gsm8k/test.jsonl --k 1 --temperature 0
  bapo eval --model demo --data countdown --reward my_rewards:score

A stopped evaluation is continued by the same command: what is saved is not sampled again."""


def run(arguments: list[str]) -> int:
    """Carry out the command; returns its exit code."""
    try:
        chosen = _parser().parse_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        settings = _settings(chosen)
        with _terminated_as_interrupted():
            from bapo.evaluate.run import evaluate_model

            path, results = evaluate_model(settings, chosen.out, sys.stdout)
    except ConfigError as error:
        return _fail(2, str(error))
    except DamagedError as error:
        return _fail(3, str(error))
    except OSError as error:
        return _fail(4, f"cannot read or write: {error}. {_continue(arguments)}")
    except KeyboardInterrupt:
        return _fail(130, f"stopped; the complete chunks are saved. {_continue(arguments)}")
    from bapo.evaluate.progress import failure_note, results_table

    note = failure_note(results)
    print(f"\n{results_table(results)}\n" + (f"\n{note}\n" if note else ""))
    print(f"responses  {path / 'responses.jsonl'}")
    print(f"results    {path / 'results.json'}\nreport     {path / 'report.html'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bapo eval",
        description="Sample k responses to every problem of some data sets, score them, and report avg@k, pass@k and "
        "maj@k with 95% intervals over problems.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help='a transformers model directory or hub id, a GGUF file, or "demo"')
    add("--data", required=True, action="append", metavar="NAME,…", help="benchmarks (gsm8k, math500, aime24, aime25), "
        "countdown, files, directories, owner/name:split of the hub, or name=path")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="where everything goes; default evals/MODEL-IDENTITY, so that the same "
        "command finds it again")  # fmt: skip

    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add("--k", type=int, help=f"responses per problem; default {DEFAULT_K}, and 1 at temperature 0")
    add("--temperature", type=float, default=0.6, help="0 is greedy; default %(default)s")
    add("--max-tokens", type=int, metavar="N", help=f"longest response; default {DEFAULT_MAX_TOKENS}, or what the "
        "model has room for")  # fmt: skip
    add("--seed", type=int, default=0, help="of all random numbers; default %(default)s")

    problems = parser.add_argument_group("problems and how they are scored")
    add = problems.add_argument
    add("--problems", type=int, metavar="N", help="only the first N of every data set")
    add("--reward", metavar="R", help="math (math-verify, in processes of their own) or your module:function; default "
        "the data set's own verifier if it has one, otherwise math")  # fmt: skip
    add("--reward-seconds", type=float, default=10.0, help="longest time to score one response; default %(default)s")
    add("--template", help="text around each prompt, with {prompt} in it; default the benchmark's own")
    add("--prompt-column", metavar="COLUMN", help="default: recognised by name")
    add("--answer-column", metavar="COLUMN", help="default: recognised by name")

    model = parser.add_argument_group("the model")
    add = model.add_argument
    add("--chat", choices=("auto", "yes", "no"), default="auto", help="put prompts of plain text as a user's message; "
        "auto: if the model has a chat template")  # fmt: skip
    add("--system", default="", help="system message of chats that have none")
    add("--chat-option", action="append", default=[], metavar="KEY=VALUE", help="argument of the chat template, such "
        "as enable_thinking=false")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="auto: float32 on CPU, bfloat16 on CUDA",
    )
    add("--slots", type=int, default=128, help="responses sampled side by side; fewer need less memory; default "
        "%(default)s")  # fmt: skip
    add("--chunk", type=int, metavar="N", help="problems sampled and saved together; default 4 · slots / k")
    add("--threads", type=int, metavar="N", help="default: all cores")
    return parser


def _settings(chosen: argparse.Namespace) -> Settings:
    values: dict[str, Any] = {key: value for key, value in vars(chosen).items() if key not in ("out", "chat_option")}
    values["data"] = data_names(chosen.data)
    values["k"] = chosen.k if chosen.k is not None else 1 if chosen.temperature == 0 else DEFAULT_K
    return Settings(**values, chat_options=dict(_option(text) for text in chosen.chat_option))


def _option(text: str) -> tuple[str, bool | int | str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ConfigError(f"--chat-option {text} must have the form KEY=VALUE, such as enable_thinking=false.")
    if value in ("true", "false"):
        return key, value == "true"
    return key, int(value) if value.lstrip("-").isdecimal() else value


def _continue(arguments: list[str]) -> str:
    return f"The same command continues: {shlex.join(['bapo', 'eval', *arguments])}"


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A SIGTERM ends the evaluation as Ctrl-C does."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail(code: int, message: str) -> int:
    print(f"bapo: {message}", file=sys.stderr)
    return code
