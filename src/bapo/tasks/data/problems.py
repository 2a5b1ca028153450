"""Data sets read into problems and demonstrations, without duplicates, and with ids that let a run be resumed.

A problem's id is a hash of its question, before any template. So the same question has the same id in every file, a
problem is found again after its file is reordered, and a training problem that is also a test problem is noticed even
if their templates differ.

A question that comes again is left out: DAPO-Math-17k holds 17 thousand questions a hundred times each. If it comes
again with another answer, the first answer counts, since nothing says which one is right. The report counts both cases.

A template is text with `{prompt}` in it. It is put around a text prompt, or around the last user message of a chat.
Nothing else in it is special, so `\\boxed{}` may occur in a template as well as in a problem. A prompt that already
begins and ends like the template is left alone, because some data sets include the usual instruction and some do not. A
template that holds only punctuation is not an instruction and is always applied.

A demonstration is a prompt and a response to learn from. One prompt may have many responses, so a row is left out only
if both came before. In a chat, every assistant turn but the last belongs to the prompt.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from bapo.tasks.data.columns import (
    ANSWERS,
    PROMPTS,
    Prompt,
    answer_of,
    extra_of,
    look_up,
    pair_of,
    prompt_of,
    without_marks,
)
from bapo.tasks.data.rows import Row
from bapo.tasks.data.sources import BOXED, SLOT, Source, resolve, source_rows
from bapo.types import Problem

Found = TypeVar("Found")


@dataclass(frozen=True)
class LoadReport:
    """What became of the rows of a data set."""

    read: int = 0
    kept: int = 0
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
    whole_rows: bool = False,
) -> tuple[list[Problem], LoadReport]:
    """The problems of all sources, in order, and a report of what became of their rows.

    `sources` are files, directories, data sets on the hub and benchmarks; `sources.py` says how they are named. Without
    column names, the usual layouts are recognised (`columns.py`). Without a template, benchmarks get their own, and all
    other prompts stay as they are. `whole_rows`: problems keep all columns, for verifiers that know the data.
    """
    problems: dict[str, Problem] = {}
    counts: Counter[str] = Counter()
    first_conflict = ""
    for source, row, prompt, answer in _read(
        sources, template, counts, lambda row: (prompt_of(row, prompt_column), answer_of(row, answer_column))
    ):
        question = question_id(prompt)
        known = problems.get(question)
        if known is None:
            own = look_up(row.values, "data_source")
            origin = own if isinstance(own, str) and own else source.label
            with _nested_too_deeply(row):
                extra = extra_of(row, (prompt_column, answer_column), whole=whole_rows) | {"data_source": origin}
                put = fill(template or source.template, prompt)
                problems[question] = Problem(question, put, answer, source.label if source.named else origin, extra)
        elif known.answer == answer:
            counts["duplicates"] += 1
        else:
            counts["conflicting"] += 1
            first_conflict = first_conflict or f"{row.place}: {known.answer!r}, then {answer!r}"
    return _reported(sources, list(problems.values()), counts, ("problem", "answer"), first_conflict)


def load_rows(
    sources: Sequence[str], prompt_column: str | None, answer_column: str | None, template: str | None = None
) -> list[Problem]:
    """Every row as a problem with all of its columns, for environments: prompt and answer may be missing.

    Rows may be equal, so the id of each is a hash of its columns and of how often they came before.
    """
    problems, times = list[Problem](), Counter[str]()
    for source in [resolve(name) for name in sources]:
        for row in source_rows(source):
            with _nested_too_deeply(row):
                prompt = prompt_of(row, prompt_column) if _has(row, prompt_column, PROMPTS) else None
                answer = answer_of(row, answer_column) if _has(row, answer_column, ANSWERS) else None
                extra = extra_of(row, (), whole=True)
                text = json.dumps([prompt, extra], sort_keys=True)
            times[text] += 1
            name = sha256(f"{times[text]} {text}".encode(errors="surrogatepass")).hexdigest()[:16]
            put = fill(template or source.template, prompt) if prompt else ""
            problems.append(Problem(name, put, answer, source.label, extra))
    return problems


def _has(row: Row, column: str | None, usual: Sequence[str]) -> bool:
    """Whether a row has a column of this kind. One that the user named must be there."""
    return column is not None or any(name.lower() in usual for name in row.values)


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
    found: dict[str, Demonstration] = {}
    counts: Counter[str] = Counter()
    for source, _, prompt, response in _read(
        sources, template, counts, lambda row: pair_of(row, prompt_column, response_column)
    ):
        text = without_marks(response) if box_answers else response
        name = f"{question_id(prompt)}-{sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"
        counts["duplicates"] += name in found
        found.setdefault(name, Demonstration(name, fill(template or source.template, prompt), text))
    return _reported(sources, list(found.values()), counts, ("demonstration", "response"))


def _read(
    sources: Sequence[str], template: str | None, counts: Counter[str], read: Callable[[Row], tuple[Prompt | None, Any]]
) -> Iterator[tuple[Source, Row, Prompt, Any]]:
    """What `read` finds in the rows of all sources, in order. Rows without a prompt or its answer are only counted.

    Before anything is read, it refuses a missing source, and a template that would lose the prompt.
    """
    if template is not None and SLOT not in template:
        raise ValueError(
            f"template={template!r} has no place for the prompt. Write {SLOT} where the prompt belongs, "
            f"for example {SLOT + ' ' + BOXED!r}."
        )
    for source in [resolve(name) for name in sources]:
        for row in source_rows(source):
            counts["read"] += 1
            with _nested_too_deeply(row):
                prompt, answer = read(row)
            if prompt is None or answer is None:
                counts["without_prompt" if prompt is None else "without_answer"] += 1
            else:
                yield source, row, prompt, answer


def _reported(
    sources: Sequence[str], found: list[Found], counts: Counter[str], what: tuple[str, str], first_conflict: str = ""
) -> tuple[list[Found], LoadReport]:
    """What was found, with a report; an error if it is nothing."""
    report = LoadReport(kept=len(found), first_conflict=first_conflict, **counts)
    if not found:
        raise ValueError(
            f"{', '.join(sources)} gave no {what[0]}: {report}. Check which columns hold the prompt and the {what[1]}, "
            f"and name them with prompt_column and {what[1]}_column."
        )
    return found, report


def within(
    problems: Sequence[Problem], count_tokens: Callable[[Prompt], int], max_prompt_tokens: int
) -> tuple[list[Problem], list[Problem]]:
    """The problems whose prompts have at most `max_prompt_tokens` tokens, and those left out."""
    return _parted(problems, lambda problem: count_tokens(problem.prompt) <= max_prompt_tokens)


def without_overlap(train: Sequence[Problem], test: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """The training problems that are not in the test set, and those left out because they are.

    Problems are compared by id and by the question in the prompt, so problems made elsewhere are compared too. A
    reworded problem is not noticed.
    """
    held_out = {problem.id for problem in test} | {question_id(problem.prompt) for problem in test}
    return _parted(train, lambda problem: held_out.isdisjoint((problem.id, question_id(problem.prompt))))


def hold_out(problems: Sequence[Problem], share: float) -> tuple[list[Problem], list[Problem]]:
    """The problems to train on, and the share of them that is held out: those with the smallest ids.

    Ids are hashes of questions. So what is held out depends neither on a seed, nor on the order of the rows, nor on a
    template, and no question is on both sides.
    """
    names = smallest({problem.id for problem in problems}, share)
    return _parted(problems, lambda problem: problem.id not in names)


def smallest(names: set[str], share: float) -> set[str]:
    """The smallest names, this share of them: at least one unless the share is 0, and never all."""
    wanted = min(max(1, round(share * len(names))), len(names) - 1) if share else 0
    return set(sorted(names)[:wanted])


def _parted(problems: Sequence[Problem], keep: Callable[[Problem], bool]) -> tuple[list[Problem], list[Problem]]:
    kept: list[Problem] = []
    left_out: list[Problem] = []
    for problem in problems:
        (kept if keep(problem) else left_out).append(problem)
    return kept, left_out


def fingerprint(problems: Sequence[Problem]) -> str:
    """One hash over ids, prompts, answers and extras. A resumed run compares it with the one it started with."""
    digest = sha256()
    for problem in problems:
        said = [problem.id, problem.prompt, problem.answer, problem.extra]
        digest.update(json.dumps(said, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


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


@contextmanager
def _nested_too_deeply(row: Row) -> Iterator[None]:
    """Says which row it is if its lists and objects are nested too deeply."""
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{row.place} holds lists or objects nested too deeply to be read. Flatten them, or store them as text."
        ) from None
