"""Reads the words after `bapo train`, `bapo sft` and `bapo resume`: the recipe, and the keys that change it.

    bapo train --steps 2 mine.toml --task.train a.jsonl b.jsonl --objective.options low 0.8 high 1.3

The recipe may stand anywhere. It is the one word that is neither an option nor the value of one; after an option that
takes any number of values, it is the word that ends in .toml. A word becomes a number, a switch or none where its key
asks for one. Everything else stays text and is judged together with the recipe, so that one message lists all mistakes,
in the same words wherever they stand. An option that names no key is kept under its own name and judged there too.
"""

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from bapo.config.errors import UsageError

SWITCH = {"true": True, "false": False}
NONE = ("none", "null")


@dataclass
class Words:
    """What a command line says."""

    recipe: str | None = None
    """The file or name of the recipe."""
    values: dict[str, Any] = field(default_factory=dict)
    """The keys that are given, as nested tables. They are not checked."""
    unknown: list[str] = field(default_factory=list)
    """Options that name no key. Their values are in `values`, under their own names."""
    switches: set[str] = field(default_factory=set)
    """The switches of the command itself, such as help and dry-run."""


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The nested keys of both; where both have a key, the value of `over`."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of nested tables, joined by dots, with their values."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def read_words(schema: type[BaseModel], words: list[str], *, switches: Iterable[str] = ()) -> Words:
    """Read a command line. Raises UsageError for what makes no sense under any configuration."""
    known, own = leaves(schema), {"help", *switches}
    found, rest = Words(), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if word == "-h" or (word.startswith("--") and name.replace("_", "-") in own):
            found.switches.add("help" if word == "-h" else name.replace("_", "-"))
        elif not word.startswith("-"):
            if found.recipe is not None:
                raise UsageError(
                    f"{found.recipe!r} and {word!r} are both given as the recipe. Give one recipe. An option that "
                    "takes one value takes only the word after it."
                )
            found.recipe = word
        elif not word.startswith("--") or not name:
            raise UsageError(f"{word!r} is not an option. Options are keys with two dashes, such as --steps 20.")
        else:
            _read_option(found, known, schema, name, [text] if equals else None, rest)
    return found


def leaves(schema: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every key of a configuration, with dots between tables, and the type of its value."""
    found: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= leaves(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = kind
    return found


def _read_option(
    found: Words, known: dict[str, Any], schema: type[BaseModel], name: str, texts: list[str] | None, rest: list[str]
) -> None:
    """Take the values of one option from the words that follow, and put them into their table."""
    key, below, negated = _key_of(name, known)
    if key is None:
        found.unknown.append(name)
        texts = texts if texts is not None else _many(rest)
        _put(found.values, name.replace("-", "_"), texts[0] if len(texts) == 1 else texts or "")
        return
    kinds = leaf_types(known[key])
    if negated and texts is not None:
        raise UsageError(f"--{name} takes no value. Leave out ={texts[0]}, or give --{key}={texts[0]}.")
    if negated or (kinds == {bool} and texts is None):
        given = rest.pop(0).lower() if rest and rest[0].lower() in SWITCH and not negated else "true"
        _put(found.values, key, SWITCH[given] is not negated)
    elif below:
        _put(found.values, f"{key}.{below}", _value((texts or _one(name, rest))[0], {bool, int, float, str}))
    elif _is(known[key], dict):
        pairs = texts if texts is not None else _many(rest)
        if len(pairs) % 2:
            raise UsageError(f"--{name} takes names with values, such as --{name} NAME VALUE. {pairs[-1]!r} is alone.")
        for inner, text in zip(pairs[::2], pairs[1::2], strict=True):
            _put(found.values, f"{key}.{inner}", _value(text, {bool, int, float, str}))
    elif _is(known[key], tuple):
        texts = texts if texts is not None else _many(rest)
        alone = len(texts) == 1 and texts[0].lower() in NONE and types.NoneType in kinds
        _put(found.values, key, None if alone else [_value(text, kinds) for text in texts])
    else:
        _put(found.values, key, _value((texts or _one(name, rest))[0], kinds))


def _key_of(name: str, known: Iterable[str]) -> tuple[str | None, str, bool]:
    """The key that an option names, what it names below that key (an entry of a table), and whether it says no-."""
    plain = name.replace("-", "_")
    table, _, last = plain.rpartition(".")
    positive = ".".join(filter(None, (table, last.removeprefix("no_"))))
    for key in known:
        if plain == key:
            return key, "", False
        if last.startswith("no_") and positive == key:
            return key, "", True
        if plain.startswith(f"{key}."):
            return key, plain[len(key) + 1 :], False
    return None, "", False


def _one(name: str, rest: list[str]) -> list[str]:
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"--{name} needs a value after it.")
    return [rest.pop(0)]


def _many(rest: list[str]) -> list[str]:
    """The words up to the next option or recipe."""
    taken = []
    while rest and not rest[0].startswith("--") and rest[0] != "-h" and not rest[0].endswith(".toml"):
        taken.append(rest.pop(0))
    return taken


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        below = values.setdefault(table, {})
        values = below if isinstance(below, dict) else {}
    values[last] = value


def leaf_types(kind: Any) -> set[Any]:
    """The plain types inside an annotation."""
    origin = get_origin(kind)
    if origin is Literal:
        return {str}
    if origin is Annotated:
        return leaf_types(get_args(kind)[0])
    if origin in (Union, types.UnionType, tuple):
        return {leaf for part in get_args(kind) if part is not ... for leaf in leaf_types(part)}
    return {kind}


def _is(kind: Any, shape: type) -> bool:
    """Whether the values of a key are a dict or a tuple, and not first of all a word."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return get_origin(parts[0]) is shape


def _value(text: str, kinds: set[Any]) -> Any:
    """The text as what its key asks for, where it can be read as that."""
    if text.lower() in NONE and types.NoneType in kinds:
        return None
    if text.lower() in SWITCH and bool in kinds:
        return SWITCH[text.lower()]
    for kind in (int, float):
        if kind in kinds:
            with suppress(ValueError):
                return kind(text)
    return text
