"""Prints docs/reference/problems.md: what `bapo diagnose` looks for in a dump, and what to do about it.

python docs/problems.py > docs/reference/problems.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from bapo.diagnose.problems import REMARKS, SERIOUS, Check

HEAD = """# Problems of a dump

What [`bapo diagnose`](../diagnose.md) looks for in every update, by the names in its report. `python docs/problems.py`
prints this page, and a test keeps it current.
"""


def page() -> str:
    """The whole page."""
    serious = ["## Serious", "", "The other numbers rest on something false until these are repaired.", ""]
    remarks = ["", "## Remarks", "", "These limit what the numbers mean.", ""]
    return "\n".join([HEAD, *serious, *_table(SERIOUS), *remarks, *_table(REMARKS), ""])


def _table(checks: Mapping[Check, str]) -> Iterator[str]:
    yield from ("| name | what it finds | what to do |", "|---|---|---|")
    for check, remedy in checks.items():
        found = inspect.cleandoc(check.__doc__ or "").split("\n\n")[0]
        yield f"| `{check.__name__}` | {' '.join(found.split())} | {remedy.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(page(), end="")
