"""How docstrings become pages: a list of names, each followed by spaces and its meaning, keeps its lines.

The docstrings of the core explain arguments in aligned columns, which Markdown would join into one paragraph.
mkdocstrings loads this file (`extensions` in mkdocs.yml).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ALIGNED = re.compile(r"^(?=[\w.]+ {2,}\S)", re.MULTILINE)


class Columns(griffe.Extension):
    """Sets aligned columns as code, which keeps them aligned."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Look at the docstring of everything that is read."""
        if obj.docstring is not None:
            obj.docstring.value = ALIGNED.sub("    ", obj.docstring.value)
