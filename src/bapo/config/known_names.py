"""What somebody meant by a key that a configuration does not have: a name of TRL or verl, or a slip of the pen.

The names are in known_names.toml. A name is the last part of theirs, or its last parts, if another table has a setting
of that name: actor_rollout_ref.actor.ppo_epochs is known as ppo_epochs. `python docs/names.py` prints
docs/reference/names.md, and `bapo convert` goes by the same table.
"""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from bapo.config.words import leaves


class Known(NamedTuple):
    """A setting that people know under another name."""

    trl: str = ""
    """Its names in TRL, separated by commas; empty if TRL has none."""
    verl: str = ""
    """Its names in verl."""
    key: str = ""
    """The key here; empty if there is none."""
    remark: str = ""
    """What differs, as a sentence or several."""
    values: Mapping[str, Any] = MappingProxyType({})
    """What their values are called here, if that differs."""


Family = Literal["trl", "verl"]
FAMILIES: dict[Family, str] = {"trl": "TRL", "verl": "verl"}

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
NAMES = [Known(**row) for row in _TABLES["setting"]]
UNSET: dict[Family, dict[str, Any]] = _TABLES["unset"]
"""What TRL and verl do if a setting is not given, by its name there."""


def names_of(known: Known, family: Family) -> list[str]:
    """What a setting is called there; nothing if it has no name."""
    return [name.strip() for name in getattr(known, family).split(",") if name.strip()]


_BY_NAME = {family: {name: known for known in NAMES for name in names_of(known, family)} for family in FAMILIES}


def find(key: str, families: Sequence[Family] = ("trl", "verl")) -> tuple[Known, str] | None:
    """The setting that has this name in TRL or verl, and the name by which it was found; None if neither has it.

    Its last parts count before `table.*`, a whole table, and that before the last part alone.
    """
    *tables, last = key.lower().replace("-", "_").split(".")
    longer = [".".join([*tables[start:], last]) for start in range(len(tables))]
    for name in (*longer, *(f"{table}.*" for table in reversed(tables)), last):
        for family in families:
            if name in _BY_NAME[family]:
                return _BY_NAME[family][name], name
    return None


def hint(key: str) -> str | None:
    """What a key that does not exist is called here, in a sentence or two; None if the name is not known."""
    found = find(key)
    if found is None:
        return None
    known, last = found
    whose = [shown for family, shown in FAMILIES.items() if last in names_of(known, family)]
    told = f"In {' and '.join(whose)}, {last} is what {known.key} is here." if known.key else ""
    return " ".join(filter(None, (told, known.remark)))


def known_elsewhere(key: str, schema: type[BaseModel]) -> Known | None:
    """What a name of TRL or verl is called here; None if the schema does not have that key.

    A name that another table has is more likely meant by itself.
    """
    keys = leaves(schema)
    by_itself = key.rpartition(".")[2] in {name.rpartition(".")[2] for name in keys}
    known = None if by_itself or (found := find(key)) is None else found[0]
    elsewhere = known is not None and known.key and not any(f"{name}.".startswith(f"{known.key}.") for name in keys)
    return None if elsewhere else known


def similar(key: str, schema: type[BaseModel], *, table: bool) -> list[str]:
    """The keys that may have been meant: the same name in other tables, or else the one with the nearest spelling.

    `table`: what is not known is a table of keys, and so is what was meant.
    """
    known = list(leaves(schema))
    if table:
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    return same or difflib.get_close_matches(key, known, n=1)
