"""`bapo init`: writes a commented file to start from. The files are in the folder starters/ of the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from bapo.config.command_line import option, parse_arguments
from bapo.config.errors import ConfigError

STARTERS = Path(__file__).parents[1] / "starters"
FILES = {
    "demo": {"demo.toml": "demo.toml"},
    "data": {"mine.toml": "data.toml", "rewards.py": "rewards.py.txt"},
    "trl": {"train_trl.py": "trl.py.txt"},
    "verl": {"train_verl.sh": "verl.sh"},
}
"""What each kind writes: the name of a file, and the starter that it is a copy of."""
NEXT = {
    "demo": "bapo train {0} --dry-run",
    "data": "edit both, then: bapo train {0} --dry-run",
    "trl": "edit it, then: python {0}",
    "verl": "MODEL=… TRAIN_FILES=… VAL_FILES=… bash {0}",
}


@dataclass(frozen=True)
class Arguments:
    """Write a commented file to start from.

    demo: the embedded run, written out. data: a recipe for your own problems, and a reward function. trl, verl: a
    script that stays inside TRL or verl and takes the loss from bapo.
    """

    kind: Annotated[Positional[Literal["demo", "data", "trl", "verl"]], arg(metavar="{demo,data,trl,verl}")] = "data"
    """What to start from."""
    dir: Annotated[Path, option(default="here", metavar="DIR")] = Path()
    """The directory to write into. Nothing that exists is overwritten."""


def init(words: list[str]) -> int:
    """Carry out `bapo init`."""
    arguments = parse_arguments(Arguments, words, prog="bapo init")
    written = {arguments.dir / name: STARTERS / starter for name, starter in FILES[arguments.kind].items()}
    present = [str(path) for path in written if path.exists()]
    if present:
        raise ConfigError(
            f"there is already {' and '.join(present)} here, which `bapo init` does not overwrite. Move it away, or "
            "choose another directory with --dir."
        )
    arguments.dir.mkdir(parents=True, exist_ok=True)
    for path, starter in written.items():
        path.write_text(re.sub(r"\bFILE\b", str(path).replace("\\", r"\\"), starter.read_text()))
        print(f"wrote {path}")
    first = next(iter(written))
    print(f"next  {NEXT[arguments.kind].format(first)}")
    if first.suffix == ".toml":
        print("      your editor completes and checks keys after: bapo schema > recipe.schema.json")
        print('      (with "#:schema ./recipe.schema.json" as the first line of the recipe)')
    return 0
