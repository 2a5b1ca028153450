"""`bapo diagnose`: what the clip does to the updates of any trainer, from batches that it logged.

    dump_files.py, dumps.py    files -> updates          problems.py                    what cannot be right in them
    uses.py                    which tokens came again   diagnosis.py                   the whole, and what to do
    measure.py                 updates -> numbers        tables.py, diagnosis_page.py   how it is shown

Here are the arguments of the command, and what it does with them. No torch is imported before the dump is read.
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from bapo.config.errors import DumpError


@dataclass(frozen=True)
class Arguments:
    """Show what the clip does to logged batches of any trainer, and what to do about it.

    A dump is a file (.safetensors, .npz, .parquet) or a directory of such files. It holds log-probs, behaviour
    log-probs, advantages and a mask per token, under the names that bapo, TRL or verl give them.
    """

    dump: Annotated[Positional[tuple[Path, ...]], arg(metavar="DUMP...", help_behavior_hint="(required)")] = ()
    """Files or directories."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write the diagnosis as one HTML page."""
    json: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write every number as JSON."""
    map: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="WHAT=COLUMN")] = ()
    """The name of a column in your dump, for example --map logprobs=my_column."""


def run(arguments: Arguments) -> int:
    """Carry out the command; its exit code is 0 whatever was found."""
    if not arguments.dump:
        raise DumpError("no DUMP given. Name a file or a directory of logged batches; see `bapo diagnose --help`.")
    mapping = dict(_pair(text) for text in arguments.map)
    for out in (arguments.html, arguments.json):
        if out is not None and not out.resolve().parent.is_dir():
            raise DumpError(f"cannot write {out}: {out.resolve().parent} is not a directory. Create it first.")

    from bapo.diagnose.dumps import read_dump

    dump = read_dump(list(arguments.dump), mapping)

    from bapo.diagnose.diagnosis import as_json, diagnose
    from bapo.diagnose.diagnosis_page import html_page
    from bapo.diagnose.tables import print_diagnosis

    diagnosis = diagnose(dump)
    print_diagnosis(diagnosis)
    if arguments.html is not None:
        arguments.html.write_text(html_page(diagnosis), encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json_format.dumps(as_json(diagnosis), indent=1), encoding="utf-8")
    return 0


def _pair(text: str) -> tuple[str, str]:
    role, equals, column = text.partition("=")
    if not (role and equals and column):
        raise DumpError(f"--map {text} must have the form WHAT=COLUMN, for example --map logprobs=my_column.")
    return role, column
