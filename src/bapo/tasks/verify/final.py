"""Where the final answer of a response is. Pure rules on text, the same for every problem: they never see the answer.

    visible         what follows the end of thinking; nothing, if thinking began and never ended
    boxed           the last \\boxed{…}
    after_hashes    the rest of the last line if it opens with ####, as GSM8K's own solutions end
    sentence        the end of a last line such as "The answer is 72."

A response has one final answer, the last. Listing candidates, boxing several or hiding one in the thinking gains
nothing over a single guess. What an answer means is for others to say.
"""

from __future__ import annotations

import re

__all__ = ["TAIL", "after_hashes", "boxed", "sentence", "visible"]

TAIL = 8192
"""Characters at the end of a response that count; an answer before them is not seen."""

_HASHES = re.compile(r"#{4}(?!#)[ \t]*(.+)")
_SENTENCE = re.compile(r"\banswer(?:\s+is|\s*:|\s*=)\s*:?\s*(.+)$", re.IGNORECASE)
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")


def visible(response: str, *, thinking: bool = False) -> str:
    """The part after thinking, at most `TAIL` characters of it.

    With `thinking` the prompt itself has opened the thinking, so that a response without </think> is thinking only.
    """
    _, end, after = response.rpartition("</think>")
    if not end and (thinking or "<think>" in response):
        return ""
    shown = after if end else response
    return shown.partition("<think>")[0][-TAIL:]


def boxed(text: str) -> str | None:
    """What the last \\boxed{…} or \\fbox{…} holds; empty if it is never closed, None if there is no box."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        return text[start : start + 1].strip()  # TeX: without braces the next character is the argument
    depth, place = 0, start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1  # an escaped brace, or the first letter of a command
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : place].strip()
        place += 1
    return ""


def after_hashes(text: str) -> str | None:
    """What stands after #### if that opens the last line; of "#### Final Answer: 72" what it says the answer is.

    On any other line it is a heading.
    """
    lines = text.rstrip().splitlines()
    marked = _HASHES.fullmatch(lines[-1]) if lines else None
    if marked is None:
        return None
    return sentence(marked[1]) or marked[1].strip().strip("*").strip()


def sentence(text: str) -> str | None:
    """What the last line says the answer is, without its full stop."""
    lines = text.rstrip().splitlines()
    said = _SENTENCE.search(lines[-1][-1000:]) if lines else None
    return said[1].strip().strip("*").removesuffix(".").strip("*").strip() if said else None
