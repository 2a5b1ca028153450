"""A policy: a model with its tokenizer, and how text becomes tokens and tokens become text.

A prompt is text to be continued as it stands, or a chat, which the model's own template turns into text. A base model
without a template gets the messages as plain text, one after the other. The template writes every special token that a
chat needs, so we add none to its output. Plain text gets the tokens that the tokenizer puts before a text (none, or a
beginning-of-sequence token), once.

A response ends at every token that is named as an end by the tokenizer, the generation settings, the model's own
settings, or the chat template (by what it writes after an assistant's turn). Chat models often have two such tokens,
and a sampler that knows only one of them runs past the other.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from bapo.models.templates import render
from bapo.types import Message, refuse


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer."""

    model: Any
    """A transformers model. Adapters, if any, are inside it, so running the model runs them."""
    tokenizer: Any
    stop_ids: frozenset[int]
    """A response ends with any of these."""
    chat: bool = False
    """Whether a plain-text prompt becomes a user's message in the chat template."""
    system: str = ""
    """The system message for every chat that has none."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking."""
    adapters: Any = None
    """peft's view of the model if low-rank additions are trained; None if all weights are trained."""

    def encode(self, prompt: str | list[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a prompt, up to where the response begins. `tools`: those that it describes, as JSON schemas."""
        if not isinstance(prompt, str) and self.tokenizer.chat_template is None:
            prompt = "\n\n".join(message["content"] for message in prompt)
        if isinstance(prompt, str) and not (self.chat or tools):
            ids = encoded(self.tokenizer, prompt)
            return ids if ids[: len(self._opening)] == self._opening else [*self._opening, *ids]
        chat = self.chat_text([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, tools)
        return encoded(self.tokenizer, chat)

    def chat_text(self, messages: list[Message], tools: Sequence[Any] | None = None) -> str:
        """A chat as the model's template writes it, up to where the response begins."""
        refuse((not messages, "a prompt is a chat without messages, so there is nothing to answer. Give it some."))
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            options = {**self.template_options, **({"tools": list(tools)} if tools else {})}
            return render(self.tokenizer, messages, add_generation_prompt=True, **options)
        except Exception as error:  # a template is a program of the model's authors
            roles = ", ".join(message["role"] for message in messages)
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the model's chat template refuses a chat with the roles {roles}: {reason}. Change the prompts, or "
                "leave model.system empty if the template does not allow a system message."
            ) from error

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether its prompts end with <think>, so that a response begins inside the thinking."""
        return self.decode(self.encode("0")).rstrip().endswith("<think>")

    def vocabulary(self) -> str:
        """A digest of how text becomes tokens: every rule of the tokenizer, the stop tokens and the chat template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules: dict[str, Any] = dict(self.tokenizer.get_vocab()) if backend is None else json.loads(backend.to_str())
        for passing in ("truncation", "padding"):  # set by the last call
            rules.pop(passing, None)
        known = [rules, sorted(self.stop_ids), self.tokenizer.chat_template]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def decode(self, tokens: list[int]) -> str:
        """The text of a response, exactly as it was sampled."""
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    def transcript(self, tokens: list[int]) -> str:
        """The same without a stop token at the end, which a conversation may have that a limit cut off after a turn."""
        return self.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens)

    @cached_property
    def _opening(self) -> list[int]:
        """The tokens that the tokenizer puts before a text. Those that it puts after one are left out: they would end
        the response before it began."""
        plain, whole = encoded(self.tokenizer, "0"), encoded(self.tokenizer, "0", special=True)
        begins = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        return whole[: begins[0]] if begins else []


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """A panic of a library in Rust is no Exception in Python, so nobody would catch it. Here it becomes one."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise


def encoded(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """The tokens of a text. Refuses a tokenizer whose files do not let it encode."""
    try:
        with panics_are_errors():
            return list(tokenizer.encode(text, add_special_tokens=special))
    except Exception as error:  # the files are input, and the tokenizer has errors of many kinds for them
        raise ValueError(
            f"the model's tokenizer cannot encode {text[:60]!r}: {type(error).__name__}: {error}. Get the files of "
            f"{tokenizer.name_or_path!r} again, or correct tokenizer.json and tokenizer_config.json."
        ) from error


def prompt_text(prompt: str | list[Message]) -> str:
    """A prompt as people read it."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def find_stop_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Every token that the tokenizer, the generation or model settings, or the chat template name as an end."""
    named = [tokenizer.eos_token_id, end_of_turn(tokenizer)]
    for settings in (model.generation_config, model.config):
        ends = getattr(settings, "eos_token_id", None)
        named += ends if isinstance(ends, list | tuple) else [ends]
    found = [end for end in named if end is not None]
    if strange := [end for end in found if not isinstance(end, int) or abs(end) >= 2**31]:
        raise ValueError(
            f"the model names {str(strange[0])[:60]!r} as its end, which is no token. Correct eos_token_id in "
            "generation_config.json or config.json."
        )
    return frozenset(found)


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after an assistant's turn, if it writes one."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "1"}]
    try:
        text = render(tokenizer, turns)
    except Exception:
        return None  # the template is for another kind of chat; the other three have named their ends
    after = encoded(tokenizer, text.rpartition("1")[2])
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return int(after[0]) if after and after[0] in special else None
