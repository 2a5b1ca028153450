"""Reads settings that are written out: launch lines of verl and of TRL, and files of JSON or YAML for either.

Of a shell script, verl's overrides are words such as `data.train_batch_size=256`, wherever they stand; TRL's options
are what follows a script or `trl grpo`. A variable that the script sets once to text is put in, and so are
`${NAME:-default}` and sums of such numbers. Other variables are computed at run time.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bapo.config.errors import ConfigError
from bapo.config.known_names import Family
from bapo.config.words import flat
from bapo.convert.recipe import Setting, Unknown

TABLES = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer", "reward_model", "custom_reward_function")
"""Tables of verl's configuration."""
DEEPEST = 10
"""How many variables may lead to one another."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.[\w@]+)+)=(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^${}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(([\w\s+*]*)\)\)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_PLAIN = {"": None, "null": None, "none": None, "~": None, "true": True, "false": False}


def read_launch(text: str, path: str) -> tuple[Family, list[Setting]]:
    """The overrides of verl in a shell script, or else the options of TRL."""
    overrides, options = list[Setting](), list[Setting]()
    variables: dict[str, str | None] = {}
    for words in _commands(text):
        is_option = words[0][0].startswith("--") or any(word == "grpo" or word.endswith(".py") for word, _ in words)
        words = words[words[0][0] in ("export", "local", "readonly") :]
        if len(words) == 1 and (assigned := _ASSIGNED.fullmatch(words[0][0])):
            name, value = assigned.groups()
            variables[name] = None if name in variables else _filled(value, variables)
            continue
        for word, line in words:
            name, equals, value = word.removeprefix("--").partition("=")
            if match := _OVERRIDE.fullmatch(word):
                overrides.append(Setting(match[1], _read(match[2], variables), f"{path}:{line}"))
            elif word.startswith("--") and is_option:
                known = _read(value, variables) if equals else True
                options.append(Setting(name.replace("-", "_"), known, f"{path}:{line}"))
            elif options and is_option and not word.endswith(".py"):
                before, more = options[-1], _read(word.rstrip(","), variables)
                several = before.value if isinstance(before.value, list) else [before.value]
                options[-1] = replace(before, value=more if before.value is True else [*several, more])
    if not overrides and not options:
        raise ConfigError(
            f"{path} has no settings of verl, such as data.train_batch_size=256, and no options of TRL. Give a launch "
            "line of one of them, a script of TRL's GRPOTrainer (.py), or settings as JSON or YAML."
        )
    return ("verl", overrides) if overrides else ("trl", options)


def read_tables(text: str, path: str) -> tuple[Family, list[Setting]]:
    """The settings of a JSON or YAML file, and whether they are TRL's or verl's."""
    language = "JSON" if path.endswith(".json") else "YAML"
    try:
        values = json.loads(text) if language == "JSON" else _yaml(text)
        if not isinstance(values, dict) or not values:
            raise ValueError("it holds no settings, as keys with values")
        family: Family = "verl" if any(str(key).partition(".")[0] in TABLES for key in values) else "trl"
        if family == "trl":
            values |= values.pop("model_init_kwargs", None) or {}
        settings = list(flat(values) if family == "verl" else values.items())
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no GRPOConfig and no table of verl in {language}: {' '.join(str(error).split())}."
        ) from None
    lines, found = text.splitlines(), []
    for name, value in settings:
        last = re.compile(rf"^[\s{{,-]*[\"']?{re.escape(str(name).rpartition('.')[2])}[\"']?\s*:")
        at = [number for number, line in enumerate(lines, 1) if last.match(line)]
        value = _read(value, {}) if isinstance(value, str) else value
        found.append(Setting(str(name), value, f"{path}:{at[0]}" if len(at) == 1 else path))
    return family, found


def _yaml(text: str) -> Any:
    import yaml  # comes with transformers

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has aliases (*name), with which little text says much")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _commands(text: str) -> Iterator[list[tuple[str, int]]]:
    """The words of each command, without comments, with their lines."""
    words: list[tuple[str, int]] = []
    for line, written in enumerate(text.splitlines(), 1):
        joined = _SUM.sub(lambda match: match[0].replace(" ", ""), written.rstrip().removesuffix("\\"))
        with suppress(ValueError):  # a quotation that goes on in the next line
            words += [(word, line) for word in shlex.split(joined, comments=True)]
        if words and not written.rstrip().endswith("\\"):
            yield words
            words = []
    if words:
        yield words


def _filled(text: str, variables: dict[str, str | None]) -> str | None:
    """A word with variables put in; None if one of them is not known."""

    def put_in(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        value = variables.get(name, "~" if name == "HOME" else match[2])
        return "$(?)" if value is None else value

    def add_up(match: re.Match[str]) -> str:
        written = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0]) or "?", match[1])
        try:
            return str(sum(math.prod(map(int, part.split("*"))) for part in written.split("+")))
        except ValueError:
            return "$(?)"

    for _ in range(DEEPEST):
        text = _SUM.sub(add_up, _VARIABLE.sub(put_in, text))
    return None if "$(" in text or "${" in text or "`" in text else text


def _read(text: str, variables: dict[str, str | None]) -> Any:
    """A value as hydra reads it: a number, a switch, nothing, a list, or text. Unknown if it is computed."""
    filled = _filled(text, variables)
    return Unknown(text) if filled is None else _value(filled)


def _value(text: str) -> Any:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _PLAIN:
        return _PLAIN[text.lower()]
    if _NUMBER.fullmatch(text):
        return float(text) if any(sign in text.lower() for sign in ".e") else int(text)
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [_value(item) for item in inner.split(",")] if inner else []
    return text
