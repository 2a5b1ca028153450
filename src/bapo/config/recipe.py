"""From keys in a file or on the command line to a checked configuration, or to one error that lists all mistakes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bapo.config.errors import ConfigError
from bapo.config.run import Config
from bapo.config.sft import SftConfig

Schema = TypeVar("Schema", bound=BaseModel)

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
    "literal_error": "choose {expected}",
    "tuple_type": "give a list, in brackets",
    "too_long": "give at most {max_length} values",
    "missing": "a value is missing",
    "model_type": "give a table of keys",
    "dict_type": "give a table of keys",
}
"""What to do about each kind of pydantic error; a kind that is not listed keeps pydantic's own message."""


def parse_config(values: dict[str, Any], *, source: str) -> Config:
    """The configuration of `bapo train` that these keys describe."""
    return parse(Config, values, source=source)


def parse_sft_config(values: dict[str, Any], *, source: str) -> SftConfig:
    """The configuration of `bapo sft` that these keys describe."""
    return parse(SftConfig, values, source=source)


def load(schema: type[Schema], path: str | Path) -> Schema:
    """The checked configuration in a recipe, a TOML or JSON file."""
    values = read_recipe(path)
    if isinstance(values.get("objective"), list):
        raise ConfigError(f"{path} is a grid of runs, not a recipe for one. Run it with `bapo compare {path}`.")
    if values.get("kind") == "sft" and schema is not SftConfig:
        raise ConfigError(f"{path} is a recipe for supervised training. Run it with `bapo sft {path}`.")
    return parse(schema, values, source=str(path))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The keys of a recipe, not yet checked. A file named .json is JSON; any other is TOML."""
    path = Path(path)
    language = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text()
        values = json.loads(text) if language == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check the path.") from None
    except ValueError as error:
        again = language == "TOML" and any(word in str(error) for word in ("twice", "overwrite"))
        hint = "A list of tables is written [[name]], with two brackets." if again else "See recipes/ for examples."
        raise ConfigError(f"{path} is not valid {language}: {error}. {hint}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}, not keys with values. See recipes/ for examples.")
    return values


def parse(schema: type[Schema], values: dict[str, Any], *, source: str) -> Schema:
    """A checked configuration, or one ConfigError that lists every mistake in it."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        explained = "\n".join(f"  {_explain(item, schema)}" for item in error.errors())
        raise ConfigError(f"{source}:\n{explained}") from None


def _explain(item: Any, schema: type[BaseModel]) -> str:
    """One pydantic error in our words."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = _near(key, all_keys(schema), table=isinstance(item["input"], dict))
        hint = f" Did you mean {near}?" if near else f" `{COMMANDS[schema]} --help` lists all keys."
        return f"{key} is not a known key.{hint}"
    if item["type"] == "value_error":
        return str(item["msg"].removeprefix("Value error, "))
    words = WORDS.get(item["type"])
    return f"{key} = {item['input']!r}: {words.format(**item.get('ctx', {})) if words else item['msg']}"


def _near(key: str, known: list[str], *, table: bool) -> str:
    """The keys that may have been meant: the same name in other tables, or else the one with the nearest spelling."""
    import difflib

    if table:
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return " or ".join(same or difflib.get_close_matches(key, known, n=1))


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key of a configuration, with dots between tables."""
    keys = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        keys += all_keys(kind, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return keys
