"""Which columns of a row hold the prompt, the answer and the response.

Each row is read by the columns it has, so one list of sources may mix layouts: verl's (`prompt` as chat messages,
`reward_model.ground_truth`), GSM8K's (`question`, `answer`), MATH's (`problem`, `solution`), AIME's (`Problem`,
`Answer`), SVAMP's (`Body`, `Question`, `Answer`), Alpaca's (`instruction`, `input`, `output`) and plain ones. Names are
tried in a fixed order, in upper or lower case, and the first column with a value counts. If the caller names a column,
only that one is tried. Dots lead into nested columns.

A row that has none of the columns is an error, which lists the columns that it has. If the columns are there but empty,
the caller counts the row.

An answer may be inside a worked solution. GSM8K ends its solutions with `#### 72` and marks sums for a calculator,
`<<48/2=24>>`; MATH puts the answer in a box. The rules here read gold answers, which people wrote. The verifier has its
own for what a model wrote (`verify/final.py`).
"""

import json
import re
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

from bapo.tasks.data.rows import Row
from bapo.tasks.verify.final import MARK
from bapo.types import Message

Prompt = str | list[Message]
"""Text to be continued, or the messages of a chat. How a chat becomes tokens is decided by the policy, not here."""

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages")
ANSWERS = (
    *("reward_model.ground_truth", "answer", "final_answer", "expected_answer", "ground_truth", "solution", "output"),
)
QUESTIONS, BODY = ("question", "problem", "query"), "body"
RESPONSES = ("response", "completion", "output", "solution", "answer", "messages")

_ABSENT = object()
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_THOUSANDS = re.compile(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$.,]+)")


def prompt_of(row: Row, column: str | None) -> Prompt | None:
    """The row's prompt; None if it is empty."""
    name, value = _first(row, PROMPTS, column, "prompt", "prompt_column")
    prompt = as_prompt(value, row.place, name)
    if name.lower() == "instruction" and isinstance(prompt, str):
        given = look_up(row.values, "input")
        return f"{prompt}\n\n{given}" if isinstance(given, str) and given.strip() else prompt
    if column is None and name.lower() in QUESTIONS and isinstance(prompt, str):
        return _after_body(row, prompt)
    return prompt


def _after_body(row: Row, question: str) -> str:
    """The question after the column that tells the story, if there is one: SVAMP's `Body`."""
    name = next((name for name in row.values if name.lower() == BODY), None)
    body = None if name is None else row.values[name]
    if name is None or not isinstance(body, str) or not body.strip():
        return question
    check_text(body, row.place, name)
    story = body.strip()
    return f"{story if story[-1] in '.?!:;,' else story + '.'} {question.lstrip()}"


def as_prompt(value: object, place: str, column: str) -> Prompt | None:
    """A column's value as a prompt. None if it is empty: null, blank, or a chat without a user's turn."""
    if isinstance(value, str):
        check_text(value, place, column)
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    if not isinstance(value, list):
        raise ValueError(
            f"{place}: column {column!r} holds {_shown(value)}. A prompt must be text, or a list of messages with role "
            "and content. Name another column with prompt_column."
        )
    messages = [_message(message, place, column) for message in value]
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()  # the model itself must write this one
    return messages if any(m["content"].strip() for m in messages if m["role"] != "assistant") else None


def check_text(text: str, place: str, column: str) -> None:
    """Refuse a lone surrogate, which is half a character: JSON can hold one, but no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: column {column!r} holds the lone surrogate \\u{ord(text[error.start]):04x} at position "
            f"{error.start + 1}, which is half a character. Repair the text, or remove the row."
        ) from None


def answer_of(row: Row, column: str | None) -> Any:
    """The row's answer, extracted from the solution if a solution holds it; None if it is empty."""
    name, value = _first(row, ANSWERS, column, "answer", "answer_column")
    answer = as_answer(value, worked=column is None and name.lower() == "solution")
    for text in answer if isinstance(answer, list) else [answer]:
        if isinstance(text, str):
            check_text(text, row.place, name)
    return answer


def pair_of(row: Row, prompt_column: str | None, response_column: str | None) -> tuple[Prompt | None, str | None]:
    """The row's prompt and response; None for each that is empty.

    The response of a chat is its last message, if the assistant wrote it. A response from `messages` answers the
    messages before it, so those are its prompt, whatever the other columns say: some data sets repeat the first turn in
    another column.
    """
    name, value = _first(row, RESPONSES, response_column, "response", "response_column")
    prompt = None
    if prompt_column is None and name.lower() == "messages" and isinstance(value, list):
        prompt = as_prompt(value, row.place, name)
    return prompt or prompt_of(row, prompt_column), _as_response(value, row, name)


def _as_response(value: Any, row: Row, name: str) -> str | None:
    if isinstance(value, list):
        last = value[-1] if value else None
        value = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
    if value is not None and not isinstance(value, str):
        raise ValueError(
            f"{row.place}: column {name!r} holds {str(value)[:60]!r} ({type(value).__name__}). A response must be "
            "text, or a chat whose last message is the assistant's. Name another column with response_column."
        )
    if value:
        check_text(value, row.place, name)
    return value if value and value.strip() else None


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
    listed = _json_texts(value) if isinstance(value, str) else value
    if isinstance(listed, list):
        given = [answer for item in listed if (answer := as_answer(item, worked=worked)) is not None]
        return given[0] if len(given) == 1 else given or None
    if not isinstance(value, str) or not value.strip():
        return None
    if hashes := _hashes(value):
        return hashes[1]
    boxed = last_boxed(value)
    return boxed if boxed or worked else value.strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} of a text with balanced braces, or of \boxed 5; None if there is no box."""
    boxes = {box.end() - 1 for box in _BOX.finditer(text)}
    begun: list[int] = []
    last = end = -1
    for mark in MARK.finditer(text) if boxes else ():
        if mark[0] == "{":
            begun.append(mark.start())
        elif mark[0] == "}" and begun and (start := begun.pop()) in boxes and start > last:
            last, end = start, mark.start()
    if last >= 0:
        return text[last + 1 : end].strip()
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def without_marks(solution: str) -> str:
    r"""A GSM8K solution as a model should write it: no calculator marks, and `\boxed{72}` for `#### 72`."""
    hashes = _hashes(solution)
    if hashes is None:
        return solution
    reasoning, answer = hashes
    return f"{_CALCULATOR.sub('', reasoning)}\n\\boxed{{{answer}}}".lstrip()


def extra_of(row: Row, used: Sequence[str | None], *, whole: bool = False) -> dict[str, Any]:
    """The row's other columns, as far as JSON can hold them. The entries of verl's `extra_info` are among them.

    `whole`: all columns as they are, but for those that TRL takes itself.
    """
    if whole:
        inner = row.values.get("extra_info")
        said = (inner if isinstance(inner, dict) else {}) | row.values
        return {name: said[name] for name in said if name not in ("prompt", "completion") and _is_json(said[name])}
    taken = {*PROMPTS, *ANSWERS, *used, "reward_model", "extra_info", "input", "data_source"}
    said = {
        name: value
        for name, value in row.values.items()
        if name.lower() not in taken and name not in taken and not name.startswith("__")
    }
    inner = row.values.get("extra_info")
    if isinstance(inner, dict):
        said.update(inner)
    return {name: value for name, value in said.items() if value is not None and _is_json(value)}


def look_up(values: dict[str, Any], column: str) -> Any:
    """The value under a name, or under a path of names joined by dots; None if there is none."""
    found = _value_at(values, column)
    return None if found is _ABSENT else found


def _message(message: object, place: str, column: str) -> Message:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            f"{place}: column {column!r} holds {_shown(message)}, which is not a message. "
            'Write messages as {"role": "user", "content": "text"}; only text can be read.'
        )
    check_text(content, place, column)
    return {"role": role, "content": content}


def _shown(value: object) -> str:
    return f"{str(value)[:60]!r} ({type(value).__name__})"


def _first(row: Row, candidates: Sequence[str], column: str | None, what: str, key: str) -> tuple[str, Any]:
    """The name and value of the first candidate that has one."""
    present = None
    lowered = {name.lower(): name for name in row.values}
    for candidate in candidates if column is None else (column,):
        name = candidate if column is not None else lowered.get(candidate, candidate)
        value = _value_at(row.values, name)
        if value is not _ABSENT:
            present = present or name
            if value is not None and value != "":
                return name, value
    if present is not None:
        return present, None
    usual = f"none of its columns is called {', '.join(candidates)}"
    why = usual if column is None else f"there is no column for {key}={column!r}"
    names = [
        f"{name} ({', '.join(f'{name}.{inner}' for inner in value)})" if isinstance(value, dict) and value else name
        for name, value in row.values.items()
    ]
    raise ValueError(
        f"{row.place} has no {what}: {why}. It has {', '.join(map(str, names)) or 'no columns'}. Name the right "
        "columns with prompt_column and answer_column (response_column); dots lead into nested columns."
    )


def _value_at(values: dict[str, Any], column: str) -> Any:
    if column in values:
        return values[column]
    inside: Any = values
    for part in column.split("."):
        if not isinstance(inside, dict) or part not in inside:
            return _ABSENT
        inside = inside[part]
    return inside


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float | bool)


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
