"""Prints docs/reference/objectives.md: every objective, its options, and its docstring with equation and citation.

python docs/objectives.py > docs/reference/objectives.md
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from bapo.core.objectives import OBJECTIVES, Objective
from bapo.core.settings import OBJECTIVE_OPTIONS, rule_of_used

HEAD = """# Objectives and their options

Choose one with `--objective.name NAME`, and give its options with `--objective.options KEY VALUE`. In a recipe that is

    [objective]
    name = "grpo"
    options = {high = 1.28}

In the core: `policy_loss(..., objective="grpo", high=1.28)`. `bapo` takes its options from the clip settings; see
[the keys of `objective`](train.md#objective) and [the algorithm](../algorithm.md#the-bounds).
`python docs/objectives.py` prints this page from the docstrings of the code, and a test keeps it current.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for name, objective in OBJECTIVES.items():
        lines += [f"## {name}", "", *_options(name), *_needs(name, objective)]
        lines += _docstring(objective.settings or objective.compute)
    return "\n".join(lines)


def _options(name: str) -> list[str]:
    options = OBJECTIVE_OPTIONS[name].items()
    listed = (f"`{option} = {'none' if value is None else value}`" for option, value in options)
    return [f"Options: {', '.join(listed) or 'none'}.", ""]


def _needs(name: str, objective: Objective) -> list[str]:
    """What else than a token's own ratio and advantage decides its loss."""
    words = {
        "how often each token was trained on before (`uses`)": rule_of_used(name, {}) is not None,
        "which response each token belongs to": objective.needs_sequences,
        "all tokens of the update in one call": objective.whole_update,
    }
    needed = [what for what, does in words.items() if does]
    return [f"Needs {' and '.join(needed)}.", ""] if needed else []


def _docstring(function: Callable[..., Any]) -> list[str]:
    """A docstring whose indented lines, which are equations, are set as code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(function.__doc__ or "").split("\n\n"):
        equation = paragraph.startswith("    ") or re.match(r"\S+ = |L_", paragraph)
        lines += [f"```text\n{inspect.cleandoc(paragraph)}\n```" if equation else paragraph, ""]
    return lines


if __name__ == "__main__":
    print(page(), end="")
