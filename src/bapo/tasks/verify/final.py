"""Where the final answer of a response is. The rules see only the response, never the problem's answer.

    visible         the text after the thinking; empty if thinking began and never ended
    boxed           the last \\boxed{…}
    after_hashes    the rest of the last line if it begins with ####, as in GSM8K's own solutions
    sentence        the end of a last line such as "The answer is 72."
    stated          that end before any reason (72, since 48 + 24 = 72), then the whole of it

A response has one final answer, and it is the last. Listing candidates, boxing several or hiding one in the thinking
gains nothing over a single guess. What an answer means is decided elsewhere.
"""

import re

TAIL = 8192
"""How many characters at the end of a response are read. An answer before them is not seen."""

_HASHES = re.compile(r"#{4}(?!#)[ \t]*(.+)")
_SENTENCE = re.compile(r"\banswer(?:\s+is|\s*:|\s*=)\s*:?\s*(.+)$", re.IGNORECASE)
_REASON = re.compile(
    r"(?i:(?:[,;]\s*\(?|\s\(|\s(?=since\b|because\b))\s*"
    r"(?:since|because|as|where|when|for|so|which|given|by|using|after|with|hence|thus|therefore)\b)"
    r"|\.\s+(?=[A-Z])"
)
MARK = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace, or an escaped character: that of \{, or the first of a command
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])\s*")


def visible(response: str, *, thinking: bool = False) -> str:
    """The text after the thinking, at most its last `TAIL` characters.

    `thinking` says that the prompt itself has opened the thinking, so a response without </think> is all thinking.
    """
    _, end, after = response.rpartition("</think>")
    if not end and (thinking or "<think>" in response):
        return ""
    return (after if end else response).partition("<think>")[0][-TAIL:]


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} or \\fbox{…}; empty if it is never closed, None if there is no box."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    after = text[start : start + 1]  # in TeX, without braces, the next character is the argument
    return (braced(text, start) or "") if after == "{" else after.strip()


def braced(text: str, start: int) -> str | None:
    """The content of the braces that open at `start`; None if they are never closed. Escaped braces do not count."""
    depth = 0
    for mark in MARK.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[start + 1 : mark.start()].strip()
    return None


def after_hashes(text: str) -> str | None:
    """The text after #### if the last line begins with it; the 72 of "#### Final Answer: 72".

    On any other line, #### marks a heading.
    """
    lines = text.rstrip().splitlines()
    marked = _HASHES.fullmatch(lines[-1]) if lines else None
    return None if marked is None else sentence(marked[1]) or marked[1].strip().strip("*").strip()


def sentence(text: str) -> str | None:
    """The answer that the last line states, without the full stop."""
    lines = text.rstrip().splitlines()
    said = _SENTENCE.search(lines[-1][-1000:]) if lines else None
    return said[1].strip().strip("*").removesuffix(".").strip("*").strip() if said else None


def stated(text: str) -> list[str]:
    """What the last line states as the answer, without the reason that follows it, and then with it."""
    said = sentence(text)
    if not said:
        return []
    reason = _REASON.search(said)
    return [said[: reason.start()].strip().strip("*"), said] if reason else [said]
