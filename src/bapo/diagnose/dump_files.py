"""Reads files of logged batches into columns of numbers, whatever the format.

.safetensors and .npz hold arrays; .parquet holds columns of numbers or of lists (one list per response). Pickles are
refused, because they run code when they are opened. Columns without numbers (prompts, ids) are skipped.
"""

from __future__ import annotations

import lzma
import math
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from bapo.config.errors import DumpError

Array = npt.NDArray[Any]

UNPACKED, TIMES = 1 << 28, 100  # how many bytes a compressed file may always become, and how many times its size
NUMERIC = "biuf"  # kinds of numpy's dtypes: switches, integers, fractions
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

UNREADABLE = (
    *(OSError, ValueError, EOFError, MemoryError, OverflowError, KeyError, RuntimeError, TypeError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)
"""What libraries raise at a damaged file."""

FORMATS = (".safetensors", ".npz", ".parquet")
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin")
PICKLE_REMEDY = (
    "Opening a pickle runs code, so bapo does not open one. Convert it where you trust it: data = torch.load(FILE); "
    "safetensors.torch.save_file({k: v.contiguous() for k, v in data.items()}, 'FILE.safetensors'). A verl DataProto "
    "keeps its tensors in data.batch."
)
SAFETENSORS_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True)
class Ragged:
    """A parquet column of lists: all values, and the length of each row."""

    values: Array
    lengths: Array


Column = Array | Ragged


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and those in the directories named, in natural order (2 before 10)."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted((p for p in path.rglob("*") if p.suffix in FORMATS), key=_natural)
            if not inside:
                present = sorted({p.suffix or p.name for p in path.iterdir()})
                holds = f"it holds: {', '.join(present) or 'nothing'}."
                holds += f" {PICKLE_REMEDY}" if {*present} & {*PICKLES} else ""
                raise DumpError(f"{path} has no file that ends in {', '.join(FORMATS)}; {holds}")
            found += inside
        elif not path.exists():
            raise DumpError(f"{path} does not exist. Name a file or a directory of logged batches.")
        else:
            found.append(path)
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def read_columns(path: Path) -> dict[str, Column]:
    """The columns of one file."""
    if path.suffix in PICKLES:
        raise DumpError(f"{path} is a pickle. {PICKLE_REMEDY}")
    if path.suffix not in FORMATS:
        ending = path.suffix or "(none)"
        raise DumpError(f"{path} has the ending {ending}, but a dump must end in {', '.join(FORMATS)}.")
    if not path.is_file():
        raise DumpError(f"{path} is not a regular file. Remove it, or name the files to read.")
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz, ".parquet": _read_parquet}
    try:
        return readers[path.suffix](path)
    except DumpError:
        raise
    except UNREADABLE as error:
        kind = f"It is damaged, cut short, or not a {path.suffix[1:]} file"
        raise DumpError(f"{path} cannot be read: {error}. {kind}. Write it again.") from error


def _read_npz(path: Path) -> dict[str, Column]:
    names = _numeric(path)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: np.asarray(arrays[name]) for name in names}


def _numeric(path: Path) -> list[str]:
    """The arrays of numbers in a file.

    Refuses arrays that say they are larger than what is there for them, and files that unpack without measure.
    """
    names = []
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        unpacked, most = sum(member.file_size for member in members), max(UNPACKED, TIMES * path.stat().st_size)
        if unpacked > most:
            raise ValueError(
                f"it would unpack to {unpacked:,} bytes, more than {TIMES} times its size. If you trust it, write it "
                "again without compression (numpy.savez)"
            )
        for member in members:
            with archive.open(member) as file:
                try:
                    version = npy.read_magic(file)
                except ValueError:
                    continue  # not an array
                if version not in HEADERS:  # a table, with names in Unicode
                    continue
                shape, _, dtype = HEADERS[version](file)
                present = member.file_size - file.tell()
            if dtype.kind not in NUMERIC:  # text, or Python objects, which are a pickle inside the file
                continue
            needed = math.prod(shape) * dtype.itemsize
            if needed > present:
                says = f"{member.filename} says that it holds {needed:,} bytes of numbers"
                raise ValueError(f"{says}, but has {present:,}")
            names.append(member.filename.removesuffix(".npy"))
    return names


def _read_safetensors(path: Path) -> dict[str, Column]:
    from safetensors import SafetensorError, deserialize

    try:
        entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    columns: dict[str, Column] = {}
    for name, entry in entries:
        data, shape, dtype = entry["data"], entry["shape"], entry["dtype"]
        if dtype == "BF16":  # the upper half of a float32
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif dtype in SAFETENSORS_DTYPES:
            values = np.frombuffer(data, SAFETENSORS_DTYPES[dtype])
        else:
            continue  # other kinds hold weights, not batches
        columns[name] = values.reshape(shape)
    return columns


def _read_parquet(path: Path) -> dict[str, Column]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DumpError(
            f"{path} is parquet, which needs pyarrow. Install it with `pip install 'bapo[parquet]'` or "
            "`pip install pyarrow`, or write .safetensors or .npz instead."
        ) from None
    columns: dict[str, Column] = {}
    with pq.ParquetFile(path) as file:
        about: Any = file.metadata
        parts = [about.row_group(number) for number in range(about.num_row_groups)]
        entries = sum(part.column(place).num_values for part in parts for place in range(part.num_columns))
        most = max(UNPACKED, TIMES * path.stat().st_size) // 8
        if max(entries, about.num_rows) > most:  # lists may be empty, and equal values take no room
            raise ValueError(f"it would unpack to {entries:,} values, and a file of its size may hold {most:,}")
        table: Any = file.read()
    for name, chunks in zip(table.column_names, table.columns, strict=True):
        column = chunks.combine_chunks()
        kind = column.type
        fixed = pa.types.is_fixed_size_list(kind)
        if fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind):
            sizes = np.full(len(column), kind.list_size) if fixed else column.value_lengths().fill_null(0).to_numpy()
            values = column.flatten()
            if _is_number(pa, values.type):
                columns[name] = Ragged(_no_nulls(path, name, values), np.asarray(sizes, dtype=np.int64))
        elif _is_number(pa, kind):
            columns[name] = _no_nulls(path, name, column)
    return columns


def _is_number(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _no_nulls(path: Path, name: str, values: Any) -> Array:
    if values.null_count:
        nulls = f"column {name!r} has {values.null_count} nulls"
        raise DumpError(f"{path}: {nulls}, but every token needs a value. Write 0 and mask it.")
    return np.asarray(values.to_numpy(zero_copy_only=False))
