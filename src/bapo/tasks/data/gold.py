"""The final answer inside a worked solution.

GSM8K ends its solutions with `#### 72` and marks sums for a calculator, `<<48/2=24>>`. MATH puts the answer in a box.
This module reads gold answers, which people wrote. The verifier reads what a model wrote.
"""

from __future__ import annotations

import json
import re
from datetime import date, time
from decimal import Decimal
from typing import Any

__all__ = ["as_answer", "last_boxed", "without_marks"]

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_THOUSANDS = re.compile(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$.,]+)")


def as_answer(value: object, *, worked: bool = False) -> Any:
    """The answer a column holds; None if it is empty.

    Text is cut down to what follows `####`, or to the content of its last box, if it has either. Numbers and dates
    become text. A list stays a list, any entry of which is right, and so does a JSON list of texts that is stored as
    text. A dict stays a dict, and what JSON cannot hold in it becomes text. `worked` says that the text is a whole
    solution; without `####` or a box it then has no answer.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return _plain(value)
    if isinstance(value, int | date | time):
        return str(value)
    if isinstance(value, float | Decimal):
        whole = value.is_integer() if isinstance(value, float) else value == value.to_integral_value()
        return None if value != value else f"{value:.0f}" if whole else str(value)
    if isinstance(value, list):
        return _alternatives([as_answer(item, worked=worked) for item in value])
    if not isinstance(value, str) or not value.strip():
        return None
    if (listed := _json_texts(value)) is not None:
        return _alternatives([as_answer(item, worked=worked) for item in listed])
    if hashes := _hashes(value):
        return hashes[1]
    boxed = last_boxed(value)
    return boxed if boxed or worked else value.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} of a text with balanced braces, or of \boxed 5; None if there is no box."""
    for start in reversed([match.end() for match in _BOX.finditer(text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return text[start:end].strip()
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def without_marks(solution: str) -> str:
    r"""A GSM8K solution as a model should write it: no calculator marks, and `\boxed{72}` for `#### 72`."""
    hashes = _hashes(solution)
    if hashes is None:
        return solution
    reasoning, answer = hashes
    return f"{_CALCULATOR.sub('', reasoning)}\n\\boxed{{{answer}}}".lstrip()


def _hashes(text: str) -> tuple[str, str] | None:
    """The text before and after `####`, if the last line begins with it."""
    before, mark, after = text.rstrip().rpartition("####")
    answer = after.strip()
    if not mark or not answer or "\n" in answer or before.rstrip(" \t")[-1:] not in ("", "\n"):
        return None
    return before.rstrip(), answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def _json_texts(text: str) -> list[str] | None:
    """The list, if a text is a JSON list of texts. An interval such as [0, 1] is not: its items are numbers."""
    if not text.lstrip().startswith("["):
        return None
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return items if items and all(isinstance(item, str) for item in items) else None


def _plain(value: Any) -> Any:
    """The value in a form that JSON can hold."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _alternatives(answers: list[Any]) -> Any:
    given = [answer for answer in answers if answer is not None]
    return given[0] if len(given) == 1 else given or None
