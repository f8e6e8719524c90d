"""Reads columns of parquet files in batches of bounded size, and copies them to Arrow files.

A column that nobody asks for, as one of pictures, costs neither time nor memory.
"""

import bisect
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.data_file import opened_data
from yatt.errors import ConfigError, words_of
from yatt.printable import printable

BATCH_ROWS = 1024
BATCH_BYTES = 16 << 20
"""Bytes of a batch by the average row of its row group, as the file's own statistics say."""

_READ_BYTES = 1 << 20


def parquet_batches(path: Path, columns: Collection[str] | None = None) -> Iterator[Any]:
    """Yields the rows of a parquet file as Arrow batches of `BATCH_ROWS` and about `BATCH_BYTES` at most.

    Args:
        columns: names of the columns at the top; those that the file lacks are left out. None: all.

    Raises:
        ConfigError: it cannot be read.
        OSError: a transient error, which is not a user error.
    """
    with _opened_parquet(path) as file:
        found = file.schema_arrow.names
        names = None if columns is None else [name for name in found if name in columns]
        _refuse_doubles(names or found, path)
        for groups, size in _readings(file.metadata):
            yield from file.iter_batches(batch_size=size, row_groups=groups, columns=names)


def parquet_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yields each row of a parquet file.

    Raises:
        ConfigError, OSError: as in `parquet_batches`; ConfigError also if a value cannot be read.
    """
    for batch in parquet_batches(path, columns):
        yield from _as_rows(batch, path)


def column_names(path: Path) -> tuple[str, ...]:
    """Returns the names of a parquet file's columns at the top.

    Raises:
        ConfigError, OSError: as in `parquet_batches`.
    """
    with _opened_parquet(path) as file:
        return tuple(file.schema_arrow.names)


def copy_to_arrow(path: Path, target: Path, columns: Collection[str] | None) -> int:
    """Copies columns of a parquet file to an Arrow file; returns its number of rows.

    Raises:
        ConfigError, OSError: as in `parquet_batches`; OSError also if the copy cannot be written.
    """
    import pyarrow

    rows, writer = 0, None
    for batch in parquet_batches(path, columns):
        plain = without_dictionaries(batch, path)
        writer = writer or pyarrow.ipc.new_file(str(target), plain.schema)
        writer.write_batch(plain)
        rows += len(batch)
    if writer is not None:
        writer.close()
    return rows


def _refuse_doubles(names: list[str], path: Path) -> None:
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        shown = printable(name)
        raise ConfigError(f"{path}: {count} columns have the name '{shown}'; give them other names.")


def without_dictionaries(batch: Any, path: Path) -> Any:
    """Returns a batch with values in place of dictionaries.

    A parquet file may have one for each row group, and an Arrow file has one for a column. Nested ones can
    only be read of one row group at a time.

    Raises:
        ConfigError: a value cannot be read.
    """
    with _read_as_parquet(path):
        for index, field in enumerate(batch.schema):
            plain = field.with_type(_plain_type(field.type))
            if plain != field:  # Arrow's cast of a list of objects fails where a key is null in all of them
                batch = batch.set_column(index, plain, batch.column(index).cast(plain.type))
        return batch


def _plain_type(kind: Any) -> Any:
    """Returns a type with the values of dictionaries in place of them, also within lists and structs."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return kind.value_type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        make = pyarrow.list_ if pyarrow.types.is_list(kind) else pyarrow.large_list
        return make(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pyarrow.types.is_struct(kind):
        inner = (kind.field(index) for index in range(kind.num_fields))
        return pyarrow.struct([field.with_type(_plain_type(field.type)) for field in inner])
    return kind


class ArrowRows:
    """The rows of an Arrow file, which is memory-mapped, by their number.

    Raises:
        OSError, ValueError: it cannot be read (errors of Arrow are of these classes).
    """

    def __init__(self, path: Path) -> None:
        import pyarrow

        self._file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        self._ends, end = array("Q"), 0
        for number in range(self._file.num_record_batches):
            end += self._file.get_batch(number).num_rows
            self._ends.append(end)

    def row(self, number: int) -> dict[str, Any]:
        """Returns a row.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        batch = bisect.bisect_right(self._ends, number)
        if batch == len(self._ends):
            raise ValueError(f"there is no row {number + 1}")
        start = self._ends[batch - 1] if batch else 0
        found: dict[str, Any] = self._file.get_batch(batch).slice(number - start, 1).to_pylist()[0]
        return found


@contextmanager
def _opened_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{path}: parquet needs pyarrow; pip install 'yatt[parquet]'.") from error
    opened_data(path).close()
    # with a buffer, and without reading ahead: column chunks are not in memory as a whole
    with (
        _read_as_parquet(path),
        parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file,
    ):
        yield file


@contextmanager
def _read_as_parquet(path: Path) -> Iterator[None]:
    """Context manager: errors of Arrow are the file's."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        if is_passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read as parquet: {error}.") from error


def _readings(metadata: Any) -> Iterator[tuple[list[int], int]]:
    """Yields the row groups of a file that are read together, and how many rows a batch has: groups of
    few rows are joined."""
    groups: list[int] = []
    rows = size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        groups.append(number)
        rows += group.num_rows
        size += group.total_byte_size  # of all columns: who asks Arrow about a damaged one loses the process
        if rows >= BATCH_ROWS or size >= BATCH_BYTES:
            yield groups, _batch_rows(rows, size)
            groups, rows, size = [], 0, 0
    if groups:
        yield groups, _batch_rows(rows, size)


def _batch_rows(rows: int, size: int) -> int:
    return min(BATCH_ROWS, max(1, BATCH_BYTES * rows // max(1, size)))


def _as_rows(batch: Any, path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, TypeError, OverflowError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{path}: a value cannot be read ({words_of(error)}). Write the file again."
        ) from error
    return rows
