"""Settings of TRL or verl: as somebody gave them, as they are if nobody does, and what may become of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from bapo.config.known_names import UNSET, Family, Known, find, names_of
from bapo.config.numerals import counted
from bapo.config.run import Config
from bapo.types import batches_per_pass

OFF = "off, as here"


@dataclass(frozen=True)
class Unknown:
    """A value that only a run of the script would tell."""

    text: str
    """What is written there."""


@dataclass(frozen=True)
class Setting:
    """A setting of TRL or verl, as somebody gave it."""

    name: str
    value: Any
    line: int = 0
    note: str = ""
    """How its value was found, if it is not written beside it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a setting."""

    setting: Setting
    keys: dict[str, Any] = field(default_factory=dict)
    remark: str = ""
    """Why there is no key, or what a person should know of it."""


class Left(Exception):  # noqa: N818
    """A setting becomes no key, for this reason."""


class Theirs:
    """The settings that were given, by their names in the table, and the defaults of the others."""

    def __init__(self, family: Family, settings: list[Setting], processes: int) -> None:
        self.family, self.processes = family, processes
        self.given: dict[str, Setting] = {}
        self.left: dict[str, str] = {}
        self.remarks: dict[str, str] = {}
        self.unnamed: list[Setting] = []
        for setting in settings:
            found = find(setting.name, [family])
            name = found[1] if found else ""
            before = self.given.get(name)
            if not found or name.endswith(".*") or (before is not None and before.name != setting.name):
                self.unnamed.append(setting)
            else:
                self.given[name] = setting  # where a setting is given twice, the last one counts

    def __getitem__(self, name: str) -> Any:
        """The value of a setting, or what is done if it is not given; None if that is nothing."""
        if name not in self.given:
            return UNSET[self.family].get(name)
        value = self.given[name].value
        if isinstance(value, Unknown):
            raise Left(f"{name} is computed at run time")
        return value

    def leave(self, why: str, *names: str) -> dict[str, Any]:
        """Say why these settings become no key. Returns no keys."""
        self.left |= {name: why for name in names if name in self.given}
        return {}

    def named(self, known: list[Known]) -> list[str]:
        """What these settings are called there; first those that are given."""
        names = [name for row in known for name in names_of(row, self.family)]
        return sorted(names, key=lambda name: name not in self.given)

    @property
    def prompts(self) -> int:
        """Prompts that are sampled at a time."""
        if self.family == "verl":
            return int(self["gen_batch_size"] or self["train_batch_size"])
        of_step = self["steps_per_generation"] or self["gradient_accumulation_steps"]
        asked = self["generation_batch_size"] or self["per_device_train_batch_size"] * self.processes * of_step
        return self._groups("generation_batch_size", asked)

    @property
    def batch_groups(self) -> int:
        """Groups of one update."""
        if self.family == "verl":
            return int(self["ppo_mini_batch_size"])
        asked = self["per_device_train_batch_size"] * self.processes * self["gradient_accumulation_steps"]
        return self._groups("per_device_train_batch_size", asked)

    def _groups(self, name: str, responses: int) -> int:
        groups: int = math.ceil(responses / self["num_generations"])
        if groups * self["num_generations"] != responses:
            self.remarks[name] = (
                f"{counted(responses, 'response')} on {counted(self.processes, 'process', 'processes')} are no whole "
                f"groups of {self['num_generations']}: rounded up; --processes says how many accelerate starts"
            )
        return groups

    @property
    def updates_per_step(self) -> int:
        """Updates on what was sampled at a time."""
        passes = self["num_iterations" if self.family == "trl" else "ppo_epochs"]
        return int(passes) * batches_per_pass(self.prompts, self.batch_groups)


def check_values(found: dict[str, Any]) -> None:
    """Raise Left for a value that its key does not take."""
    for key, value in found.items():
        schema: type[BaseModel] = Config
        *tables, last = key.split(".")
        for table in tables:
            inner = schema.model_fields[table].annotation
            if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
                return  # a free key of a table
            schema = inner
        info = schema.model_fields[last]
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[info.annotation, info])  # type: ignore[arg-type]
        try:
            adapter.validate_python(value)
        except ValidationError:
            raise Left(f"{key} takes no {value!r}") from None
