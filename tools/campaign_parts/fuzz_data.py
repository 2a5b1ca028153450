"""Families of data: rows, files of rows, answers, and reward functions."""

from __future__ import annotations

import gzip
import json
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from campaign_parts.fuzz import Family, Refused
from campaign_parts.fuzz_values import edited, json_values, scalars, strange

COLUMNS = [
    *("prompt", "question", "problem", "answer", "solution", "response", "completion", "messages", "ground_truth"),
    *("reward_model", "data_source", "extra_info", "Body", "Question", "final_answer", "conversations", "gold"),
]
LATEX = [
    *(
        "\\boxed{",
        "\\frac{",
        "}",
        "{",
        "^",
        "_",
        "!",
        "1",
        "2",
        "3",
        "0",
        "x",
        "y",
        "=",
        ",",
        ";",
        ":",
        "10^{",
        "\\sqrt{",
    ),
    *("e", "\\pi", "%", "$", "(", ")", "[", "]", "\\text{", " or ", "\\infty", "\\pm", "-", "+", "*", "/", ".", "i"),
    *(
        "The answer is ",
        "####",
        "<think>",
        "</think>",
        "\\left(",
        "\\right)",
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "&",
    ),
    *("\\\\", "\\{", "\\}", "\\cup", "\\circ", "a.m.", "1/0", "9^{9^{9^{9}}}", "1e999", "factorial", "\\int", "\\sum_"),
    *(
        "\\log",
        "\\binom{",
        "°",
        "½",
        "²",
        "−",
        "\n\n",
        "\\[",
        "\\]",
        "yes",
        "A",
        "(B)",
        "\\textbf{",
        "x_{1}",
        "\\in",
        "⟨",
    ),
]
latex = st.lists(st.sampled_from(LATEX), max_size=14).map("".join)
answers = st.one_of(latex, st.text(max_size=40), latex.map(lambda text: f"so \\boxed{{{text}}}."))
golds = st.one_of(latex, st.integers().map(str), st.floats().map(str), st.text(max_size=12), scalars)


def families() -> dict[str, Family]:
    """All of them."""
    rows = st.lists(_row(), max_size=4)
    kinds = st.sampled_from([".jsonl", ".json", ".csv", ".jsonl.gz", ".parquet", ".txt", ".json.gz"])
    names = st.text(max_size=30) | strange.filter(lambda value: isinstance(value, str))
    texts = [json.dumps({"prompt": "1+1=", "answer": "2"}).encode() + b"\n", b"prompt,answer\n1+1=,2\n", b"[]", b""]
    return {
        "data rows": Family(20, st.tuples(rows, kinds, _columns(), st.booleans()), _rows),
        "data files": Family(12, st.tuples(edited(texts), kinds, st.booleans()), _bytes),
        "data sources": Family(5, names.filter(_is_below), _source),
        "math answers": Family(16, st.tuples(golds, answers), _math, chunk=2000),
        "countdown answers": Family(16, st.text("0123456789+-*=;:, ()\n²٣", max_size=40) | answers, _countdown),
        "reward functions": Family(10, st.tuples(_deeds(), st.text(max_size=10), st.booleans()), _function),
    }


@st.composite
def _row(draw: st.DrawFn) -> Any:
    if not draw(st.integers(0, 19)):
        return draw(json_values)
    message = st.fixed_dictionaries({"role": scalars, "content": st.one_of(scalars, json_values)}) | json_values
    value = st.one_of(scalars, latex, json_values, st.lists(message, max_size=3), json_values.map(_dumped))
    usual: dict[str, Any] = {}
    if draw(st.integers(0, 4)):
        usual = {"prompt": draw(st.text(max_size=8)), draw(st.sampled_from(["answer", "response"])): draw(latex)}
    return usual | draw(st.dictionaries(st.sampled_from(COLUMNS) | st.text(max_size=6), value, max_size=3))


def _is_below(name: str) -> bool:
    """Whether a name cannot lead to files of this machine, which are not what is tried."""
    return not name.partition("=")[2].startswith(("/", "~", "..")) and not name.startswith(("/", "~", ".."))


def _dumped(value: Any) -> str:
    return json.dumps(value)


def _columns() -> st.SearchStrategy[tuple[str | None, str | None, str | None]]:
    column = st.sampled_from([*[None] * 40, *COLUMNS, "a.b", ".", "", "prompt.0"])
    return st.tuples(column, column, st.sampled_from([*[None] * 8, "{prompt}", "a {prompt} b", "{", "{x}", ""]))


def _rows(case: Any, inside: Path) -> None:
    rows, kind, columns, supervised = case
    _load(inside, kind, b"".join(json.dumps(row).encode() + b"\n" for row in rows), columns, supervised, rows)


def _bytes(case: Any, inside: Path) -> None:
    data, kind, supervised = case
    _load(inside, kind, data, (None, None, None), supervised, None)


def _load(inside: Path, kind: str, data: bytes, columns: Any, supervised: bool, rows: Any) -> None:
    from bapo.tasks.data.problems import fingerprint, load_demonstrations, load_problems
    from bapo.tasks.verify.scorers import check_answers

    path = inside / f"data{kind}"
    if kind == ".parquet" and rows is not None and not _write_parquet(path, rows):
        kind, path = ".jsonl", inside / "data.jsonl"
    if not path.exists():
        path.write_bytes(gzip.compress(data) if kind.endswith(".gz") and rows is not None else data)
    prompt, answer, template = columns
    if supervised:
        load_demonstrations([str(path)], prompt_column=prompt, response_column=answer, template=template)
        return
    problems, report = load_problems([str(path)], prompt_column=prompt, answer_column=answer, template=template)
    assert len(problems) == report.kept
    fingerprint(problems)
    check_answers(problems, ["math"])


def _write_parquet(path: Path, rows: Any) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except Exception:  # pyarrow does not take every row, and its refusal is not what is tried here
        path.unlink(missing_ok=True)
        return False
    return True


def _source(case: str, inside: Path) -> None:
    from bapo.tasks.data.sources import resolve

    resolve(case)


@cache
def _pool() -> Any:
    from bapo.tasks.verify.sandbox import VerifierPool

    return VerifierPool("bapo.tasks.verify.math:verify", workers=1, seconds=3, memory_mb=2048)


def _math(case: tuple[Any, str], inside: Path) -> None:
    (score,) = _pool().scores([case])
    _judged(score)


@cache
def _countdown_task() -> Any:
    from bapo.tasks.countdown import Countdown

    return Countdown(train_size=8, test_size=8)


def _countdown(case: str, inside: Path) -> None:
    task = _countdown_task()
    for score in task.scores([(problem, case) for problem in list(task.test)[:3]]):
        _judged(score)


def _judged(score: Any) -> None:
    """A reward is a finite number; without one there is a cause."""
    if score.reward is None:
        raise Refused(f"the verifier failed: {score.failure}")
    assert abs(score.reward) < float("inf")


class _Quit(BaseException):
    """An error that is no Exception."""


DEED: list[Any] = []
ERRORS = (
    ValueError,
    SystemExit,
    _Quit,
    RecursionError,
    MemoryError,
    StopIteration,
    GeneratorExit,
    TimeoutError,
    OSError,
)


def _deeds() -> st.SearchStrategy[Any]:
    returned = st.one_of(
        json_values, scalars, st.fixed_dictionaries({"reward": scalars}, optional={"answer": json_values})
    )
    raised = st.sampled_from(ERRORS).flatmap(lambda kind: st.builds(kind, st.text(max_size=10)))
    objects = st.sampled_from([object(), object, b"1", 1j, (1,), {1}, range(3), ...])
    return st.one_of(returned, raised, objects)


def _act() -> Any:
    (deed,) = DEED
    if isinstance(deed, BaseException):
        raise deed
    return deed


def _function(case: tuple[Any, str, bool], inside: Path) -> None:
    from bapo.tasks.verify.functions import FunctionReward
    from bapo.types import Problem

    deed, text, is_async = case
    DEED[:] = [deed]
    module = types.ModuleType("fuzzed_reward")

    def plain(response: str, answer: Any) -> Any:
        return _act()

    async def later(response: str, answer: Any) -> Any:
        return _act()

    module.score = later if is_async else plain  # type: ignore[attr-defined]
    sys.modules["fuzzed_reward"] = module
    reward = FunctionReward("fuzzed_reward:score", seconds=5)
    try:
        scores = reward.scores([(Problem("1", "p", "a"), text), (Problem("2", "p", None), text)])
    finally:
        reward.close()
    assert len(scores) == 2
    for score in scores:
        _judged(score)
