"""Data sets read into problems and demonstrations, without duplicates, and with ids that let a run be resumed.

A problem's id is a hash of its question, before any template. So the same question has the same id in every file, a
problem is found again after its file is reordered, and a training problem that is also a test problem is noticed even
if their templates differ.

A question that comes again is left out: DAPO-Math-17k holds 17 thousand questions a hundred times each. If it comes
again with another answer, the first answer counts, since nothing says which one is right. The report counts both cases.

A demonstration is a prompt and a response to learn from. One prompt may have many responses, so a row is left out only
if both came before. In a chat, every assistant turn but the last belongs to the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from bapo.tasks.data.columns import extra_of, look_up, pair_of, problem_of, without_marks
from bapo.tasks.data.prompts import Prompt, check_template, fill, question_id
from bapo.tasks.data.rows import Row
from bapo.tasks.data.sources import Source, resolve, source_rows
from bapo.types import Problem

__all__ = [
    *("Demonstration", "LoadReport", "fingerprint", "load_demonstrations", "load_problems", "within"),
    "without_overlap",
]


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows of a data set."""

    read: int
    kept: int
    duplicates: int = 0
    """Rows that repeat an earlier one."""
    conflicting: int = 0
    """Rows that repeat a question with another answer. The first answer counts."""
    without_prompt: int = 0
    without_answer: int = 0
    first_conflict: str = ""
    """The place of the first conflicting row, and the two answers."""

    def __str__(self) -> str:
        parts = [
            f"{count:,} {what}"
            for count, what in (
                (self.duplicates, "duplicates"),
                (self.conflicting, f"repeated with another answer (first: {self.first_conflict})"),
                (self.without_prompt, "without a prompt"),
                (self.without_answer, "without an answer"),
            )
            if count
        ]
        return f"{self.read:,} rows read, {self.kept:,} kept" + (f"; left out: {', '.join(parts)}" if parts else "")


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response to learn from."""

    id: str
    """Unique within its data set and stable between runs: the id of the question, and a hash of the response."""
    prompt: Prompt
    response: str


def load_problems(
    sources: Sequence[str],
    *,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    template: str | None = None,
) -> tuple[list[Problem], LoadReport]:
    """The problems of all sources, in order, and a report of what became of their rows.

    `sources` are files, directories, data sets on the hub and benchmarks; `sources.py` says how they are named. Without
    column names, the usual layouts are recognised (`columns.py`). Without a template, benchmarks get their own, and all
    other prompts stay as they are.
    """
    resolved = resolve_all(sources, template)
    problems: dict[str, Problem] = {}
    read = duplicates = conflicting = without_prompt = without_answer = 0
    first_conflict = ""
    for source in resolved:
        for row in source_rows(source):
            read += 1
            with _nested_too_deeply(row):
                prompt, answer = problem_of(row, prompt_column, answer_column)
            if prompt is None or answer is None:
                without_prompt += prompt is None
                without_answer += prompt is not None
                continue
            question = question_id(prompt)
            known = problems.get(question)
            if known is None:
                put = fill(template or source.template, prompt)
                with _nested_too_deeply(row):
                    problems[question] = _problem(question, put, answer, source, row, (prompt_column, answer_column))
            elif known.answer == answer:
                duplicates += 1
            else:
                conflicting += 1
                first_conflict = first_conflict or f"{row.place}: {known.answer!r}, then {answer!r}"
    report = LoadReport(
        read, len(problems), duplicates, conflicting, without_prompt, without_answer, first_conflict=first_conflict
    )
    if not problems:
        raise ValueError(
            f"{', '.join(sources)} gave no problem: {report}. Check which columns hold the prompt and the answer, and "
            "name them with prompt_column and answer_column."
        )
    return list(problems.values()), report


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


def within(
    problems: Sequence[Problem], count_tokens: Callable[[Prompt], int], max_prompt_tokens: int
) -> tuple[list[Problem], list[Problem]]:
    """The problems whose prompts have at most `max_prompt_tokens` tokens, and those left out."""
    kept: list[Problem] = []
    left_out: list[Problem] = []
    for problem in problems:
        (kept if count_tokens(problem.prompt) <= max_prompt_tokens else left_out).append(problem)
    return kept, left_out


def without_overlap(train: Sequence[Problem], test: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """The training problems that are not in the test set, and those left out because they are.

    Problems are compared by id and by the question in the prompt, so problems made elsewhere are compared too. A
    reworded problem is not noticed.
    """
    held_out = {problem.id for problem in test} | {question_id(problem.prompt) for problem in test}
    kept: list[Problem] = []
    left_out: list[Problem] = []
    for problem in train:
        shared = problem.id in held_out or question_id(problem.prompt) in held_out
        (left_out if shared else kept).append(problem)
    return kept, left_out


def fingerprint(problems: Sequence[Problem]) -> str:
    """One hash over ids, prompts, answers and extras. A resumed run compares it with the one it started with."""
    digest = sha256()
    for problem in problems:
        said = [problem.id, problem.prompt, problem.answer, problem.extra]
        digest.update(json.dumps(said, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def resolve_all(sources: Sequence[str], template: str | None) -> list[Source]:
    """All sources, resolved. Refuses a missing source, an empty list, and a template that would lose the prompt."""
    if template is not None:
        check_template(template)
    if isinstance(sources, str) or not sources:
        raise ValueError(
            f"sources={sources!r} is not a list of names. Give a list of files, directories, hub names or benchmarks."
        )
    return [resolve(source) for source in sources]


@contextmanager
def _nested_too_deeply(row: Row) -> Iterator[None]:
    """Says which row it is if its lists and objects are nested too deeply."""
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{row.place} holds lists or objects nested too deeply to be read. Flatten them, store them as text, or "
            "remove the row."
        ) from None


def _problem(
    question: str, prompt: Prompt, answer: Any, source: Source, row: Row, used: tuple[str | None, ...]
) -> Problem:
    own = look_up(row.values, "data_source")
    origin = own if isinstance(own, str) and own else source.label
    extra = {**extra_of(row, used), "data_source": origin}
    return Problem(question, prompt, answer, source.label if source.named else origin, extra)
