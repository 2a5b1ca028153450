"""How data sources are named, and what each name leads to.

    data/problems.jsonl                 a file
    data/dapo    data/gsm8k:train       a directory, or one split of it
    openai/gsm8k:main:test              a data set on the hub: owner/name[[:config]:split]
    aime24       gsm8k:train            a benchmark, from $BAPO_DATA/NAME if that exists, otherwise from the hub;
                                        for a directory of that name write ./aime24
    aime24=/elsewhere/aime.parquet      any of the above under a name of your own; a benchmark's name adds its template

In a directory, `train.jsonl`, `train-00000-of-00004.parquet` and `train/0000.parquet` belong to the split `train`. A
directory that holds several splits is never read as a whole, because that would train on its test problems.

Names are looked up when a source is resolved, so that a missing file is reported before anything is read. The hub is
contacted only when rows are read.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bapo.tasks.data.rows import FORMATS, Row, data_format, hub_rows, read_rows
from bapo.types import refuse

DATA_DIRECTORY = "BAPO_DATA"
"""The environment variable that names the directory of benchmarks: $BAPO_DATA/aime24/*.parquet."""
SLOT = "{prompt}"
"""The place of the prompt in a template."""
BOXED = r"Let's think step by step and output the final answer within \boxed{}."
"""The sentence that verl and Skywork-OR1 put after their problems."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""File and directory names that name a split."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]*){0,2}")
_LABEL = re.compile(r"[A-Za-z0-9][\w.-]*")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
_SAVED = {"dataset_dict.json", "state.json"}
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", *_SAVED}


@dataclass(frozen=True)
class Source:
    """Where rows come from. Either `files` or `hub` is set."""

    label: str
    """The `source` of its problems, unless a row names its own data set."""
    named: bool = False
    """Whether a person chose the label. If so, it holds for every row."""
    template: str = SLOT
    """The template of its prompts, unless the caller gives another."""
    files: tuple[Path, ...] = ()
    hub: str = ""
    config: str | None = None
    split: str | None = None


BENCHMARKS = {
    label: Source(label, named=True, template=f"{SLOT} {BOXED}", hub=hub, config=config, split=split)
    for label, hub, config, split in (
        ("gsm8k", "openai/gsm8k", "main", "test"),
        ("math500", "HuggingFaceH4/MATH-500", None, "test"),
        ("aime24", "HuggingFaceH4/aime_2024", None, "train"),
        ("aime25", "math-ai/aime25", None, "test"),
    )
}
"""Data sets that go by a name of ours. NAME:SPLIT selects another split.

Their prompts ask for the answer in a box because the verifier looks there. Their columns are not listed here:
`columns.py` recognises every layout of these data sets, the hub's, verl's parquet files and the authors' own files.
"""


def resolve(name: str) -> Source:
    """The source that a name leads to, as the module's docstring describes. Refuses a name that leads nowhere."""
    label, equals, rest = name.partition("=")
    if equals and _LABEL.fullmatch(label) and not _path(name).exists():
        source = replace(_unnamed(rest), label=label, named=True)
        return replace(source, template=BENCHMARKS[label].template) if label in BENCHMARKS else source
    return _unnamed(name)


def source_rows(source: Source) -> Iterator[Row]:
    """The rows of a source, file after file."""
    if source.hub:
        if Path(source.hub).exists():  # the package would read it in place of the hub's
            raise ValueError(
                f"data source {source.label!r} is {source.hub} on the hub, but here is a folder or file of that name. "
                f"To read it, write ./{source.hub}; otherwise start somewhere else."
            )
        yield from hub_rows(source.hub, source.config, source.split)
    for path in source.files:
        yield from read_rows(path)


def _unnamed(name: str) -> Source:
    before, _, split = name.rpartition(":")
    benchmark, _, wanted = name.partition(":")
    path = _path(name)
    if benchmark in BENCHMARKS:
        return _benchmark(benchmark, wanted or None)
    if name and path.exists():
        return _local(path, None)
    if before and _path(before).is_dir():
        return _local(_path(before), split)
    if _HUB_NAME.fullmatch(name) and data_format(path) not in FORMATS:
        hub, *parts = name.split(":")
        *config, last = [part or None for part in parts] or [None]
        return Source(label=hub, hub=hub, config=config[0] if config else None, split=last)
    raise ValueError(
        f"data source {name!r} does not exist: it is not a file or directory, not a benchmark "
        f"({', '.join(BENCHMARKS)}) and not the name of a data set on the hub (owner/name, owner/name:split or "
        f"owner/name:config:split). Check the spelling; paths are relative to {Path.cwd()}."
    )


def _path(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.exists()
        return path
    except (OSError, RuntimeError) as error:  # too long a name, or the home of a user that this machine does not know
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise ValueError(
            f"data source {name[:100]!r} cannot be looked up: {reason}. Give a name or a path that exists, and put ./ "
            "before a name that begins with ~."
        ) from error


def _benchmark(name: str, split: str | None) -> Source:
    benchmark = BENCHMARKS[name]
    root = os.environ.get(DATA_DIRECTORY)
    if root and not Path(root).is_dir():
        raise ValueError(
            f"{DATA_DIRECTORY}={root} is not a directory. Set it to the directory that holds {name}/, or unset it."
        )
    directory = Path(root) / name if root else None
    if directory is not None and directory.is_dir():
        found = _local(directory, split, default=benchmark.split)
        return replace(found, label=name, named=True, template=benchmark.template)
    return replace(benchmark, split=split or benchmark.split)


def _local(path: Path, split: str | None, default: str | None = None) -> Source:
    if not path.is_dir():
        stem = _stem(path)
        only_a_split = stem in SPLITS or _SHARD.fullmatch(stem)
        return Source(label=path.resolve().parent.name if only_a_split else stem, files=(path,))
    if any((path / mark).is_file() for mark in _SAVED):
        raise ValueError(
            f"{path} holds what save_to_disk wrote. Write it as a file that bapo reads, in Python: "
            f"datasets.load_from_disk({str(path)!r}).to_parquet('train.parquet'); of several splits, each by itself."
        )
    try:
        inside = sorted(
            file
            for file in path.rglob("*")
            if data_format(file) in FORMATS
            and file.name not in _NOT_DATA
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
            and file.is_file()
        )
    except OSError as error:
        raise ValueError(
            f"{path} cannot be searched for data: {error}. Name a directory whose files you may read, or a file."
        ) from error
    if not inside:
        present = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"{path} has no file that ends in {', '.join(FORMATS)} (or .gz). It holds: {present}. Name another."
        )
    splits: dict[str, list[Path]] = {}
    for file in inside:
        splits.setdefault(_split(file, path), []).append(file)
    if split is None and splits.keys() != {""}:
        split = default
    named = [repr(split) for split in sorted(splits) if split]
    listed = ", ".join(named + [f"{file.name} (in no split)" for file in splits.get("", [])[:2]])
    choice = min(splits.keys() - {""}, default="")
    refuse(
        (
            split is None and len(splits) > 1,
            f"{path} holds several splits: {listed}. Name one of them, such as {path}:{choice}, or a file.",
        ),
        (
            split is not None and split not in splits,
            f"{path} has no split {split!r}. It holds {listed}. Name one of these, or a file.",
        ),
    )
    return Source(label=path.resolve().name, files=tuple(inside if split is None else splits[split]))


def _split(file: Path, root: Path) -> str:
    """The split that the name of a file or of its directory states; empty if neither does."""
    stem = _stem(file)
    if shard := _SHARD.fullmatch(stem):
        return shard[1]
    if (first := re.split(r"[-_.]", stem)[0]) in SPLITS:
        return first
    return file.parent.name if file.parent != root and file.parent.name in SPLITS else ""


def _stem(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).stem
