"""`bapo convert`: settings of TRL or verl become a recipe, and what has no counterpart is named, line by line.

literals.py    what a Python file says without being run
script.py      a script that calls GRPOTrainer: settings, data, reward functions
launch.py      verl's launch lines, and files of JSON or YAML
settings.py    a setting, and what may become of it
rules.py       keys that need more than one value under another name
recipe.py      from settings to the keys of a recipe
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.config.known_names import FAMILIES, Family
from bapo.config.recipe import check
from bapo.config.run import Config
from bapo.config.words import leaves
from bapo.convert.launch import read_launch, read_tables
from bapo.convert.recipe import Converted, convert
from bapo.convert.script import read_script
from bapo.convert.settings import Outcome, Setting, Unknown
from bapo.screen.terminal import say

LONGEST = 60
"""How many characters of a value are shown."""


@dataclass(frozen=True)
class Arguments:
    """Write the recipe for a script of TRL or verl, and say what has no counterpart, line by line.

    The file is read and never run. Reward functions that stand in it are copied into a module beside the recipe.
    """

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """A script that calls TRL's GRPOTrainer (.py), a GRPOConfig or verl's settings (.json, .yaml), or a shell script
    that launches verl (any other name)."""
    out: Annotated[Path | None, option(default="the name of FILE, here", metavar="RECIPE")] = None
    """The recipe to write. Nothing that exists is overwritten."""
    processes: int = 1
    """TRL: how many processes accelerate starts. Batch sizes there are those of one process."""


def run(arguments: Arguments) -> None:
    """Carry out `bapo convert`."""
    path = arguments.file
    out = Path(f"{path.stem}.toml") if arguments.out is None else arguments.out
    if arguments.processes < 1:
        raise ConfigError(f"--processes {arguments.processes}: give 1 or more.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8. Give a script, or settings as JSON or YAML.") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Check the path.") from None
    module = re.sub(r"\W", "_", f"{path.stem}_rewards")
    family, settings, rewards = _read(text, path, module)
    made = convert(family, settings, processes=arguments.processes)
    copied = out.with_name(f"{module}.py")
    files = {out: recipe_text(path.name, family, made)}
    if rewards:
        files[copied] = f'"""Reward functions of {path.name}, copied by `bapo convert`."""\n\n{rewards}'
    if there := [str(file) for file in files if file.exists() or file.is_symlink()]:
        raise ConfigError(f"{' and '.join(there)} exists, and nothing is overwritten. Move it, or give another --out.")
    say(f"{path}: {FAMILIES[family]}")
    say("\n".join(account(made.outcomes)))
    for file, written in files.items():
        with file.open("x", encoding="utf-8") as opened:
            opened.write(written)
        say(f"wrote {file}")
    _, wrong = check(Config, nested(made.keys))
    for line in (*(f"{key}: {reason}" for key, reason in made.why.items() if key not in made.keys), *wrong):
        say(f"still  {line}")
    say(f"next   bapo train {shlex.quote(str(out))} --dry-run")


def _read(text: str, path: Path, module: str) -> tuple[Family, list[Setting], str]:
    """Whose settings a file has, the settings, and the text of the module with its reward functions."""
    if path.suffix == ".py":
        script = read_script(text, str(path), module)
        return "trl", script.settings, script.rewards
    if path.suffix in (".json", ".yaml", ".yml"):
        return *read_tables(text, str(path)), ""
    return "verl", read_launch(text, str(path)), ""


def account(outcomes: list[Outcome]) -> Iterator[str]:
    """One line for each setting: where it stands, what it is, and what became of it."""
    asked = [f"{one.setting.line or '':>4}  {one.setting.name} = {_told(one.setting.value)}" for one in outcomes]
    width = min(LONGEST, max(map(len, asked), default=0))
    for left, outcome in zip(asked, outcomes, strict=True):
        became = ", ".join(f"{key} = {_toml(value)}" for key, value in outcome.keys.items())
        remark = f"{'; ' if became else '- '}{outcome.remark}" if outcome.remark else ""
        yield f"  {left:<{width}}  {became}{remark}"


def _told(value: Any) -> str:
    text = value.text if isinstance(value, Unknown) else _toml(value)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def recipe_text(source: str, family: Family, converted: Converted) -> str:
    """The recipe as TOML. Beside each key stands what it was made from, and at the end what was not taken over."""
    keys, made = converted.keys, dict(converted.why)
    for key in keys:
        made |= {key: told} if (told := _from([o.setting for o in converted.outcomes if key in o.keys])) else {}
    trainer = FAMILIES[family]
    lines = [
        f"# From {' '.join(source.split())} ({trainer}), by `bapo convert`. What has no comment is what {trainer} "
        "does if nothing is set."
    ]
    order = list(leaves(Config))
    for table in dict.fromkeys(key.rpartition(".")[0] for key in sorted(keys, key=_place_in(order))):
        lines += ["", f"[{table}]"] if table else [""]
        for key in (key for key in sorted(keys, key=_place_in(order)) if key.rpartition(".")[0] == table):
            written = f"{key.rpartition('.')[2]} = {_toml(keys[key])}"
            lines.append(f"{written:<40} # {made[key]}" if key in made else written)
    left = [outcome for outcome in converted.outcomes if not outcome.keys]
    lines += ["", "# Not taken over:"] if left else []
    lines += [f"#   {key}: {reason}" for key, reason in converted.why.items() if key not in keys]
    for outcome in left:
        told = f"{outcome.setting.name} = {_told(outcome.setting.value)}: {outcome.remark}"
        lines.append(f"#   {f'line {outcome.setting.line}: ' if outcome.setting.line else ''}{' '.join(told.split())}")
    return "\n".join(lines) + "\n"


def _from(settings: list[Setting]) -> str:
    """What a key was made from: `line 12: learning_rate (the default of --lr)`."""
    names = ", ".join(dict.fromkeys(setting.name.rpartition(".")[2] for setting in settings))
    lines = ", ".join(str(line) for line in dict.fromkeys(setting.line for setting in settings if setting.line))
    notes = "; ".join(dict.fromkeys(setting.note for setting in settings if setting.note))
    where = f"line{'s' * (',' in lines)} {lines}: " if lines else ""
    return " ".join(f"{where}{names}{f' ({notes})' if notes else ''}".split())


def _place_in(order: list[str]) -> Any:
    """Keys in the order of the configuration, those without a table first."""
    return lambda key: (key.count("."), order.index(key)) if "." not in key else (1, order.index(key))


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys with dots as tables."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        *tables, last = key.split(".")
        inner = found
        for table in tables:
            inner = inner.setdefault(table, {})
        inner[last] = value
    return found


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(str(key))} = {_toml(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
