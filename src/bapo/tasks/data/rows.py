"""Data sets read into rows, each with its place: files, and the hub through the `datasets` package.

    .jsonl      one object per line; blank lines are skipped
    .json       a list of objects, or one object per line
    .csv        the first line names the columns
    .parquet    needs pyarrow

The first three may be compressed (.gz). Text is UTF-8, with or without a byte-order mark. Rows are read one at a time;
only a .json file is held in memory as a whole. `columns.py` decides what the columns mean.

The package reads data sets on the hub. Plain files do not pass through it, wherever they came from: they need neither
the package nor its cache.
"""

import codecs
import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

BATCH = 1024
LONGEST_CSV_FIELD = LONGEST_LINE = 2**27
UNPACKED, TIMES = 2**28, 100
"""How many bytes a compressed file may always become, and how many times its size."""


class Row(NamedTuple):
    """One row of a data set, and its place."""

    values: dict[str, Any]
    file: str
    """The file, or the name of the data set."""
    unit: str
    """What `number` counts: line, item or row."""
    number: int
    """Counted from 1."""

    @property
    def place(self) -> str:
        """The place as an error message names it."""
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file, in order."""
    kind = data_format(path)
    if kind not in FORMATS:
        raise ValueError(
            f"{path} has the ending {path.suffix or '(none)'}, which is not a known data format. A data file must end "
            f"in {', '.join(FORMATS)}; all but parquet may be compressed (.gz)."
        )
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file, so it cannot be read as data. Write its rows into a file.")
    try:
        yield from _not_empty(FORMATS[kind](path), str(path), "Write it again, or leave it out.")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. If it exists, it is damaged or incomplete; write or download it again."
        ) from error


def data_format(path: Path) -> str:
    """The format that a file's name states, such as .jsonl; a .gz at the end is ignored."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix if not name.endswith(".parquet.gz") else ".gz"


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.strip():
            begins = f"It begins with {line[:60].strip()!r}. Repair this one or remove it: it must be a whole object."
            yield _row(_from_json(line.rstrip(), path, number, begins), path, "line", number)


def _json(path: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(path, longest=None))  # all of it may be one line
    if not text.lstrip().startswith("["):
        yield from _jsonl(path)
        return
    again = "Repair it, or write the file again: as a list of objects, or as .jsonl with one object per line."
    for number, item in enumerate(_from_json(text, path, None, again), 1):
        yield _row(item, path, "item", number)


def _from_json(text: str, path: Path, line: int | None, remedy: str) -> Any:
    """What a text holds. `line`: its place in the file, if it is one line of it; json itself would count from 1."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what, line = f"{error.msg.removesuffix(' at')} at column {error.colno}", line or error.lineno
        raise ValueError(f"{path}{f', line {line}' if line else ''} is not valid JSON: {what}. {remedy}") from None


def _row(item: object, path: Path, unit: str, number: int) -> Row:
    if not isinstance(item, dict):
        raise ValueError(
            f"{path}, {unit} {number} holds a JSON {type(item).__name__}, not an object. "
            'Write each row as an object with named columns: {"prompt": …, "answer": …}.'
        )
    return Row(item, str(path), unit, number)


def _csv(path: Path) -> Iterator[Row]:
    header: list[str] | None = None
    csv.field_size_limit(LONGEST_CSV_FIELD)
    reader = csv.reader(line for _, line in _lines(path))
    try:
        for record in reader:
            if not record:
                continue
            if header is None:
                header = record
            elif len(record) != len(header):
                raise ValueError(
                    f"{path}, line {reader.line_num} has {len(record)} fields, but the first line names {len(header)} "
                    "columns. Quote fields that hold commas or line breaks, or write .jsonl instead."
                )
            else:
                yield Row(dict(zip(header, record, strict=True)), str(path), "line", reader.line_num)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num} is not valid CSV: {error}. Repair it, or write .jsonl instead."
        ) from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ValueError(
            f"{path} is a parquet file, which needs pyarrow. Install it with `pip install 'bapo[data]'` or "
            "`pip install pyarrow`, or give the data as .jsonl."
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            yield from _table_rows(file.iter_batches(batch_size=BATCH), str(path))
    except pa.ArrowException as error:
        raise ValueError(
            f"{path} cannot be read as parquet: {error}. It is damaged or incomplete; write or download it again."
        ) from error


def _table_rows(tables: Iterable[Any], label: str) -> Iterator[Row]:
    """The rows of tables of Arrow. Text that is not UTF-8, dates and zones that Python lacks are seen only here."""
    number = 1
    for table in tables:
        try:
            listed = table.to_pylist()
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{label} cannot be read from row {number} to row {number + len(table) - 1}: {type(error).__name__}: "
                f"{error}. Write these columns as UTF-8 text or numbers, or leave them out."
            ) from error
        yield from (Row(values, label, "row", place) for place, values in enumerate(listed, number))
        number += len(listed)


FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet,
}  # fmt: skip


def _lines(path: Path, longest: int | None = LONGEST_LINE) -> Iterator[tuple[int, str]]:
    """The lines of a text file, numbered. Only a line feed ends a line: JSON strings may hold any other separator."""
    file: IO[bytes]
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:  # type: ignore[assignment]
        for number, line in enumerate(_bounded(file, path, longest), 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            try:
                yield number, content.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not UTF-8: it has byte 0x{error.object[error.start]:02x} at position "
                    f"{error.start + 1}. Convert the file: iconv -f ITS-ENCODING -t UTF-8 {path.name}."
                ) from None


def _bounded(file: IO[bytes], path: Path, longest: int | None) -> Iterator[bytes]:
    """The lines of a file. A small file must not become more than the memory holds: neither a line, nor all of it."""
    packed = path.suffix.lower() == ".gz"
    most = max(UNPACKED, TIMES * path.stat().st_size) if packed else sys.maxsize - 1
    longest = most if longest is None else longest
    unpacked = 0
    while line := file.readline(min(longest, most - unpacked) + 1):
        unpacked += len(line)
        if unpacked > most:
            raise ValueError(
                f"{path} unpacks to more than {most:,} bytes, {TIMES} times its size. To trust it: gunzip {path.name}."
            )
        if len(line) > longest:
            raise ValueError(
                f"{path} has a line of more than {longest:,} bytes, which is no row of data. Write one row per line."
            )
        yield line


def hub_rows(name: str, config: str | None = None, split: str | None = None) -> Iterator[Row]:
    """The rows of `owner/name`, from the hub or its local cache."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name!r} is not a file or a directory of files, and reading it as a data set of the hub needs the "
            f"datasets package. Install it with `pip install 'bapo[data]'`, or give a file ({', '.join(FORMATS)})."
        ) from None
    label = ":".join(part for part in (name, config, split) if part)
    if split is None:
        splits = _from_hub(label, datasets, datasets.get_dataset_split_names, name, config)
        if len(splits) != 1:
            raise ValueError(f"{name} has the splits {', '.join(splits)}. Name one: {name}:{splits[0]}.")
        split = splits[0]
    data = _from_hub(label, datasets, datasets.load_dataset, name, config, split=split)
    tables = data.with_format("arrow").iter(batch_size=BATCH)
    yield from _not_empty(_table_rows(tables, label), label, "Name another split or data set.")


def _from_hub(label: str, datasets: Any, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return call(*arguments, **named)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or "no reason given"
        raise ValueError(
            f"data set {label!r} could not be loaded from the hub: {type(error).__name__}: {reason}. "
            "Check the name: owner/name, owner/name:split or owner/name:config:split. Without a network, give the path "
            "of a file or of a directory of files; benchmarks are looked up in $BAPO_DATA/NAME first."
        ) from error


def _not_empty(rows: Iterator[Row], label: str, remedy: str) -> Iterator[Row]:
    row = None
    for row in rows:
        yield row
    if row is None:
        raise ValueError(f"{label} has no rows. {remedy}")
