"""Prompts: text to be continued, or the messages of a chat.

A template is text with `{prompt}` in it. It is put around a text prompt, or around the last user message of a chat.
Nothing else in it is special, so `\\boxed{}` may occur in a template as well as in a problem. A prompt that already
begins and ends like the template is left alone, because some data sets include the usual instruction and some do not. A
template that holds only punctuation is not an instruction and is always applied.

How a chat becomes tokens, and whether a system message comes before it, is decided by the policy, not here.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256

from bapo.types import Message

__all__ = ["BOXED", "BOXED_TEMPLATE", "Prompt", "as_prompt", "check_template", "check_text", "fill", "question_id"]

Prompt = str | list[Message]

SLOT = "{prompt}"
BOXED = r"Let's think step by step and output the final answer within \boxed{}."
"""The sentence that verl and Skywork-OR1 put after their problems."""
BOXED_TEMPLATE = f"{SLOT} {BOXED}"


def check_template(template: str) -> None:
    """Refuse a template that would lose the prompt."""
    if SLOT not in template:
        raise ValueError(
            f"template={template!r} has no place for the prompt. Write {SLOT} where the prompt belongs, "
            f"for example {SLOT + ' ' + BOXED!r}."
        )


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
            f"{error.start + 1}, which is half a character. The text was cut or badly encoded. Repair it, or remove "
            "the row."
        ) from None


def fill(template: str, prompt: Prompt) -> Prompt:
    """The prompt with the template around it."""
    if isinstance(prompt, str):
        head, _, tail = template.partition(SLOT)
        has_it = prompt.lstrip().startswith(head.strip()) and prompt.rstrip().endswith(tail.strip())
        return prompt if has_it and re.search(r"\w", head + tail) else template.replace(SLOT, prompt)
    last = max((i for i, message in enumerate(prompt) if message["role"] == "user"), default=None)
    if last is None:
        return prompt
    filled = fill(template, prompt[last]["content"])
    assert isinstance(filled, str)
    return [*prompt[:last], {**prompt[last], "content": filled}, *prompt[last + 1 :]]


def question_id(prompt: Prompt) -> str:
    """An id for the question: 16 hex digits, the same on every machine.

    White space and the usual instruction at the end are ignored, and a chat of one user message counts as its text. So
    the same question has the same id in two data sets.
    """
    if isinstance(prompt, str):
        text = _bare(prompt)
    elif len(prompt) == 1 and prompt[0]["role"] == "user":
        text = _bare(prompt[0]["content"])
    else:
        text = json.dumps([[message["role"], _bare(message["content"])] for message in prompt])
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _bare(text: str) -> str:
    return " ".join(text.split()).removesuffix(BOXED).rstrip()


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
