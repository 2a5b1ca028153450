"""`bapo init`: writes commented files to start from. They are copies of those in the folder starters/ of the package.

What is written for one's own data and for TRL runs as it is, at once: with it comes example data that the embedded
model can read. Data that is there already is kept, and is then used instead of the example.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from bapo.config.command_line import option
from bapo.config.errors import ConfigError
from bapo.screen.terminal import say

STARTERS = Path(__file__).parents[1] / "starters"
FILES = {
    "demo": {"demo.toml": "demo.toml"},
    "data": {"mine.toml": "data.toml", "rewards.py": "rewards.py.txt"},
    "game": {"game.toml": "game.toml", "game.py": "game.py.txt"},
    "tools": {"tools.toml": "tools.toml", "tools.py": "tools.py.txt"},
    "trl": {"train_trl.py": "trl.py.txt"},
    "verl": {"train_verl.sh": "verl.sh"},
}
"""What each kind writes: the name of a file, and the starter that it is a copy of."""
EXAMPLES = {"data": {"train.jsonl": "countdown_train.jsonl"}, "trl": {"train.jsonl": "countdown_train.jsonl"}}
"""Data that is written besides, if none of it is there."""
NEXT = {
    "demo": ["bapo train {0} --dry-run", "bapo train {0}"],
    "data": ["bapo train {0} --dry-run", "bapo train {0}"],
    "game": ["bapo train {0} --dry-run", "bapo train {0}"],
    "tools": ["bapo train {0} --dry-run", "bapo train {0}"],
    "trl": ["python {0}"],
    "verl": ["MODEL=… TRAIN_FILES=… VAL_FILES=… bash {0}"],
}
"""The commands to give next, in the directory that was written to."""
WITH_TRL = "pip install -c constraints/base.txt -c constraints/trl.txt '.[trl]'"
"""The tested versions, in a clone."""


@dataclass(frozen=True)
class Arguments:
    """Write commented files to start from.

    demo: the embedded run, written out. data: a recipe for your own problems, a reward function and example problems.
    game, tools: a recipe for several turns with an environment, and the environment. trl, verl: a script that stays
    inside TRL or verl and takes the loss from bapo. All but tools and verl run at once, on a CPU.
    """

    kind: Annotated[
        Positional[Literal["demo", "data", "game", "tools", "trl", "verl"]],
        arg(metavar="{demo,data,game,tools,trl,verl}"),
    ] = "data"
    """What to start from."""
    dir: Annotated[Path, option(default="here", metavar="DIR")] = Path()
    """The directory to write into. Nothing that exists is overwritten."""


def init(arguments: Arguments) -> None:
    """Carry out `bapo init`."""
    files, examples = FILES[arguments.kind], EXAMPLES.get(arguments.kind, {})
    present = [str(arguments.dir / name) for name in files if (arguments.dir / name).exists()]
    if present:
        them, are = ("them", "are") if len(present) > 1 else ("it", "is")
        raise ConfigError(
            f"{' and '.join(present)} {are} there already, and `bapo init` overwrites nothing. Move {them} away, or "
            "choose another directory with --dir."
        )
    kept = [str(arguments.dir / name) for name in examples if (arguments.dir / name).exists()]
    arguments.dir.mkdir(parents=True, exist_ok=True)
    first = next(iter(files))
    for name, starter in (files if kept else files | examples).items():
        path = arguments.dir / name
        text = (STARTERS / starter).read_text(encoding="utf-8")
        with path.open("x", encoding="utf-8") as file:  # also where a link leads nowhere yet
            file.write(re.sub(r"\bFILE\b", first, text))
        say(f"wrote {path}")
    if kept:
        say(f"kept  {' and '.join(kept)}: the lines marked YOURS in {arguments.dir / first} must fit this data")
    steps = NEXT[arguments.kind]
    if arguments.dir != Path():
        steps = [f"cd {shlex.quote(str(arguments.dir))}", *steps]
    say("\n".join(f"{'' if number else 'next':<6}{step.format(first)}" for number, step in enumerate(steps)))
    if arguments.kind == "trl" and find_spec("trl") is None:
        say(f"TRL is not installed here. In a clone of bapo: {WITH_TRL}")
    if first.endswith(".toml"):
        say("Your editor completes and checks keys after: bapo schema > recipe.schema.json")
        say('(with "#:schema ./recipe.schema.json" as the first line of the recipe)')
