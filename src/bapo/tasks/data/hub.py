"""Rows of data sets on the Hugging Face hub, read with the `datasets` package. No other module imports it.

This module also reads what `Dataset.save_to_disk` wrote, which only that package can do. Plain files do not pass
through here, wherever they came from: they need neither the package nor its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bapo.tasks.data.rows import Row

__all__ = ["hub_rows", "is_saved", "saved_rows"]

BATCH = 1024
_SAVED_MARKS = ("dataset_dict.json", "state.json")


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return any((directory / mark).is_file() for mark in _SAVED_MARKS)


def hub_rows(name: str, config: str | None = None, split: str | None = None) -> Iterator[Row]:
    """The rows of `owner/name`, from the hub or its local cache."""
    datasets = _package(name)
    label = ":".join(part for part in (name, config, split) if part)
    if split is None:
        split = _only_split(name, _from_hub(label, datasets, datasets.get_dataset_split_names, name, config))
    yield from _rows(_from_hub(label, datasets, datasets.load_dataset, name, config, split=split), label)


def saved_rows(directory: Path, split: str | None = None) -> Iterator[Row]:
    """The rows of a directory that `save_to_disk` wrote."""
    datasets = _package(str(directory))
    try:
        data = datasets.load_from_disk(str(directory))
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"{directory} could not be loaded as a saved data set: {_first_line(error)} Save it again with "
            "Dataset.save_to_disk."
        ) from error
    if isinstance(data, datasets.DatasetDict):
        wanted = _only_split(str(directory), list(data)) if split is None else split
        if wanted not in data:
            raise ValueError(f"{directory} has no split {wanted!r}. It has {', '.join(data)}; name one of these.")
        data = data[wanted]
    elif split is not None:
        raise ValueError(f"{directory} has no split {split!r}: it is a data set without splits. Leave out ':{split}'.")
    yield from _rows(data, str(directory))


def _from_hub(label: str, datasets: Any, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"data set {label!r} could not be loaded from the hub: {_first_line(error)} "
            "Check the name: owner/name, owner/name:split or owner/name:config:split. Without a network, give the path "
            "of a .jsonl, .json, .csv or .parquet file or of a directory of them; benchmarks are looked up in "
            "$BAPO_DATA/NAME first."
        ) from error


def _only_split(name: str, splits: list[str]) -> str:
    if len(splits) != 1:
        raise ValueError(f"{name} has the splits {', '.join(splits)}. Name one: {name}:{splits[0]}.")
    return splits[0]


def _rows(data: Any, label: str) -> Iterator[Row]:
    number = 0
    for table in data.with_format("arrow").iter(batch_size=BATCH):
        for values in table.to_pylist():
            number += 1
            yield Row(values, label, "row", number)
    if number == 0:
        raise ValueError(f"{label} has no rows. Name another split or data set.")


def _package(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name!r} is not a file or a directory of plain files, and reading it as a data set needs the datasets "
            "package. Install it with `pip install 'bapo[data]'` or `pip install datasets`, or give the path of a "
            ".jsonl, .json, .csv or .parquet file."
        ) from None
    return datasets


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".") or "no reason given"
    return f"{type(error).__name__}: {text}."
