"""Chat templates, rendered in a process of their own (`bapo.process.limited`).

A chat template is a program of the model's authors, in a language without functions of Python but with loops, powers
and texts of any length. So it is rendered where it can be stopped, and where its memory is bounded. The environment is
that of transformers, which a test compares with it. The process starts at the first template; it imports this module,
and so neither torch nor transformers.
"""

import atexit
import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from threading import Lock
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2 import TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bapo.process.limited import Worker

SECONDS, MEMORY_MB = 10.0, 1024
"""How long one chat may take to become text, and what it may need for that. Real templates need less than a
millisecond."""
ADDED, TIMES = 1 << 17, 8
"""Most characters that a chat may become: so many, and so many times what the template was given. All of them become
tokens, which takes hundreds of bytes for each. Real templates add some thousands of characters."""
LONGEST_REFUSAL = 2000
"""Most characters of what a template says against a chat."""

_WORKER, _LOCK = Worker("bapo.models.templates:answer", MEMORY_MB), Lock()
atexit.register(_WORKER.close)


def render(
    tokenizer: Any,
    messages: Any,
    *,
    add_generation_prompt: bool = False,
    marks: Sequence[str] = ("", ""),
    **options: Any,
) -> str:
    """A chat as the tokenizer's template writes it: `apply_chat_template(…, tokenize=False)`.

    `marks`: texts to put before and after what the template marks as the assistant's.
    """
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return str(  # a tokenizer of transformers that needs no template
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        )
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    values |= {**tokenizer.special_tokens_map, **options}
    return str(ask(tokenizer.get_chat_template(None, values["tools"]), values, marks))


def ask(template: str, values: dict[str, Any] | None = None, marks: Sequence[str] = ("", "")) -> Any:
    """What `answer` says in the other process. TemplateError if it is no template, refuses, or does not end."""
    with _LOCK:
        reply = _WORKER.call(SECONDS, [template, values, marks])
    if "result" not in reply:
        raise TemplateError(f"it does not end within {SECONDS:g} s, or needs more than 1 GiB of memory")
    found = reply["result"]
    if "refused" in found:
        error = TemplateError(found["refused"])
        error.lineno = found["line"]  # type: ignore[attr-defined]
        raise error
    return found["answer"]


def names_in(path: str, chat_template: Any) -> set[str]:
    """The names that a template, or any of several, reads from its arguments. Refuses what is no template."""
    templates = list(chat_template.values()) if isinstance(chat_template, dict) else [chat_template or ""]
    for name in chat_template if isinstance(chat_template, dict) else ():
        if not re.fullmatch(r"\w[\w.-]{,99}", str(name)):  # a model is written with a file of this name
            raise ValueError(
                f"{path!r} has a chat template with the name {str(name)[:60]!r}, which cannot be that of a file. Use "
                "letters, digits and _, and at most 100 of them."
            )
    named: set[str] = set()
    for template in templates:
        try:
            if not isinstance(template, str):
                raise TypeError(f"{template!r} is not text.")
            named |= {*ask(template)}
        except (TemplateError, TypeError) as error:
            line = f" in line {number}" if (number := getattr(error, "lineno", None)) else ""
            raise ValueError(
                f"the chat template of {path!r} cannot be read{line}: {reason_of(error)} Correct chat_template.jinja "
                "(or chat_template in tokenizer_config.json), or remove it and set model.chat='no'."
            ) from error
    return named


def reason_of(error: Exception) -> str:
    """The first line of an error, with the second one if the first only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    return reason if reason.endswith(".") else f"{reason.rstrip(':')}."


def answer(template: str, values: dict[str, Any] | None, marks: Sequence[str]) -> dict[str, Any]:
    """The text that a template makes of values; without values, the names that it reads. Called in the worker."""
    try:
        compiled = _compiled(template)
        Generation.before, Generation.after = marks
        if values is None:
            return {"answer": sorted(jinja2.meta.find_undeclared_variables(_environment().parse(template)))}
        text = compiled.render(**values)
        given = len(json.dumps(values))
        if len(text) > (most := ADDED + TIMES * given):
            raise TemplateError(f"it makes {len(text):,} characters of a chat of {given:,}, and may make {most:,}")
        return {"answer": text}
    except MemoryError:
        raise
    except Exception as error:
        told = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        return {"refused": told[:LONGEST_REFUSAL], "line": getattr(error, "lineno", None)}


@cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@cache
def _environment() -> jinja2.Environment:
    """The environment in which transformers renders chat templates."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


class Generation(jinja2.ext.Extension):
    """{% generation %}, with which templates mark what an assistant said. It changes nothing else of the text."""

    tags = {"generation"}  # noqa: RUF012
    before = after = ""

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """The block as a call that returns what is in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return f"{self.before}{caller()}{self.after}"
