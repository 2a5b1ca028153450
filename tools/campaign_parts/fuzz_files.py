"""Families of files that programs write: models, checkpoints and logs of runs, evaluations, dumps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from campaign_parts.fuzz import Family, command
from campaign_parts.fuzz_values import edited, json_values, scalars, strange

ARRAYS = [
    *("logprobs", "behavior_logprobs", "advantages", "mask", "entropy", "versions", "version", "staleness", "uses"),
    *("sequence_ids", "rewards", "update", "per_token_logps", "old_per_token_logps", "completion_mask", "log_prob"),
    *("old_log_probs", "response_mask", "token_level_rewards", "sampling_per_token_logps", "rollout_log_probs", "x"),
]
DTYPES = ["float32", "float64", "float16", "int64", "int32", "int8", "uint8", "bool"]


def families(model: Path, run: Path, evaluation: Path) -> dict[str, Family]:
    """All of them. They start from a tiny model, a finished run, and a finished evaluation."""
    return {
        "models": Family(1, _changed_file(model), lambda case, inside: _model(model, case, inside), chunk=50),
        "run directories": Family(6, _changed_file(run), lambda case, inside: _run(run, case, inside), chunk=200),
        "evaluations": Family(4, _changed_file(evaluation), lambda case, inside: _evaluation(evaluation, case, inside)),
        "dumps": Family(4, _dump(), _diagnose, chunk=200),
    }


@st.composite
def _changed_file(draw: st.DrawFn, root: Path) -> tuple[str, bytes | None]:
    """The name of a file and its new content; None removes it."""
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "lock")
    name = draw(st.sampled_from(names))
    data = (root / name).read_bytes()
    how = draw(st.integers(0, 9))
    if how == 0:
        return name, None
    if how <= 4 and name.endswith(".json"):
        return name, _dumped(draw(_changed_value(json.loads(data))))
    if how <= 4 and name.endswith(".jsonl"):
        lines = data.splitlines(keepends=True)
        if lines:
            place = draw(st.integers(0, len(lines) - 1))
            lines[place] = _dumped(draw(_changed_value(json.loads(lines[place])))) + b"\n"
        return name, b"".join(lines)
    if how <= 6 and name.endswith(".safetensors"):
        return name, draw(_changed_header(data))
    return name, draw(edited([data]))


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def _changed_value(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one thing in it removed or exchanged."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 4)):
            return {name: kept for name, kept in value.items() if name != key}
        return value | {key: draw(_changed_value(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(_changed_value(value[place])), *value[place + 1 :]]
    return draw(st.one_of(scalars, strange, json_values))


@st.composite
def _changed_header(draw: st.DrawFn, data: bytes) -> bytes:
    """A safetensors file whose header says something else."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    said = draw(_changed_value(json.loads(header)))
    header = _dumped(said) if draw(st.booleans()) else draw(edited([header]))
    stated = len(header) if draw(st.integers(0, 4)) else draw(st.integers(0, 2**64 - 1))
    return stated.to_bytes(8, "little") + header + rest


def _copied(root: Path, case: tuple[str, bytes | None], inside: Path) -> Path:
    """A copy of a directory with one file changed. Files that stay are linked."""
    name, data = case
    copy = inside / "copy"
    shutil.copytree(root, copy, copy_function=os.link)
    (copy / name).unlink()
    if data is not None:
        (copy / name).write_bytes(data)
    return copy


def _model(model: Path, case: tuple[str, bytes | None], inside: Path) -> None:
    from bapo.models.loading import hush, load_policy

    hush()
    policy = load_policy(str(_copied(model, case, inside)), dtype="float32", device="cpu")
    policy.encode("1+1=")


def _run(run: Path, case: tuple[str, bytes | None], inside: Path) -> None:
    """What `bapo resume` decides before it loads a model, and what `bapo report` shows."""
    from bapo.config.run import Config
    from bapo.report.arms import find_arms
    from bapo.report.contents import contents
    from bapo.runs.read import last_step
    from bapo.runs.write import RunDirectory
    from bapo.train.continuing import examine

    copy = _copied(run, case, inside)
    json.dumps(contents(find_arms([copy])), allow_nan=False)
    last_step(copy)
    directory = RunDirectory(copy)
    directory.complete()
    examine(directory, directory.config(Config), None)


def _evaluation(evaluation: Path, case: tuple[str, bytes | None], inside: Path) -> None:
    """What `bapo eval` decides before it goes on."""
    from bapo.evaluate.directory import opened
    from bapo.evaluate.estimates import results
    from bapo.evaluate.results_page import page

    said = json.loads((evaluation / "config.json").read_bytes())
    identity = {key: value for key, value in said.items() if key != "format"}
    rows = [json.loads(line) for line in (evaluation / "responses.jsonl").read_text().splitlines()]
    copy = _copied(evaluation, case, inside)
    if case[1] is not None:  # linked files are shared, and an evaluation cuts its responses in place
        for path in copy.iterdir():
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    chunks = [(row["data"], [row["id"]]) for row in rows]
    with opened(copy, identity) as directory:
        kept = directory.complete(chunks)
    if len(kept) == len(rows):
        page(kept, results(kept, identity))


@st.composite
def _dump(draw: st.DrawFn) -> tuple[str, dict[str, np.ndarray[Any, Any]], bytes | None]:
    """Arrays under names that trainers use, mostly of one shape; perhaps with edits in the file."""
    shape = draw(st.tuples(st.integers(0, 4), st.integers(0, 5)) | st.just((2, 3)) | st.tuples(st.integers(0, 9)))
    usual = ["logprobs", "behavior_logprobs", "advantages", "mask"] if draw(st.integers(0, 9)) else []
    names = [*usual, *draw(st.lists(st.sampled_from(ARRAYS), max_size=4))]
    arrays = {}
    for name in dict.fromkeys(names):
        own = shape if draw(st.integers(0, 19)) else draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
        numbers = st.floats(-5, 0.5) if draw(st.integers(0, 9)) else st.floats(width=32) | st.integers(-3, 3)
        flat = draw(st.lists(numbers, min_size=int(np.prod(own)), max_size=int(np.prod(own))))
        dtype = "float32" if draw(st.integers(0, 9)) else draw(st.sampled_from(DTYPES))
        if name.endswith("mask"):
            flat = [abs(value) % 2 >= 0.5 for value in flat] if draw(st.integers(0, 5)) else flat
        with np.errstate(all="ignore"):
            arrays[name] = np.array(flat).reshape(own).astype(dtype)
    edit = draw(st.none() | st.none() | st.none() | st.binary(min_size=1, max_size=4))
    return draw(st.sampled_from([".npz", ".safetensors", ".parquet"])), arrays, edit


def _diagnose(case: tuple[str, dict[str, np.ndarray[Any, Any]], bytes | None], inside: Path) -> None:
    kind, arrays, edit = case
    path = inside / f"dump{kind}"
    _write_dump(path, arrays)
    if edit is not None:
        data = bytearray(path.read_bytes())
        place = int.from_bytes(edit, "little") % max(1, len(data))
        data[place : place + len(edit)] = edit
        path.write_bytes(data)
    command("diagnose", str(path), "--json", str(inside / "out.json"), "--html", str(inside / "out.html"))


def _write_dump(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        length = max((len(array) for array in arrays.values() if array.ndim), default=0)
        columns = {name: array.tolist() for name, array in arrays.items() if array.ndim and len(array) == length}
        pq.write_table(pa.table(columns), path)
