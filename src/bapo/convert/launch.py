"""Reads settings that are written out: verl's launch lines, and files of JSON or YAML for verl or TRL.

Of a shell script, the words `table.key=value` are verl's overrides, wherever they stand. A variable that the script
sets to text is put in, and so are `${NAME:-default}` and sums of such numbers; other variables are named as unknown.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from bapo.config.errors import ConfigError
from bapo.config.known_names import Family
from bapo.convert.settings import Setting, Unknown

TABLES = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer", "reward_model", "custom_reward_function")
"""Tables of verl's configuration."""
MOST, DEEPEST = 10_000, 50
"""Most values of a file, and how deep they may be inside one another: YAML can say much with little."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.[\w@]+)+)=(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(\S.*|)$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(([\w\s$+*/()-]*)\)\)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_NONE, _SWITCH = ("", "null", "none", "~"), {"true": True, "false": False}


def read_launch(text: str, path: str) -> list[Setting]:
    """The overrides of verl in a shell script, with the lines that they stand in."""
    found: list[Setting] = []
    variables: dict[str, str | None] = {"HOME": "~"}
    for line, written in enumerate(text.splitlines(), 1):
        words = _words(written)
        assigned = _ASSIGNED.match(written)
        if assigned and len(words) == 1 and not _OVERRIDE.fullmatch(words[0]):
            name, kept = assigned[1], words[0].partition("=")[2]
            literal = "='" in written
            again = name in variables and name != "HOME"
            variables[name] = None if again else kept if literal else _filled(kept, variables)
            continue
        for word in words:
            if match := _OVERRIDE.fullmatch(word):
                value = _filled(match[2], variables)
                found.append(Setting(match[1], Unknown(match[2]) if value is None else _value(value), line))
    if not found:
        raise ConfigError(
            f"{path} has no settings of verl, such as data.train_batch_size=256. Give a launch line of verl, a script "
            "of TRL's GRPOTrainer (.py), or settings as JSON or YAML."
        )
    return found


def read_tables(text: str, path: str) -> tuple[Family, list[Setting]]:
    """The settings of a JSON or YAML file, and whether they are TRL's or verl's."""
    try:
        values = json.loads(text) if path.endswith(".json") else _yaml(text)
    except (ValueError, RecursionError) as error:
        language = "JSON" if path.endswith(".json") else "YAML"
        raise ConfigError(f"{path} is not valid {language}: {' '.join(str(error).split())}. Correct it.") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path} holds no settings. Give a GRPOConfig, or verl's tables, as keys with values.")
    if not _within(values):
        raise ConfigError(f"{path} holds more than {MOST} values, or deeper than {DEEPEST}. Give those of one run.")
    family: Family = "verl" if any(str(key).partition(".")[0] in TABLES for key in values) else "trl"
    lines = text.splitlines()
    found = []
    for name, value in _flat(values, "", family):
        last = re.compile(rf"^[\s{{,-]*[\"']?{re.escape(name.rpartition('.')[2])}[\"']?\s*:")
        at = [number for number, line in enumerate(lines, 1) if last.match(line)]
        found.append(Setting(name, value, at[0] if len(at) == 1 else 0))
    return family, found


def _within(values: Any) -> bool:
    """Whether these are so many values as a configuration may have."""
    level, count = [values], 0
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
            count += 1
            if count > MOST or len(inner) > MOST:
                return False
        level = inner
    return not level


def _yaml(text: str) -> Any:
    import yaml  # comes with transformers

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _flat(values: Mapping[Any, Any], above: str, family: Family) -> Iterator[tuple[str, Any]]:
    """The settings in tables, their names joined by dots. TRL's are not nested: a table there is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value and (family == "verl" or key == "model_init_kwargs"):
            yield from _flat(value, f"{above}{key}." if family == "verl" else "", family)
        elif isinstance(value, str):
            interpolated = "${" in value
            yield f"{above}{key}", Unknown(value) if interpolated else _value(value)
        else:
            yield f"{above}{key}", value


def _words(line: str) -> list[str]:
    """The words of a line of a shell script, without its comment; none if it cannot be read by itself."""
    line = _SUM.sub(lambda match: match[0].replace(" ", ""), line.rstrip().removesuffix("\\"))
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation that goes on in the next line
        return []


def _filled(text: str, variables: Mapping[str, str | None]) -> str | None:
    """A word with variables put in; None if one of them is not known."""
    unknown = False

    def put_in(match: re.Match[str]) -> str:
        nonlocal unknown
        name, default = match[1] or match[3], match[2]
        value = variables.get(name, default)
        unknown |= value is None
        return value or ""

    def add_up(match: re.Match[str]) -> str:
        nonlocal unknown
        inner = _VARIABLE.sub(put_in, match[1])
        inner = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0]) or "?", inner)
        found = _sum(inner)
        unknown |= found is None
        return str(found)

    filled = _VARIABLE.sub(put_in, _SUM.sub(add_up, text))
    return None if unknown or "$(" in filled or "`" in filled or len(filled) > MOST else filled


def _sum(text: str) -> int | None:
    """The value of an integer expression of + - * /; None if it is none."""
    import ast

    from bapo.convert.literals import Reader, Undecided

    try:
        tree = ast.parse(text.strip().replace("/", "//"))
        reader = Reader(tree)
        (line,) = tree.body
        value = reader.literal(line.value if isinstance(line, ast.Expr) else None, reader.module, 1)
    except (SyntaxError, ValueError, Undecided):
        return None
    return value if isinstance(value, int) else None


def _value(text: str) -> Any:
    """A value as hydra reads it: a number, a switch, nothing, a list, or text."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _NONE:
        return None
    if text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    if _NUMBER.fullmatch(text):
        return float(text) if any(sign in text.lower() for sign in ".e") else int(text)
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [_value(item) for item in inner.split(",")] if inner else []
    return text
