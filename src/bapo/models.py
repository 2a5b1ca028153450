"""A policy: the weights, and how text becomes tokens and tokens text.

A prompt is text to be continued as it stands, or a chat, which the model's own template turns into text. A response
ends at any token the model or its tokenizer names as an end: chat models often have two, and a sampler that knows one
of them runs past the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from bapo.demo import model_path
from bapo.types import Message


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer."""

    model: Any
    tokenizer: Any
    stop_ids: frozenset[int]
    """A response ends with any of these."""
    chat: bool = False
    """Whether prompts that are plain text are put to the model as a user's message."""
    system: str = ""
    """System message of every chat that has none."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""

    def encode(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt, up to where the response begins."""
        if isinstance(prompt, str) and not self.chat:
            return list(self.tokenizer.encode(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "a prompt is a chat, but the tokenizer has no chat template to turn it into text. Use a model that has "
                "one, or prompts of plain text."
            )
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template_options
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))  # the template writes its own

    def decode(self, tokens: list[int]) -> str:
        """Text of a response."""
        return str(self.tokenizer.decode(tokens))


def prompt_text(prompt: str | list[Message]) -> str:
    """A prompt as people read it."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def load_policy(
    path: str,
    *,
    dtype: str,
    device: str,
    attention: str = "auto",
    chat: bool | None = None,  # None: if the tokenizer has a chat template
    system: str = "",
    template_options: dict[str, Any] | None = None,
) -> Policy:
    """A transformers model directory or hub id, or "demo" for the embedded model."""
    source = str(model_path()) if path == "demo" else path
    options: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"model.path={path!r} cannot be loaded: {str(error).splitlines()[0]} Give a directory with a "
            'transformers causal language model and its tokenizer, or "demo".'
        ) from error
    if chat and tokenizer.chat_template is None:
        raise ValueError(
            f"model.chat='yes', but the tokenizer of {path!r} has no chat template. Set 'no', or use a chat model."
        )
    stop_ids = find_stop_ids(tokenizer, model)
    if not stop_ids:
        raise ValueError(f"model.path={path!r}: its tokenizer has no end-of-sequence token to stop at. Set one.")
    return Policy(
        model=model.to(device),
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        chat=tokenizer.chat_template is not None if chat is None else chat,
        system=system,
        template_options=template_options or {},
    )


def find_stop_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every token that the tokenizer, the generation settings or the model's own settings name as an end."""
    named = [tokenizer.eos_token_id]
    for settings in (model.generation_config, model.config):
        ends = getattr(settings, "eos_token_id", None)
        named += ends if isinstance(ends, Iterable) else [ends]
    return frozenset(int(end) for end in named if end is not None)
