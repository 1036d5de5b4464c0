"""One part of a table as a Parquet file: made from rows, read back as an Arrow table or a pandas frame.

Every part of a table has all its columns with the same types, so that a folder of parts is one data set to
pandas, pyarrow and duckdb alike. The file's metadata holds the schema's version and the suite's request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import chain, count
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from raybench.results.folder import Folder, StoreError
from raybench.results.schema import SCHEMA_MAJOR, SCHEMA_MINOR, TABLES, ColumnType

# Text is dictionary-encoded by Parquet. As Arrow's dictionary type it could not be grouped by pyarrow across
# parts, whose dictionaries differ.
ARROW_TYPES: dict[ColumnType, Any] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}

IS_KIND: dict[ColumnType, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "int": lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool),
    "bool": lambda value: isinstance(value, bool | np.bool_),
    "timestamp": lambda value: isinstance(value, datetime) and value.tzinfo is not None,
}
KIND_NAMES: dict[ColumnType, str] = {
    "text": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "timestamp": "a time with a time zone",
}

DTYPES: dict[ColumnType, str] = {
    "text": "category",
    "int": "Int64",
    "float": "float64",
    "bool": "boolean",
    "timestamp": "datetime64[us, UTC]",
}
"""pandas dtypes of the frames; unknown is NA, in floats NaN."""

CATEGORY = pa.dictionary(pa.int32(), pa.string())
VERSION_KEY = b"raybench.schema"
REQUEST_KEY = b"raybench.request"
MAX_NAME = 80
FEW_ROWS = 500
LARGE_TABLES = ("steps", "operations")
KEY_COLUMNS = ("suite_id", "track", "case", "round")


@cache
def arrow_schema(table: str) -> Any:
    """The Arrow schema of a table as its parts are written."""
    return pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in TABLES[table].items()])


@cache
def _pandas_metadata(table: str) -> bytes:
    """What makes `pandas.read_parquet` keep integers and booleans that have nulls instead of turning them to floats."""
    columns = [
        {"name": n, "field_name": n, "pandas_type": kind, "numpy_type": DTYPES[kind], "metadata": None}
        for n, kind in TABLES[table].items()
        if kind in ("int", "bool")
    ]
    return json.dumps({"index_columns": [], "column_indexes": [], "columns": columns, "pandas_version": "2.3"}).encode()


def text_columns(table: str) -> list[str]:
    return [name for name, kind in TABLES[table].items() if kind == "text"]


def empty_frame(table: str) -> pd.DataFrame:
    return pd.DataFrame({name: pd.Series(dtype=DTYPES[kind]) for name, kind in TABLES[table].items()})


def file_name(track: str, case: str, attempt: int, round: int, taken: Collection[str] = ()) -> str:
    """Name of a round's part, the same in every table.

    Names of tracks and cases may hold hyphens, so two rounds can ask for one name: the second has a longer one.
    """
    stem = f"{_safe(track)}-{_safe(case)}-{attempt}-{round}"
    names = chain([f"{stem}.parquet"], (f"{stem}.{number}.parquet" for number in count(2)))
    return next(name for name in names if name not in taken)


def _safe(name: str) -> str:
    """A name without what file systems and readers of partitions give a meaning; long ones are cut."""
    safe = quote(name, safe="")
    return safe if len(safe) <= MAX_NAME else f"{safe[:MAX_NAME]}~"


def check_suite_id(suite_id: str) -> None:
    """Refuse a suite_id that is no plain folder name (`key=value` would be read as a partition)."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", suite_id):
        raise StoreError(f"suite_id: {suite_id!r} is not allowed (letters, digits, '.', '_' and '-' are)")


def encode(
    table: str,
    rows: Sequence[Mapping[str, Any]],
    key: Mapping[str, Any],
    request: Mapping[str, Any] | None = None,
) -> Any:
    """Rows as the bytes of a Parquet file; `key` holds the columns that are the same in all of them.

    Raises:
        ValueError: a column that the table lacks, or a value that is not of its column's type.
    """
    kinds = TABLES[table]
    for row in rows:
        if unknown := row.keys() - kinds.keys():
            raise ValueError(f"table {table}: unknown columns {sorted(unknown)}")
        for name, value in key.items():
            if row.get(name, value) != value:
                raise ValueError(f"table {table}: {name} is {row[name]!r} in a row of {value!r}")
    columns = [
        _column(table, name, kind, [key.get(name, row.get(name)) for row in rows]) for name, kind in kinds.items()
    ]
    metadata = {b"pandas": _pandas_metadata(table), VERSION_KEY: f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode()}
    if request is not None:
        metadata[REQUEST_KEY] = canonical(request).encode()
    # Of a few rows, compression and Arrow's copy of the schema only make a file larger and slower to read.
    options = {
        "compression": "zstd" if len(rows) > FEW_ROWS else "none",
        "use_dictionary": text_columns(table),
        "store_schema": False,
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, arrow_schema(table), **options) as writer:
        writer.write_table(pa.table(columns, schema=arrow_schema(table)))
        writer.add_key_value_metadata(metadata)
    return sink.getvalue()


def _column(table: str, name: str, kind: ColumnType, values: list[Any]) -> Any:
    for value in values:
        if value is not None and not IS_KIND[kind](value):
            raise ValueError(f"table {table}: {name}: {value!r} is not {KIND_NAMES[kind]}")
    if kind == "text":
        values = [None if value is None else value.encode("utf-8", "backslashreplace").decode() for value in values]
    try:
        return pa.array(values, ARROW_TYPES[kind])
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"table {table}: {name}: {error}") from None


def canonical(request: Mapping[str, Any]) -> str:
    """A request as JSON text that is equal exactly for equal requests."""
    return json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class NotAPartError(Exception):
    """A file that cannot be read as a part; the message says why."""


@dataclass(frozen=True)
class Part:
    """An opened part, its version checked."""

    table: str
    file: Any
    """Its `pyarrow.parquet.ParquetFile`."""
    columns: frozenset[str]
    metadata: Mapping[bytes, bytes]

    def read(self, columns: Sequence[str] | None = None) -> Any:
        """Its rows as an Arrow table of exactly the columns asked for, all where none are named.

        Columns that the part lacks are null; those that this version does not know are dropped.

        Raises:
            NotAPartError: its pages are corrupt, or a column has another type.
        """
        kinds = TABLES[self.table]
        names = list(columns if columns is not None else kinds)
        try:
            data = self.file.read(columns=[n for n in names if n in self.columns], use_threads=False)
            arrays = [self._column(data, name, kinds[name]) for name in names]
        except (OSError, pa.ArrowException) as error:
            raise NotAPartError(f"cannot be read ({_one_line(error)})") from None
        return pa.table(arrays, names=names)

    def _column(self, data: Any, name: str, kind: ColumnType) -> Any:
        wanted = CATEGORY if kind == "text" and self.table in LARGE_TABLES else ARROW_TYPES[kind]
        if name not in self.columns:
            return pa.nulls(data.num_rows, wanted)
        column = data.column(name)
        return column if column.type == wanted else column.cast(wanted)


def open_part(folder: Folder, table: str, relative: str) -> Part:
    """Open a part and look at its version.

    Raises:
        NotAPartError: it is corrupt, or not a part of this table.
        StoreError: it was written by a newer major version.
    """
    dictionaries = text_columns(table) if table in LARGE_TABLES else None
    try:
        file = pq.ParquetFile(folder.open(relative), read_dictionary=dictionaries)
    except (OSError, pa.ArrowException) as error:
        raise NotAPartError(f"cannot be read ({_one_line(error)})") from None
    part = Part(table, file, frozenset(file.schema.names), file.metadata.metadata or {})
    version = part.metadata.get(VERSION_KEY, b"1.0").decode(errors="replace")
    major = version.split(".")[0]
    if not major.isdigit():
        raise NotAPartError(f"has an unknown version of the schema ({version!r})")
    if int(major) > SCHEMA_MAJOR:
        raise StoreError(
            f"results {folder}: {relative} has version {version} of the schema, this raybench reads up to "
            f"{SCHEMA_MAJOR}: install a newer raybench, or name one suite (FOLDER@SUITE_ID)"
        )
    if missing := set(KEY_COLUMNS) - part.columns:
        raise NotAPartError(f"is not a part of {table} (it lacks {', '.join(sorted(missing))})")
    return part


def round_of(piece: Any) -> tuple[str, str, int, int]:
    """Track, case, attempt and number of the one round in a part's rows.

    Raises:
        NotAPartError: there is not exactly one.
    """
    if piece.num_rows != 1:
        raise NotAPartError(f"has {piece.num_rows} rounds instead of one")
    row = piece.select(["track", "case", "attempt", "round"]).to_pylist()[0]
    return row["track"], row["case"], row["attempt"] or 0, row["round"]


def frame_of(table: str, pieces: list[Any]) -> pd.DataFrame:
    """Arrow tables, one below the other, as a pandas frame of the dtypes of `DTYPES`; empties the list."""
    if not pieces:
        return empty_frame(table)
    mapper = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    whole = pa.concat_tables(pieces)
    pieces.clear()
    if table in LARGE_TABLES:
        whole = whole.unify_dictionaries()
    else:
        whole = whole.cast(pa.schema([_as_category(field) for field in whole.schema]))
    frame: pd.DataFrame = whole.to_pandas(types_mapper=mapper.get, split_blocks=True, self_destruct=True)
    return frame


def _as_category(field: Any) -> Any:
    return field.with_type(CATEGORY) if field.type == pa.string() else field


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
