"""Data sets read into rows, each with its place: files, and what only the `datasets` package can read.

    .jsonl      one object per line; blank lines are skipped
    .json       a list of objects, or one object per line
    .csv        the first line names the columns
    .parquet    needs pyarrow

The first three may be compressed (.gz). Text is UTF-8, with or without a byte-order mark. Rows are read one at a time;
only a .json file is held in memory as a whole. `columns.py` decides what the columns mean.

The package reads data sets on the hub, and what `Dataset.save_to_disk` wrote. Plain files do not pass through it,
wherever they came from: they need neither the package nor its cache.
"""

import codecs
import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from struct import unpack_from
from typing import IO, Any, NamedTuple

BATCH = 1024
LONGEST_CSV_FIELD = LONGEST_LINE = 2**27
UNPACKED, TIMES = 2**28, 100
"""How many bytes a compressed file may always become, and how many times its size."""
_SHARES = re.compile(r"(dictionary|run_end_encoded|dense_union|\w+_view)\b")
_SAVED_MARKS = ("dataset_dict.json", "state.json")


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


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    return any((directory / mark).is_file() for mark in _SAVED_MARKS)


def _check_saved(directory: Path) -> None:
    """ValueError if a saved data set names files outside of its directory, or holds what is no file."""
    for path in sorted(directory.rglob("*")):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ValueError(f"{path} is not a regular file")
        if path.name in _SAVED_MARKS:
            found = json.loads(path.read_bytes())
            splits = path.name == _SAVED_MARKS[0]
            names = found["splits"] if splits else [file["filename"] for file in found["_data_files"]]
            if len(set(names)) < len(names):
                raise ValueError(f"{path} names a file more than once")
            for name in names:
                if Path(name).name != name or name in ("", ".", ".."):
                    raise ValueError(f"{path} names {name!r}, which is not in its directory")
                if not splits:
                    _check_arrow(path.with_name(name))


def _check_arrow(path: Path) -> None:
    """ValueError if a file of Arrow may become much more than it is: compressed, or with values that share their bytes.

    Values of some kinds take no bytes, so all are counted.
    """
    import pyarrow as pa

    values = 0
    schema: Any = None
    with pa.memory_map(str(path)) as file:
        for message in pa.ipc.MessageReader.open_stream(file):
            if message.type == "schema" and schema is None:
                schema = pa.ipc.read_schema(message)
                for kind in _kinds(schema):
                    if _SHARES.match(kind):
                        raise ValueError(f"{path} has a column of {kind}, which may become much larger. Cast it")
                continue
            if message.type != "record batch":
                raise ValueError(f"{path} holds a {message.type}, and not only rows")
            lengths, compressed = _batch(message.metadata.to_pybytes())
            values += sum(max(length, 0) for length in lengths)
            if compressed:
                raise ValueError(f"{path} is compressed, and save_to_disk does not do that")
            if values > 8 * path.stat().st_size:
                raise ValueError(f"{path} has {values:,} values, more than its bits")
            pa.ipc.read_record_batch(message, schema).validate(full=True)  # no list or text reaches into another


def _kinds(fields: Iterable[Any]) -> Iterator[str]:
    """The types of these fields and of all below them, in words."""
    for field in fields:
        kind = getattr(field.type, "storage_type", field.type)
        yield str(kind)
        yield from _kinds(kind.field(place) for place in range(kind.num_fields))


def _batch(metadata: bytes) -> tuple[list[int], bool]:
    """How many values each column in a message of Arrow holds, and each below it (or how many rows, if there is none),
    and whether it is compressed, which old versions said in field 4.

    Its header is field 2, with the rows in field 0, the columns in field 1 and the compression in field 3. pyarrow does
    not tell of them.
    """

    def place(table: int, field: int) -> int:
        """Where a field of a table of flatbuffers is; 0 if it is left out."""
        fields = table - unpack_from("<i", metadata, table)[0]
        size, entry = unpack_from("<H", metadata, fields)[0], 4 + 2 * field
        offset = unpack_from("<H", metadata, fields + entry)[0] if entry < size else 0
        return table + offset if offset else 0

    def below(at: int) -> int:
        return at + int(unpack_from("<I", metadata, at)[0])

    message = below(0)
    batch = below(place(message, 2))
    rows, columns = place(batch, 0), place(batch, 1)
    first = below(columns) + 4
    count = unpack_from("<I", metadata, first - 4)[0] if columns else 0
    lengths = [unpack_from("<q", metadata, first + 16 * column)[0] for column in range(count)]
    packed = bool(place(batch, 3) or place(message, 4))
    return lengths or list(unpack_from("<q", metadata, rows) if rows else ()), packed


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
        _check_saved(directory)
        data = datasets.load_from_disk(str(directory))
    except (
        *(datasets.exceptions.DatasetsError, OSError, ValueError, LookupError, TypeError, AttributeError),
        RecursionError,
    ) as error:
        raise ValueError(
            f"{directory} could not be loaded as a saved data set: {_first_line(error)} Save it again (save_to_disk)."
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
            "of a file or of a directory of files; benchmarks are looked up in $BAPO_DATA/NAME first."
        ) from error


def _only_split(name: str, splits: list[str]) -> str:
    if len(splits) != 1:
        raise ValueError(f"{name} has the splits {', '.join(splits)}. Name one: {name}:{splits[0]}.")
    return splits[0]


def _rows(data: Any, label: str) -> Iterator[Row]:
    tables = data.with_format("arrow").iter(batch_size=BATCH)
    yield from _not_empty(_table_rows(tables, label), label, "Name another split or data set.")


def _not_empty(rows: Iterator[Row], label: str, remedy: str) -> Iterator[Row]:
    row = None
    for row in rows:
        yield row
    if row is None:
        raise ValueError(f"{label} has no rows. {remedy}")


def _package(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{name!r} is not a file or a directory of plain files, and reading it as a data set needs the datasets "
            f"package. Install it with `pip install 'bapo[data]'`, or give a file ({', '.join(FORMATS)})."
        ) from None
    return datasets


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".") or "no reason given"
    return f"{type(error).__name__}: {text}."
