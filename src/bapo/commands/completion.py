"""What shells and editors complete: the scripts of `bapo completion`, and the JSON schemas of `bapo schema`.

Both are made from the definitions that read recipes and command lines: the keys of the configurations, and the
dataclasses of arguments.

tyro can write scripts for shells as well. Its scripts start Python at every Tab, where ours start nothing; they offer
neither the names of recipes and grids nor files after them; and they know only what tyro parses, which the keys of a
configuration are not.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from tyro.conf import Positional, arg

from bapo.commands.training import SWITCHES
from bapo.config.recipe import shipped
from bapo.config.run import ADVANTAGE_NAMES, OBJECTIVE_NAMES, Config
from bapo.config.sft import SftConfig
from bapo.config.words import leaves
from bapo.screen.terminal import write_exact

(POSITIONAL,) = Positional[int].__metadata__  # type: ignore[attr-defined]
"""tyro's mark of an argument that is given by its place."""
CHOICES = {"--objective.name": OBJECTIVE_NAMES, "--learn.advantages": ADVANTAGE_NAMES}
"""The choices of keys that any text could be given to."""


@dataclass(frozen=True)
class ShellArguments:
    """Print a script that completes the commands of bapo.

    bash: bapo completion bash > ~/.local/share/bash-completion/completions/bapo
    zsh:  add to ~/.zshrc: source <(bapo completion zsh)
    fish: bapo completion fish > ~/.config/fish/completions/bapo.fish
    """

    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(metavar="{bash,zsh,fish}")] = "bash"
    """The shell that the script is for."""


@dataclass(frozen=True)
class SchemaArguments:
    """Print the JSON schema of recipes, for editors.

    bapo schema > recipe.schema.json, and "#:schema ./recipe.schema.json" as the first line of a recipe.
    """

    kind: Annotated[Positional[Literal["train", "sft", "compare"]], arg(metavar="{train,sft,compare}")] = "train"
    """The command whose recipes or grids are described."""


@dataclass(frozen=True)
class Completed:
    """What can follow one command."""

    options: dict[str, tuple[str, ...]]
    """Options, each with its choices."""
    words: tuple[str, ...]
    """Words that are not options: names of recipes, choices of a place."""


def completion(arguments: ShellArguments, definitions: Mapping[str, type]) -> None:
    """Carry out `bapo completion`. `definitions`: what defines the arguments of each command."""
    commands = {name: completed(name, definition) for name, definition in definitions.items()}
    write_exact(_script(arguments.shell, commands))


def completed(command: str, definition: type) -> Completed:
    """What the definition of a command says can follow it."""
    if issubclass(definition, BaseModel):
        options = {f"--{key}": _choices(annotation) for key, annotation in leaves(definition).items()}
        options |= {option: choices for option, choices in CHOICES.items() if option in options}
        switches = SWITCHES.get(f"bapo {command}", ())
        options |= {f"--{switch}": () for switch in (*switches, "help")}
        return Completed(options, tuple(shipped(f"bapo {command}")) if switches else ())
    options, places = {}, list[str]()
    for name, annotation in _fields(definition):
        if name is None:
            places += _choices(annotation)
        else:
            options[f"--{name}"] = _choices(annotation)
    if command == "resume":  # keys that change
        options |= completed("doctor", Config).options
    names = tuple(shipped("bapo compare")) if command == "compare" else ()
    return Completed({**options, "--help": ()}, (*places, *names))


def _fields(kind: Any) -> Iterator[tuple[str | None, Any]]:
    """Names and types of the arguments in a dataclass, and in those inside it. None for one that is given by place."""
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        marks = getattr(annotation, "__metadata__", ())
        inner = get_args(annotation)[0] if marks else annotation
        if dataclasses.is_dataclass(inner):
            yield from _fields(inner)
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from ((key.replace("_", "-"), kind) for key, kind in leaves(inner).items())
        elif made := [mark for mark in marks if getattr(mark, "constructor_factory", None)]:
            for parameter in inspect.signature(made[0].constructor_factory()).parameters:
                yield parameter.replace("_", "-"), str
        else:
            known_as = next((str(mark.name) for mark in marks if getattr(mark, "name", None)), name)
            yield None if POSITIONAL in marks else known_as.replace("_", "-"), annotation


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


SCRIPTS = Path(__file__).parents[1] / "shells"
"""A script for each shell, in which NAMES, COMMANDS and VALUES stand for what is known of the commands."""
CASES = {
    "bash": (
        '{name}) options="{options}"; words="{words}" ;;',
        '"{name} {option}") COMPREPLY=($(compgen -W "{choices}" -- "$cur")); return ;;',
    ),
    "zsh": ("{name}) options=({options}); names=({words}) ;;", '"{name} {option}") compadd -- {choices}; return ;;'),
}
"""What a script says of a command, and of an option that has choices."""


def _script(shell: str, commands: Mapping[str, Completed]) -> str:
    """The script of a shell, with all commands in it."""
    lines = {"COMMANDS": _for_fish(commands)} if shell == "fish" else _cases(*CASES[shell], commands)
    script = (SCRIPTS / f"bapo.{shell}").read_text(encoding="utf-8")
    for place, found in lines.items():
        script = script.replace(f"\n{place}\n", "".join(f"\n{line}" for line in found) + "\n")
    return script.replace("NAMES", " ".join(commands))


def _cases(of_command: str, of_option: str, commands: Mapping[str, Completed]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"COMMANDS": [], "VALUES": []}
    for name, command in commands.items():
        options, words = " ".join(command.options), " ".join(command.words)
        found["COMMANDS"].append("        " + of_command.format(name=name, options=options, words=words))
        for option, choices in command.options.items():
            if choices:
                case = of_option.format(name=name, option=option, choices=" ".join(choices))
                found["VALUES"].append("        " + case)
    return found


def _for_fish(commands: Mapping[str, Completed]) -> list[str]:
    lines = []
    for name, command in commands.items():
        after = f'complete -c bapo -n "__bapo_command {name}"'
        lines += [f'{after} -a "{" ".join(command.words)}"'] if command.words else []
        for option, choices in command.options.items():
            allowed = f' -x -a "{" ".join(choices)}"' if choices else ""
            lines.append(f"{after} -l {option.removeprefix('--')}{allowed}")
    return lines


def schema(arguments: SchemaArguments) -> None:
    """Carry out `bapo schema`."""
    write_exact(json.dumps(schema_of(arguments.kind), indent=2) + "\n")


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON schema of what a command runs."""
    found = _recipe(SftConfig if kind == "sft" else Config)
    if kind == "compare":
        found = _grid(found)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"bapo {kind}", **found}


def _recipe(config: type[Config] | type[SftConfig]) -> dict[str, Any]:
    """The schema of a recipe. TOML has no null, so it is taken out where it only means that a key is not given."""
    schema: dict[str, Any] = json.loads(json.dumps(config.model_json_schema()).replace("#/$defs/", "#/definitions/"))
    schema["definitions"] = schema.pop("$defs")
    sections = schema["definitions"]
    if config is Config:
        sections["ObjectiveConfig"]["properties"]["name"]["enum"] = [*OBJECTIVE_NAMES]
        sections["LearnConfig"]["properties"]["advantages"]["enum"] = list(ADVANTAGE_NAMES)
    return schema


def _grid(recipe: dict[str, Any]) -> dict[str, Any]:
    """The schema of a grid: the keys of a recipe in base and in every objective and setting."""
    keys = {key: value for key, value in recipe["properties"].items() if key not in ("seed", "out")}
    text, whole = {"type": "string"}, {"type": "integer", "minimum": 0}

    def table(description: str, **more: Any) -> dict[str, Any]:
        properties = {**more, **keys}
        return {
            "type": "object",
            "description": description,
            "properties": properties,
            "additionalProperties": False,
            "required": [key for key in more if key == "label"],
        }

    entry = {"label": text | {"description": "Names the directory."}}
    return {
        "type": "object",
        "description": "A grid of runs: objectives x settings x seeds.",
        "definitions": recipe["definitions"],
        "properties": {
            "name": text | {"description": "Name of the tables."},
            "out": text | {"description": "The directory of all runs."},
            "seeds": {
                "description": "How many seeds, or a list of them.",
                "anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": whole}],
            },
            "base": table("Keys of every run.", recipe=text | {"description": "A recipe that the keys override."}),
            "objective": {"type": "array", "items": table("A row: a label, and the keys that make it.", **entry)},
            "setting": {"type": "array", "items": table("A table: a label, and the keys that make it.", **entry)},
        },
        "additionalProperties": False,
    }
