"""From keys in a file or on the command line to a checked configuration, or to one error that lists all mistakes.

Recipes and grids that come with bapo go by their names: `bapo train offpolicy`, `bapo compare quick`. They are the
files in the folders recipes/ and grids/ of the package. The first comment of each says what it is. A file of that name
in the current directory, which may be a stranger's, does not take its place: `./offpolicy` means that one.
"""

import difflib
import json
import textwrap
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from bapo.config.errors import ConfigError
from bapo.config.known_names import hint, known_elsewhere, similar
from bapo.config.run import Config
from bapo.config.sft import SftConfig
from bapo.config.words import leaves

Schema = TypeVar("Schema", bound=BaseModel)
PACKAGE = Path(__file__).parents[1]
FOLDERS = ("recipes", "grids")

COMMANDS: dict[type[BaseModel], str] = {Config: "bapo train", SftConfig: "bapo sft"}
"""The command that runs a configuration; its --help lists the keys."""

WORDS = {
    "greater_than": "give a number greater than {gt}",
    "greater_than_equal": "give {ge} or more",
    "less_than": "give a number less than {lt}",
    "less_than_equal": "give {le} or less",
    "finite_number": "give a finite number",
    "int_type": "give a whole number",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_type": "give a number",
    "float_parsing": "give a number",
    "bool_type": "give true or false",
    "bool_parsing": "give true or false",
    "string_type": "give text, in quotes",
    "string_too_short": "give some text",
    "string_too_long": "give at most {max_length} letters",
    "literal_error": "choose {expected}",
    "tuple_type": "give a list, in brackets",
    "too_long": "give at most {max_length} values",
    "missing": "a value is missing",
    "model_type": "give a table of keys",
    "dict_type": "give a table of keys",
    "string_unicode": "give text without half characters (lone surrogates)",
    "int_parsing_size": "give a smaller number",
    "invalid_key": "give keys that are text",
    "switch": "give a number, not a switch",
    "path": "give a path that a file system can hold; a name in it can have {longest} bytes",
}
"""What to do about each kind of pydantic error. A test tries bad values on every key and finds no other kind."""
PLAIN = {"bool": "a switch", "int": "a number", "float": "a number", "str": "text"}
"""Values that a table of free keys can hold. pydantic names each of them in an error of its own."""


def read_recipe_for(command: str, path: str | Path) -> dict[str, Any]:
    """The keys of a recipe, not yet checked. Refuses a file that another command runs."""
    values = read_recipe(path)
    right = command_for(values)
    if right not in (None, command):
        raise ConfigError(f"{path} is {KINDS[right]}, and not {KINDS[command]}. Run it with `{right} {path}`.")
    return values


KINDS = {
    "bapo train": "a recipe for reinforcement learning",
    "bapo sft": "a recipe for supervised training",
    "bapo compare": "a grid of runs",
}
"""What each command runs."""


def command_for(values: dict[str, Any]) -> str | None:
    """The command that runs a file with these keys; None if they do not tell."""
    if values.keys() & {"seeds", "base", "setting"} or isinstance(values.get("objective"), list):
        return "bapo compare"
    if values.get("kind") == "sft":
        return "bapo sft"
    train, sft = (set(schema.model_fields) for schema in (Config, SftConfig))
    only = {"bapo train": train - sft, "bapo sft": sft - train}
    objective = values.get("objective")
    if "objective" in values and (not isinstance(objective, dict) or "label" in objective):
        only["bapo train"].remove("objective")  # a slip in a grid
    named = [command for command, keys in only.items() if values.keys() & keys]
    return named[0] if len(named) == 1 else None


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The keys of a recipe, not yet checked: of a file, or of one that comes with bapo.

    A file named .json is JSON; any other is TOML.
    """
    path = recipe_file(path)
    language = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text()
        values = json.loads(text) if language == "JSON" else tomllib.loads(text)
        repr(values)  # a number in another base may have more digits than can be written
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check the path.") from None
    except RecursionError:
        raise ConfigError(
            f"{path} has lists or tables inside one another, hundreds of levels deep. Remove what is not meant."
        ) from None
    except ValueError as error:
        hint = "`bapo train --list` shows examples."
        if language == "TOML" and any(word in str(error) for word in ("twice", "overwrite")):
            hint = "A list of tables is written [[name]], with two brackets."
        raise ConfigError(f"{path} is not valid {language}: {error}. {hint}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {type(values).__name__}, not keys with values. `bapo init data` writes an example."
        )
    return values


def shipped(command: str | None = None) -> dict[str, Path]:
    """The recipes or grids that a command can run, by name; with None, all of them."""
    recipes, grids = ({path.stem: path for path in sorted((PACKAGE / name).glob("*.toml"))} for name in FOLDERS)
    if command is None:
        return recipes | grids
    if command == "bapo compare":
        return grids
    wanted = command == "bapo sft"
    return {name: path for name, path in recipes.items() if ("epochs" in tomllib.loads(path.read_text())) is wanted}


def recipe_file(given: str | Path) -> Path:
    """The file that a path or a name leads to. A path that does not exist is left for whoever opens it."""
    path, known = Path(given).expanduser(), shipped()
    name = path.stem.replace("-", "_")
    is_name = str(given) == path.name and not path.suffix
    if is_name and name in known:
        return known[name]
    if path.is_file():
        return path
    if is_name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{given!r} is neither a file here nor a recipe or grid that comes with bapo. {hint}`bapo train --list`, "
            "`bapo sft --list` and `bapo compare --list` show what there is."
        )
    if not path.exists() and name in known:
        raise ConfigError(
            f"cannot read {given}: No such file or directory. {name!r} comes with bapo and goes by its name, without a "
            "directory and without .toml."
        )
    return path


def listing(command: str) -> str:
    """The names of what a command can run, each with what it is."""
    found = {name: _purpose(path) for name, path in shipped(command).items()}
    width = max(map(len, found)) + 2
    lines = [
        textwrap.fill(f"{name:<{width}}{purpose}", 100, initial_indent="  ", subsequent_indent=" " * (width + 2))
        for name, purpose in found.items()
    ]
    return "\n".join([*lines, "", f"Run one with `{command} NAME`. The files are in {PACKAGE}."])


def _purpose(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    return comment.partition(". ")[0].rstrip(".") + "."


def parse(schema: type[Schema], values: dict[str, Any], *, source: str) -> Schema:
    """A checked configuration, or one ConfigError that lists every mistake in it."""
    config, wrong = check(schema, values)
    if config is None:
        raise listed(source, wrong)
    return config


def listed(source: str, wrong: Sequence[str]) -> ConfigError:
    """One error about many mistakes, each on a line of its own, or on several."""
    return ConfigError("\n".join([f"{source}:", *(textwrap.indent(line, "  ") for line in wrong)]))


def check(schema: type[Schema], values: dict[str, Any]) -> tuple[Schema | None, list[str]]:
    """The checked configuration, or None and every mistake in it."""
    try:
        return schema.model_validate(values), []
    except ValidationError as error:
        return None, list(dict.fromkeys(line for item in error.errors() for line in _explain(item, schema)))


def draft(schema: type[Schema], values: dict[str, Any]) -> Schema:
    """A configuration that is wrong somewhere, as far as it can be read: a bad value is replaced by its default.

    Nothing may run with it. It serves to look for further mistakes.
    """
    read: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        kind, given = info.annotation, values.get(name)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            try:
                read[name] = kind.model_validate({} if given is None else given)
            except ValidationError:
                read[name] = draft(kind, given if isinstance(given, dict) else {})
        elif name in values:
            with suppress(ValidationError):
                adapter: TypeAdapter[Any] = TypeAdapter(Annotated[kind, info])  # type: ignore[arg-type]
                read[name] = adapter.validate_python(given)
    return schema.model_construct(**read)


def _explain(item: Any, schema: type[BaseModel]) -> list[str]:
    """One pydantic error in our words: a line, or several if a check between keys found several things."""
    key = _dotted(item)
    if item["type"] == "extra_forbidden":
        return [f"{key} is not a known key. {_correction(key, item, schema)}"]
    if item["type"] == "value_error":
        return str(item["msg"].removeprefix("Value error, ")).splitlines()
    if len(item["loc"]) > 2 and item["loc"][-1] in PLAIN:
        key = key.rpartition(".")[0]
        return [f"{key} = {item['input']!r}: give {', '.join(dict.fromkeys(PLAIN.values()))}"]
    told = WORDS[item["type"]].format(**item.get("ctx", {}))
    return [f"{key} = {item['input']!r}: {told}"]


def _correction(key: str, item: Any, schema: type[BaseModel]) -> str:
    """What to write instead of a key that is not known."""
    if known_elsewhere(key, schema) and (told := hint(key)):
        return told
    if key in leaves(schema):
        table, _, name = key.rpartition(".")
        return f"Write {name} into the table {table}; a name with a dot in quotes is another key."
    others = similar(key, schema, table=isinstance(item["input"], dict))
    return f"Did you mean {' or '.join(others)}?" if others else f"`{COMMANDS[schema]} --help` lists all keys."


def _dotted(item: Any) -> str:
    return ".".join(str(part) for part in item["loc"])
