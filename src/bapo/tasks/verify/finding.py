"""Finds the function that `module:function` names, and judges a reward function's signature before it is ever called.

A function that cannot be found or called is refused with the name that the user gave and how to write it.
Functions written for TRL and verl are recognised by their parameters: TRL's take lists and return a list, ours and
verl's score one response. Nothing here needs torch.

Its module is imported, and the function called, in our process. `unharmed` undoes what they do to it: they may change
the working directory, to which relative paths refer; close or replace the standard streams, which others write to; and
switch gradients off, which the learner needs.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bapo.process import found_in, source_of, was_found
from bapo.process.limited_worker import describe
from bapo.tasks.data.columns import ANSWERS
from bapo.types import Problem

Style = Literal["ours", "verl", "trl"]
KEYWORDS: dict[Style, tuple[str, ...]] = {
    "ours": ("response", "answer", "prompt", "extra"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": ("prompts", "completions", "completion_ids"),
}
"""What functions are called with, by whom they were written for. TRL's get lists, and columns of the data as well."""
CALLED_WITH: dict[Style, str] = {
    "ours": "response, answer, prompt and extra",
    "verl": "data_source, solution_str, ground_truth and extra_info",
    "trl": "lists: prompts and completions (messages where the prompts of the data are messages, otherwise text), "
    "completion_ids and the columns of the data",
}
"""The same in words."""
OF_THE_TRAINER = ("trainer_state", "environments")
"""What TRL's own trainer gives and we do not have."""
STREAMS = (1, 2)
"""The descriptors of standard output and standard error."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Signature(NamedTuple):
    """What a reward function is called with."""

    style: Style
    named: tuple[str, ...]
    """The keywords that it names."""
    takes_all: bool
    """Whether it takes others besides."""


def find_function(name: str, what: str = "reward function", *, or_dict: bool = False) -> Any:
    """The function that `module:function` names. Its module may be in the current directory (`bapo.process.found_in`).

    Raises a ValueError that says what was not found, and where. `what`: what it calls the name; `or_dict`: it may also
    be a dict of functions.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name) or "/" in name or module_name.endswith(".py"):
        raise ValueError(f"{what} {name!r} is not of the form module:function. {written_as(name)}")
    here = os.getcwd()
    importlib.invalidate_caches()  # the file may be new
    try:
        with unharmed(), found_in(here, module_name):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{what} {name!r}: {module_name} imports {error.name}, which is missing. Install it."
            ) from error
        raise ValueError(
            f"{what} {name!r}: there is no module {error.name!r} in {here} or on Python's path. Start from the "
            "directory that holds its file, or install its package."
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(
            f"{what} {name!r}: importing {module_name} failed: {describe(error)}. Correct it, and put "
            "what belongs to a script under `if __name__ == '__main__':`."
        ) from error
    function = getattr(module, function_name, None)
    if not (callable(function) or (or_dict and isinstance(function, dict) and function)):
        defined = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(function_name, defined, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "Define it there, or name another."
        raise ValueError(f"{what} {name!r}: {module_name} has no function {function_name!r}. {hint}")
    return function


def file_of(name: str) -> str | None:
    """The file in which `find_function` would find the module of `module:function`. Nothing of it is run.

    None: there is none, or only the import itself knows.
    """
    first, *others = name.partition(":")[0].split(".")
    try:
        known = importlib.util.find_spec(first)
        look = PathFinder.find_spec if known and not was_found(first) else source_of
        spec = known or source_of(first, [os.getcwd()])
        for count in range(1, len(others) + 1):
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = look(".".join([first, *others[:count]]), list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def written_as(name: str) -> str:
    """How to write a name that is not module:function."""
    file, _, function = name.partition(":")
    path = Path((file or "my_rewards").removesuffix(".py"))
    outside = path.is_absolute() or ".." in path.parts
    where = f"Start in the directory {path.parent}, and write" if outside else "Write"
    written = f"{path.name if outside else '.'.join(path.parts)}:{function or 'score'}"
    return f"{where} the name of a file without .py, a colon and the name of a function: {written}."


def judged(name: str, function: Callable[..., Any]) -> Signature:
    """For whom the function was written, by its parameters. Raises a ValueError if it cannot be called."""
    parameters = inspect.signature(function).parameters
    style: Style = "ours"
    if "response" not in parameters:
        style = "verl" if "solution_str" in parameters else style
        style = "trl" if not parameters.keys().isdisjoint(KEYWORDS["trl"]) else style
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind not in VARIADIC
        known = parameter.name in KEYWORDS[style] or (style == "trl" and parameter.name not in OF_THE_TRAINER)
        if required and (not known or parameter.kind is parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"reward function {name!r} requires the parameter {parameter.name!r}, which is not available. It is "
                f"called by keyword with any of {', '.join(KEYWORDS[style])}{', …' * (style == 'trl')}; give every "
                "other parameter a default."
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return Signature(style, tuple(parameters), takes_all)


def arguments_of(signature: Signature, problem: Problem, responses: Sequence[str]) -> dict[str, Any]:
    """The keywords to call a function with: for one response, or, if it takes lists, for several to one problem."""
    extra, (style, named, takes_all) = dict(problem.extra), signature
    given: dict[str, Any]
    if style == "ours":
        given = {
            "response": str(responses[0]),
            "answer": problem.answer,
            "prompt": problem.prompt,
            "extra": problem.extra,
        }
    elif style == "verl":
        model = extra.get("reward_model")
        truth = model.get("ground_truth", problem.answer) if isinstance(model, dict) else problem.answer
        given = {"data_source": extra.get("data_source", problem.source), "solution_str": str(responses[0])}
        given |= {"ground_truth": truth, "extra_info": extra}
    else:
        missing = {name: problem.answer for name in named if name in ANSWERS and name not in extra}
        chat = not isinstance(problem.prompt, str)
        given = {name: [value] * len(responses) for name, value in (extra | missing).items()}
        given["prompts"] = [problem.prompt] * len(responses)
        given["completions"] = [[{"role": "assistant", "content": str(one)}] if chat else str(one) for one in responses]
        given["completion_ids"] = [list(getattr(one, "tokens", ())) for one in responses]
        given["log_extra"] = given["log_metric"] = lambda name, value: None  # nobody logs what it would like to
    return {name: value for name, value in given.items() if takes_all or name in named}


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function, or of the callable object, must be awaited."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


@contextmanager
def unharmed() -> Iterator[None]:
    """Afterwards, working directory, standard streams and gradients are as they were before."""
    where, streams = os.getcwd(), (sys.stdout, sys.stderr)
    kept = {}
    for descriptor in STREAMS:
        with suppress(OSError):  # it is closed
            kept[descriptor] = os.dup(descriptor)
    torch = sys.modules.get("torch")
    gradients = torch is None or torch.is_grad_enabled()
    for stream in streams:
        with suppress(AttributeError, TypeError):
            stream.close = stream.flush  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream in streams:
            with suppress(AttributeError, TypeError):
                del stream.close
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        sys.stdout, sys.stderr = streams
        with suppress(OSError):
            os.chdir(where)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(gradients)
