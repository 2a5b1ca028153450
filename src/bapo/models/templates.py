"""Chat templates, rendered by a process of their own (template_worker.py), which a template cannot keep longer than
SECONDS or fill with more than its memory. It is started at the first template, and again when a template has ended it.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from pathlib import Path
from threading import Lock
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

SECONDS = 10.0
"""How long one chat may take to become text. Real templates need less than a millisecond."""
WORKER = Path(__file__).with_name("template_worker.py")


class Renderer:
    """The process, and one question at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, function: str, *arguments: Any) -> Any:
        """What the function of the worker returns. TemplateError if the template refuses, or does not end."""
        question = json.dumps([function, arguments]) + "\n"
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None and process.stdout is not None  # noqa: PT018
                process.stdin.write(question)
                process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # half a question is no question
                self.close()
                raise
            if not line.endswith("\n"):
                self.close()
                raise TemplateError(f"it does not end within {SECONDS:g} s, or needs more than 1 GiB of memory")
        answer = json.loads(line)
        if "refused" in answer:
            error = TemplateError(answer["refused"])
            error.lineno = answer["line"]  # type: ignore[attr-defined]
            raise error
        return answer["answer"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", str(WORKER), str(SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the owner
            )
        return self._process


RENDERER = Renderer()
atexit.register(RENDERER.close)


def render(tokenizer: Any, messages: Any, *, add_generation_prompt: bool = False, **options: Any) -> str:
    """A chat as the tokenizer's template writes it: `apply_chat_template(…, tokenize=False)`."""
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return str(  # a tokenizer of transformers that needs no template
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        )
    values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    values |= {**tokenizer.special_tokens_map, **options}
    template = tokenizer.get_chat_template(None, values["tools"])
    return str(RENDERER.ask("render", template, values))


def names_read(template: str) -> set[str]:
    """The names that a template reads from its values. TemplateError if it is none."""
    return set(RENDERER.ask("names_read", template))
