"""From keys, in a file or given otherwise, to a checked configuration, or to one error that lists all that is wrong."""

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
WORDS = {
    "tuple_type": "give a list, in brackets",
    "model_type": "give a table of keys",
    "dict_type": "give a table of keys",
}
"""Kinds of pydantic errors whose own message speaks of Python."""


def load_config(path: str | Path) -> Config:
    """The configuration in a recipe, TOML or JSON."""
    values = read_recipe(path)
    if isinstance(values.get("objective"), list):
        raise ConfigError(f"{path} is a grid of runs, not a recipe for one. Run it with `bapo compare {path}`.")
    if values.get("kind") == "sft":
        raise ConfigError(f"{path} is a recipe for supervised training. Run it with `bapo sft {path}`.")
    return parse_config(values, source=str(path))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The keys of a recipe, TOML or JSON by its name, not yet checked."""
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


def parse_config(values: dict[str, Any], *, source: str) -> Config:
    """A checked configuration, or one ConfigError that lists everything wrong with it."""
    return _parse_as(Config, values, source=source, command="bapo train")


def load_sft_config(path: str | Path) -> SftConfig:
    """The configuration of supervised training in a recipe, TOML or JSON."""
    return parse_sft_config(read_recipe(path), source=str(path))


def parse_sft_config(values: dict[str, Any], *, source: str) -> SftConfig:
    """The same of supervised training."""
    return _parse_as(SftConfig, values, source=source, command="bapo sft")


def _parse_as(schema: type[Schema], values: dict[str, Any], *, source: str, command: str) -> Schema:
    """The same of any kind; `command --help` lists its keys."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        explained = "\n".join(f"  {_explain(item, all_keys(schema), command)}" for item in error.errors())
        raise ConfigError(f"{source}:\n{explained}") from None


def _explain(item: Any, known: list[str], command: str) -> str:
    """One pydantic error in our words."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        near = _near(key, known, table=isinstance(item["input"], dict))
        hint = f" Did you mean {near}?" if near else f" `{command} --help` lists all keys."
        return f"{key} is not a known key.{hint}"
    message = WORDS.get(item["type"], item["msg"].removeprefix("Value error, "))
    return f"{key} = {item['input']!r}: {message}" if key and item["type"] != "value_error" else message


def _near(key: str, known: list[str], *, table: bool) -> str:
    """Known keys that may have been meant: the same in another table, or else one that is spelt alike."""
    import difflib

    if table:
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return " or ".join(same or difflib.get_close_matches(key, known, n=1))


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key of a configuration, dotted."""
    keys = []
    for name, info in section.model_fields.items():
        kind = info.annotation
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        keys += all_keys(kind, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return keys
