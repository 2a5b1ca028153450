"""The keys of a configuration, and what somebody may have meant by one that it does not have."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import BaseModel

from bapo.config import known_names
from bapo.config.run import Config
from bapo.config.words import leaves

_END = r"(?!\w|\.\w)"
"""What follows a whole key."""


def all_keys(schema: type[BaseModel] = Config) -> list[str]:
    """Every key of a configuration, with dots between tables."""
    return list(leaves(schema))


def known_elsewhere(key: str, schema: type[BaseModel]) -> known_names.Known | None:
    """What a name of TRL or verl is called here; None if the schema does not have that key.

    A name that another table has is more likely meant by itself.
    """
    keys = all_keys(schema)
    known = None if key.rpartition(".")[2] in {name.rpartition(".")[2] for name in keys} else known_names.find(key)
    elsewhere = known is not None and known.key and not any(f"{name}.".startswith(f"{known.key}.") for name in keys)
    return None if elsewhere else known


def near(key: str, schema: type[BaseModel], *, table: bool) -> list[str]:
    """The keys that may have been meant: the same name in other tables, or else the one with the nearest spelling.

    `table`: what is not known is a table of keys, and so is what was meant.
    """
    import difflib

    known = all_keys(schema)
    if table:
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return same or difflib.get_close_matches(key, known, n=1)


def meant(key: str, schema: type[BaseModel], *, table: bool) -> list[str]:
    """The keys and tables that a correction of an unknown key may set."""
    known = known_elsewhere(key, schema)
    return near(key, schema, table=table) if known is None else [known.key]


def names_any(text: str, keys: Iterable[str], schema: type[BaseModel]) -> bool:
    """Whether a message names one of these keys, or a key in one of these tables.

    A key that is in no table is an ordinary word, such as out. It is named where its value follows.
    """
    meant = [key for key in all_keys(schema) if any(f"{key}.".startswith(f"{one}.") for one in keys if one)]
    return any(re.search(rf"(?<![\w.]){re.escape(key)}{_END if '.' in key else '='}", text) for key in meant)
