"""`bapo completion`: a script that completes commands, options, their choices and the names of recipes in a shell.

The script is made from the same definitions that read the command line: the keys of the configurations, and the
dataclasses of arguments. It is static, so that pressing Tab starts no Python. tyro can write such a script as well, but
its script starts Python at every Tab, and completes neither the names of recipes nor files and run directories.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from tyro.conf import Positional, arg

from bapo.commands.training import SWITCHES
from bapo.config.command_line import parse_arguments
from bapo.config.run import ADVANTAGE_NAMES, OBJECTIVE_NAMES
from bapo.config.shipped import shipped
from bapo.config.words import leaves
from bapo.screen.terminal import write_exact

(POSITIONAL,) = Positional[int].__metadata__  # type: ignore[attr-defined]
"""tyro's mark of an argument that is given by its place."""
CHOICES = {"--objective.name": ("auto", *OBJECTIVE_NAMES), "--learn.advantages": ADVANTAGE_NAMES}
"""The choices of keys that any text could be given to."""


@dataclass(frozen=True)
class Arguments:
    """Print a script that completes the commands of bapo.

    bash: bapo completion bash > ~/.local/share/bash-completion/completions/bapo
    zsh:  add to ~/.zshrc: source <(bapo completion zsh)
    fish: bapo completion fish > ~/.config/fish/completions/bapo.fish
    """

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="{bash,zsh,fish}")] = "bash"
    """The shell that the script is for."""


@dataclass(frozen=True)
class Completed:
    """What can follow one command."""

    options: dict[str, tuple[str, ...]]
    """Options, each with its choices."""
    words: tuple[str, ...]
    """Words that are not options: names of recipes, choices of a place."""


def completion(words: list[str], definitions: Mapping[str, str]) -> int:
    """Carry out `bapo completion`. `definitions`: module:name of what defines the arguments of each command."""
    shell = parse_arguments(Arguments, words, prog="bapo completion").shell
    commands = {name: completed(name, definition) for name, definition in definitions.items()}
    write_exact({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands) + "\n")
    return 0


def completed(command: str, definition: str) -> Completed:
    """What the definition of a command says can follow it."""
    if not definition:
        return Completed({"--help": ()}, ())
    module, _, name = definition.partition(":")
    kind = getattr(importlib.import_module(module), name)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        options = {f"--{key}": _choices(annotation) for key, annotation in leaves(kind).items()}
        switches = SWITCHES.get(f"bapo {command}", ())
        recipes = shipped(f"bapo {command}") if switches else {}
        options |= {option: choices for option, choices in CHOICES.items() if option in options}
        options |= {f"--{switch}": () for switch in (*switches, "help")}
        return Completed(options, tuple(recipes))
    options, places = {}, list[str]()
    for field, annotation in _fields(kind, required_by_place=command in ("resume", "ledger", "fetch-smollm2")):
        choices = _choices(annotation)
        if field is None:
            places += choices
        else:
            options[f"--{field}"] = choices
    if command == "resume":  # keys that change
        options |= completed("doctor", "bapo.config.run:Config").options
    names = tuple(shipped("bapo compare")) if command == "compare" else ()
    return Completed({**options, "--help": ()}, (*places, *names))


def _fields(kind: Any, *, required_by_place: bool) -> Iterator[tuple[str | None, Any]]:
    """Names and types of the arguments in a dataclass, and in those inside it. None for one that is given by place."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        marks = getattr(annotation, "__metadata__", ())
        inner = get_args(annotation)[0] if marks else annotation
        if dataclasses.is_dataclass(inner):
            yield from _fields(inner, required_by_place=required_by_place)
            continue
        if made := [mark for mark in marks if getattr(mark, "constructor_factory", None)]:
            for name in inspect.signature(made[0].constructor_factory()).parameters:
                yield name.replace("_", "-"), str
            continue
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        by_place = POSITIONAL in marks or (required and required_by_place)
        named = next((str(mark.name) for mark in marks if getattr(mark, "name", None)), field.name)
        yield None if by_place else named.replace("_", "-"), annotation


def _choices(annotation: Any) -> tuple[str, ...]:
    """The texts that a type allows."""
    origin = get_origin(annotation)
    if origin is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    if origin is Annotated:
        return _choices(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(choice for part in get_args(annotation) for choice in _choices(part))
    return ()


def _with_choices(commands: Mapping[str, Completed]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Command, option and choices of every option that has some."""
    for name, command in commands.items():
        yield from ((name, option, choices) for option, choices in command.options.items() if choices)


def _bash(commands: Mapping[str, Completed]) -> str:
    valued = [
        f'        "{name} {option}") COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$cur")); return ;;'
        for name, option, choices in _with_choices(commands)
    ]
    known = [
        f'        {name}) options="{" ".join(command.options)}"; words="{" ".join(command.words)}" ;;'
        for name, command in commands.items()
    ]
    return "\n".join(
        [
            "_bapo() {",
            '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"',
            '    local command="${COMP_WORDS[1]}" options="" words=""',
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f'        COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$cur")); return',
            "    fi",
            '    case "$command $prev" in',
            *valued,
            "    esac",
            '    case "$command" in',
            *known,
            "    esac",
            '    case "$cur" in',
            '        -*) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;',
            '        *) COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur")) ;;',
            "    esac",
            "}",
            "complete -o filenames -F _bapo bapo",
        ]
    )


def _zsh(commands: Mapping[str, Completed]) -> str:
    valued = [
        f'        "{name} {option}") compadd -- {" ".join(choices)}; return ;;'
        for name, option, choices in _with_choices(commands)
    ]
    known = [
        f"        {name}) options=({' '.join(command.options)}); names=({' '.join(command.words)}) ;;"
        for name, command in commands.items()
    ]
    return "\n".join(
        [
            "_bapo() {",
            "    local -a options names",
            "    if (( CURRENT == 2 )); then",
            f"        compadd -- {' '.join(commands)} --help --version; return",
            "    fi",
            '    case "$words[2] $words[CURRENT-1]" in',
            *valued,
            "    esac",
            '    case "$words[2]" in',
            *known,
            "    esac",
            "    if [[ $PREFIX == -* ]]; then",
            "        compadd -- $options",
            "    else",
            "        (( $#names )) && compadd -- $names",
            "        _files",
            "    fi",
            "}",
            "(( $+functions[compdef] )) || { autoload -U compinit && compinit }",
            "compdef _bapo bapo",
        ]
    )


def _fish(commands: Mapping[str, Completed]) -> str:
    lines = [
        "function __bapo_command",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = "$argv[1]"',
        "end",
        f'complete -c bapo -n "__bapo_command \'\'" -f -a "{" ".join(commands)} --help --version"',
    ]
    for name, command in commands.items():
        after = f'complete -c bapo -n "__bapo_command {name}"'
        if command.words:
            lines.append(f'{after} -a "{" ".join(command.words)}"')
        for option, choices in command.options.items():
            allowed = f' -x -a "{" ".join(choices)}"' if choices else ""
            lines.append(f"{after} -l {option.removeprefix('--')}{allowed}")
    return "\n".join(lines)
