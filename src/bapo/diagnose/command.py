"""`bapo diagnose`: arguments, and the order in which things can go wrong. Imports no torch before the dump is read.

Exit codes: 0 done (whatever was found), 2 bad usage or a dump that cannot be read, 4 the output cannot be written.
"""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bapo.config.errors import DumpError


@dataclass(frozen=True)
class Arguments:
    """What the clip does to logged batches, in words and numbers.

    A dump is a file (.safetensors, .npz, .parquet) or a directory of them, with log-probs, behaviour log-probs,
    advantages and a mask per token, under the names of bapo, TRL or verl.
    """

    dump: tyro.conf.Positional[tuple[Path, ...]]
    """Files or directories."""
    html: Path | None = None
    """Also write the diagnosis as one HTML page."""
    json: Path | None = None
    """Also write every number as JSON."""
    map: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A column name of your own, e.g. --map logprobs=my_column; may be repeated."""


def run(arguments: list[str]) -> int:
    """Carry out the command; returns its exit code."""
    chosen = tyro.cli(Arguments, args=arguments, prog="bapo diagnose")
    try:
        if not chosen.dump:
            raise DumpError("no DUMP given: name a file or a directory of logged batches. See bapo diagnose --help.")
        mapping = dict(_pair(text) for text in chosen.map)
        for out in (chosen.html, chosen.json):
            if out is not None and not out.resolve().parent.is_dir():
                raise DumpError(f"{out} cannot be written: {out.resolve().parent} is no directory. Create it first.")

        from bapo.diagnose.dumps import read_dump

        dump = read_dump(list(chosen.dump), mapping)
    except DumpError as error:
        return _fail(2, str(error))

    from bapo.diagnose.diagnosis import as_json, diagnose
    from bapo.diagnose.page import html_page
    from bapo.diagnose.text import print_diagnosis

    diagnosis = diagnose(dump)
    print_diagnosis(diagnosis)
    try:
        if chosen.html is not None:
            chosen.html.write_text(html_page(diagnosis), encoding="utf-8")
        if chosen.json is not None:
            chosen.json.write_text(json_format.dumps(as_json(diagnosis), indent=1), encoding="utf-8")
    except OSError as error:
        return _fail(4, f"cannot write: {error}.")
    return 0


def _pair(text: str) -> tuple[str, str]:
    role, equals, column = text.partition("=")
    if not (role and equals and column):
        raise DumpError(f"--map {text} must have the form WHAT=COLUMN, e.g. --map logprobs=my_column.")
    return role, column


def _fail(code: int, message: str) -> int:
    print(f"bapo: {message}", file=sys.stderr)
    return code
