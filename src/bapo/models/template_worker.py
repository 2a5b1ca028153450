"""The inside of a process that renders chat templates: lines of JSON come in and go out.

A chat template is a program of the model's authors, in a language without functions of Python but with loops, powers
and texts of any length. So it is rendered where it can be stopped: SIGALRM, with its default action, ends this process
even inside one long operation, and RLIMIT_AS bounds its memory. The environment is that of transformers, which a test
compares with it. The process ends with its owner, at the end of its input. It imports nothing of bapo.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30
LONGEST_OUTPUT = 1 << 26
"""Most characters that a chat may become."""


class Generation(jinja2.ext.Extension):
    """{% generation %}, with which templates mark what an assistant said. It changes nothing of the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """The block as a call that returns what is in it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        return str(caller())


def environment() -> jinja2.Environment:
    """The environment in which transformers renders chat templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

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


ENVIRONMENT = environment()
compiled = lru_cache(ENVIRONMENT.from_string)


def render(template: str, values: dict[str, Any]) -> str:
    """The text that the template makes of these values."""
    text = compiled(template).render(**values)
    if len(text) > LONGEST_OUTPUT:
        raise jinja2.TemplateError(f"it makes {len(text)} characters of one chat")
    return text


def names_read(template: str) -> list[str]:
    """The names that the template reads from its values. Raises a TemplateError if it is no template."""
    compiled(template)
    return sorted(jinja2.meta.find_undeclared_variables(ENVIRONMENT.parse(template)))


ANSWERS: dict[str, Callable[..., Any]] = {"render": render, "names_read": names_read}


def main(seconds: str) -> None:
    """Answer one line after the other until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        function, arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            answer = json.dumps({"answer": ANSWERS[function](*arguments)})
        except Exception as error:
            told = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            answer = json.dumps({"refused": told[:2000], "line": getattr(error, "lineno", None)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
