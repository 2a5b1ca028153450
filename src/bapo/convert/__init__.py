"""`bapo convert`: settings of TRL or verl become a recipe, and what has no counterpart is named, line by line.

launch.py    launch lines, and files of JSON or YAML
script.py    a script that calls GRPOTrainer: settings, data, reward functions
recipe.py    from settings to the keys of a recipe
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.known_names import FAMILIES, Family
from bapo.config.recipe import check
from bapo.config.run import Config
from bapo.config.words import leaves
from bapo.convert.launch import read_launch, read_tables
from bapo.convert.recipe import Setting, Unknown, convert, keys_of, toml
from bapo.convert.script import read_script
from bapo.screen.terminal import say

LONGEST = 60
"""How many characters of a value are shown."""


@dataclass(frozen=True)
class Arguments:
    """Write the recipe for a script of TRL or verl, and say what has no counterpart, line by line.

    The files are read and never run. Reward functions that stand in a script are copied into a module beside the
    recipe.
    """

    files: Annotated[Positional[tuple[Path, ...]], arg(metavar="FILE [FILE ...]")]
    """A script that calls TRL's GRPOTrainer (.py), a GRPOConfig or verl's settings (.json, .yaml), a shell script that
    launches TRL or verl (any other name); or a script of TRL together with what it is launched with."""
    out: Annotated[Path | None, option(default="the name of the first FILE, here", metavar="RECIPE")] = None
    """The recipe to write. Nothing that exists is overwritten."""
    processes: Annotated[int | None, option(default="1, or as the launch line says", metavar="INT")] = None
    """TRL: how many processes accelerate starts. Batch sizes there are those of one process."""


def run(arguments: Arguments) -> None:
    """Carry out `bapo convert`."""
    if not arguments.files or (arguments.processes or 1) < 1:
        raise ConfigError("bapo convert needs a FILE to read, and 1 or more --processes.")
    first = arguments.files[0]
    module = re.sub(r"\W", "_", f"{first.stem}_rewards")
    family, given, rewards = _read(arguments.files, module)
    settings = convert(family, given, processes=arguments.processes)
    out = Path(f"{first.stem}.toml") if arguments.out is None else arguments.out
    source = ", ".join(" ".join(path.name.split()) for path in arguments.files)
    left = list(_left(settings))
    files = {out: recipe_text(f"{source} ({FAMILIES[family]})", settings, left)}
    if rewards:
        copied = f'"""Reward functions of {source}, copied by `bapo convert`."""\n\n{rewards}'
        files[out.with_name(f"{module}.py")] = copied
    if there := [str(file) for file in files if file.exists() or file.is_symlink()]:
        raise ConfigError(f"{' and '.join(there)} exists, and nothing is overwritten. Move it, or give another --out.")
    say("\n".join([f"{len(given)} settings of {FAMILIES[family]}. Not taken over:", *(f"  {line}" for line in left)]))
    for file, written in files.items():
        with file.open("x", encoding="utf-8") as opened:
            opened.write(written)
        say(f"wrote {file}")
    for line in check(Config, tomllib.loads(files[out]))[1]:
        say(f"still  {line}")
    say(f"next   bapo train {shlex.quote(str(out))} --dry-run")


def _read(paths: tuple[Path, ...], module: str) -> tuple[Family, list[Setting], str]:
    """Whose settings files have, the settings, and the text of the module with their reward functions."""
    scripts, found, rewards = dict[Path, str](), list[tuple[Family, list[Setting]]](), ""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise ConfigError(f"cannot read {path}: {why}. Give a script, or settings as JSON or YAML.") from None
        if path.suffix == ".py":
            scripts[path] = text
        else:
            read = read_tables if path.suffix in (".json", ".yaml", ".yml") else read_launch
            found.append(read(text, path.name))
    options = {setting.name: setting for _, settings in found for setting in settings}
    for path, text in scripts.items():
        settings, more = read_script(text, path.name, module, options)
        used = {setting.note.split()[0] for setting in settings if setting.note.startswith("--")}
        rewards += more
        found = [(family, [one for one in given if f"--{one.name}" not in used]) for family, given in found]
        found.insert(0, ("trl", settings))
    if len({family for family, _ in found}) > 1:
        raise ConfigError(f"{' and '.join(map(str, paths))} are of TRL and of verl. Give the files of one run.")
    return found[0][0], [setting for _, settings in found for setting in settings], rewards


def _left(settings: list[Setting]) -> Iterator[str]:
    """What was not taken over, and why."""
    for setting in settings:
        if setting.name and not setting.keys:
            value = setting.value.text if isinstance(setting.value, Unknown) else toml(setting.value)
            value = " ".join(value.split())
            shown = value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"
            yield (
                f"{setting.where}  {setting.name} = {shown}: {setting.note}"
                if setting.where
                else (f"{setting.name}: {setting.note}")
            )


def recipe_text(source: str, settings: list[Setting], left: list[str]) -> str:
    """The recipe as TOML. Beside each key stands what it was made from, and at the end what was not taken over."""
    lines = [f"# From {source}, by `bapo convert`. A key without a comment is as it is there by default."]
    order, keys, table = {key: number for number, key in enumerate(leaves(Config))}, keys_of(settings), ""
    for key in sorted(keys, key=lambda key: ("." in key, order[key])):
        above, _, name = key.rpartition(".")
        lines += ["", f"[{above}]"] if above != table else []
        table = above
        origins = [setting for setting in settings if key in setting.keys]
        told = (*(f"{one.where} {one.name}" for one in origins), *(one.note for one in origins))
        comment = "; ".join(dict.fromkeys(" ".join(one.split()) for one in told if one.strip()))
        written = f"{name} = {toml(keys[key])}"
        lines.append(f"{written:<40} # {comment}" if comment else written)
    return "\n".join([*lines, "", *(f"# {line}" for line in ("Not taken over:", *left))]) + "\n"
