"""Data sets read into demonstrations, for supervised training: a prompt and a response to learn from.

Sources, layouts, templates and errors are those of `problems.py`. Only the rule for duplicates differs: one prompt may
have many responses, so a row is left out only if both prompt and response came before. In a chat, every assistant turn
but the last belongs to the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from bapo.tasks.data.columns import pair_of
from bapo.tasks.data.gold import without_marks
from bapo.tasks.data.problems import LoadReport, resolve_all
from bapo.tasks.data.prompts import Prompt, fill, question_id
from bapo.tasks.data.sources import source_rows

__all__ = ["Demonstration", "load_demonstrations"]


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response to learn from."""

    id: str
    """Unique within its data set and stable between runs: the id of the question, and a hash of the response."""
    prompt: Prompt
    response: str


def load_demonstrations(
    sources: Sequence[str],
    *,
    prompt_column: str | None = None,
    response_column: str | None = None,
    template: str | None = None,
    box_answers: bool = True,
) -> tuple[list[Demonstration], LoadReport]:
    r"""The demonstrations of all sources, in order, and a report of what became of their rows.

    `box_answers` turns GSM8K's solutions, recognised by the `#### 72` at their end, into text that a model should
    write: without calculator marks, and with `\boxed{72}` at the end. Other responses are taken as they are.
    """
    resolved = resolve_all(sources, template)
    found: dict[str, Demonstration] = {}
    read = duplicates = without_prompt = without_response = 0
    for source in resolved:
        for row in source_rows(source):
            read += 1
            prompt, response = pair_of(row, prompt_column, response_column)
            if prompt is None or response is None:
                without_prompt += prompt is None
                without_response += prompt is not None
                continue
            if box_answers:
                response = without_marks(response)
            name = f"{question_id(prompt)}-{sha256(response.encode(errors='surrogatepass')).hexdigest()[:8]}"
            duplicates += name in found
            found.setdefault(name, Demonstration(name, fill(template or source.template, prompt), response))
    report = LoadReport(read, len(found), duplicates, without_prompt=without_prompt, without_answer=without_response)
    if not found:
        raise ValueError(
            f"{', '.join(sources)} gave no demonstration: {report}. Check which columns hold the prompt and the "
            "response, and name them with prompt_column and response_column."
        )
    return list(found.values()), report
