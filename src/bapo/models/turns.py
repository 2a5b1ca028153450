"""What the assistant said in a whole conversation, and what stands between: who wrote which part of its text.

A chat template may mark it ({% generation %}). Otherwise a turn begins where the template would let the assistant
answer what stands before, and ends with the first token that ends a turn. This is right only if the template writes the
same before a turn whether or not more follows; a conversation in which it does not is refused. Empty reasoning, which
some templates write before the last answer only, is no loss.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from bapo.models.policy import Policy
from bapo.models.templates import reason_of, render
from bapo.types import Message, refuse

EMPTY_REASONING = re.compile(r"<think>\s*</think>\s*")
Piece = tuple[str, bool]
"""Text, and whether the assistant wrote it."""


def pieces(policy: Policy, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[Piece]:
    """The text of a conversation up to the end of the last turn that the assistant wrote, by writer."""
    refuse(
        (
            policy.tokenizer.chat_template is None,
            "a demonstration is a conversation with tools, and the model has no chat template. Use one that has.",
        )
    )
    if policy.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": policy.system}, *messages]
    options = {**policy.template_options, **({"tools": list(tools)} if tools else {})}
    marks = f"<{secrets.token_hex(16)}>", f"<{secrets.token_hex(16)}>"
    try:
        marked = render(policy.tokenizer, messages, marks=marks, **options)
        if marks[0] in marked:
            parts = [part for each in marked.split(marks[0]) for part in each.split(marks[1])]
            return [(part, bool(place % 2)) for place, part in enumerate(parts[:-1])]
        return _by_prefixes(policy, messages, marked, options)
    except TemplateError as error:
        raise ValueError(
            f"the model's chat template refuses a conversation with tools: {reason_of(error)} Use a model whose "
            "template takes one, or remove the conversation."
        ) from error


def _by_prefixes(policy: Policy, messages: Sequence[Message], whole: str, options: dict[str, Any]) -> list[Piece]:
    ends = [text for end in policy.stop_ids if (text := policy.decode([end]))]
    found: list[Piece] = []
    read = 0
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(policy.tokenizer, messages[:place], add_generation_prompt=True, **options)
        if not whole.startswith(before):
            before = EMPTY_REASONING.sub("", before)
        closed = [at + len(end) for end in ends if (at := whole.find(end, len(before))) >= 0]
        refuse(
            (
                not whole.startswith(before) or len(before) < read,
                "the chat template is not prefix-preserving: it writes something else before a turn of the assistant "
                "once more follows, so nobody can tell what the assistant would read. Use a template that marks what "
                "the assistant says ({% generation %}), or keeps its turns.",
            ),
            (
                not closed,
                "the chat template ends a turn with no token of its own, so nobody can tell where it ends. Use a model "
                "whose turns end with a special token.",
            ),
        )
        found += [(whole[read : len(before)], False), (whole[len(before) : min(closed)], True)]
        read = min(closed)
    return found
