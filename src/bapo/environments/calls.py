"""The calls of tools in a turn, as the families of models write them.

    hermes      <tool_call>{"name": "search", "arguments": {…}}</tool_call>, any number (Qwen 2.5 and 3, Hermes)
    llama       {"name": "search", "parameters": {…}}, as the whole turn (Llama 3.1 and 3.2)
    tokenizer   by the tokenizer's own `response_template` (transformers 5.13)
    mine:parse  a function of text that returns (name, arguments) pairs, and raises ValueError if a call is malformed

A turn without a call is an answer. A call that is announced and cannot be read is malformed: nothing of the turn is
called, and the model is told why. It may try again, and nothing has failed but its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["FORMATS", "Call", "Malformed", "Parse", "format_of", "of_message", "own"]

Call = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""
Parse = Callable[[str], Sequence[Call]]
"""Finds the calls in a turn."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Malformed(ValueError):  # noqa: N818
    """A call that cannot be read. Its text is for the model."""


def hermes(text: str) -> list[Call]:
    """The calls between <tool_call> tags."""
    calls = []
    for part in text.split(_OPEN)[1:]:
        body, closed, _ = part.partition(_CLOSE)
        if not closed:
            raise Malformed(f"The tool call has no {_CLOSE}.")
        calls.append(_call(body, "arguments"))
    return calls


def llama(text: str) -> list[Call]:
    """The one call that is the whole turn."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    return [_call(text, "parameters")] if re.match(r'\{\s*"(name|type)"\s*:', text) else []


FORMATS: dict[str, Parse] = {"hermes": hermes, "llama": llama}


def format_of(chat_template: str, *, has_own: bool) -> str | None:
    """The format that a chat template shows to the model; None if we do not know it."""
    if has_own:
        return "tokenizer"
    if _OPEN in chat_template and "<function=" not in chat_template:
        return "hermes"
    if '"parameters": ' in chat_template and "<|start_header_id|>" in chat_template:
        return "llama"
    return None


def of_message(message: dict[str, Any]) -> list[Call]:
    """The calls of a turn that a tokenizer's own template has read."""
    return [_checked(call.get("function", call), "arguments") for call in message.get("tool_calls") or []]


def own(parse: Callable[[str], Any]) -> Parse:
    """A function of the user's own as a parser."""

    def checked(text: str) -> list[Call]:
        try:
            found = parse(text)
        except ValueError as error:
            raise Malformed(str(error)) from error
        return [_checked({"name": name, "arguments": arguments}, "arguments") for name, arguments in found or ()]

    return checked


def _call(body: str, key: str) -> Call:
    try:
        return _checked(json.loads(body), key)
    except (json.JSONDecodeError, RecursionError) as error:
        raise Malformed(f"The tool call is not valid JSON: {error}.") from error


def _checked(found: Any, key: str) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise Malformed('The tool call must be a JSON object with a text "name".')
    arguments = found.get(key)
    if not isinstance(arguments := {} if arguments is None else arguments, dict):
        raise Malformed(f'The "{key}" of the tool call must be a JSON object.')
    return found["name"], arguments
