"""The sink Parquet, over pyarrow. A Parquet file is readable once its footer is written, at close:
until then the rows are in a file beside it, which then takes its place.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._core import options
from callgate._tap.records import Record, tap_key
from callgate.sinks._base import LibrarySink, SinkError, StrPath, file_for, library
from callgate.sinks._rows import Rows
from callgate.sinks._text import close_all

_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 1 << 26


class Parquet(LibrarySink):
  """A Parquet table for each tap: https://arrow.apache.org/docs/python/parquet.html

  Its columns are `seq`, `time_ns`, `process`, `device`, `lane` under `vmap`, and `value`, or a
  column for each leaf, as "w/0" ("value/seq" for one that is called as the others are). Arrays are
  nested lists, complex numbers structs of `re` and `im`.

  Args:
    path: the file, which appears when the sink is closed; with "{name}" in it, a file for each tap,
      needed where there is more than one. Folders are made.
    append: keep the rows of existing files; they are copied.
  """

  def __init__(self, path: StrPath, *, append: bool = False) -> None:
    super().__init__(options.path("sinks.Parquet", "path", path))
    options.boolean("sinks.Parquet", "append", append)
    self._arrow = library("pyarrow", sink="Parquet", extra="parquet")
    self._parquet = library("pyarrow.parquet", sink="Parquet", extra="parquet")
    self._append = append
    self._made: set[pathlib.Path] = set()
    self._tables: dict[pathlib.Path, _Table] = {}

  def _start(self, *, resume: bool) -> None:
    file_for(self._target, "_")  # the folder

  def _take(self, record: Record) -> None:
    tap = tap_key(record.info)
    path = pathlib.Path(os.path.realpath(file_for(self._target, tap)))
    if path.exists() and not path.is_file():
      raise ValueError(f"expected a regular file, got {str(path)!r}")
    table = self._tables.get(path)
    if table is None:
      table = self._tables[path] = self._table(path, record)
      self._made.add(path)
    if table.tap != tap:
      raise ValueError(
        f'expected the tap {table.tap!r} alone in {str(path)!r}, got {tap!r}; put "{{name}}" in the'
        " path for a file each tap"
      )
    table.rows.add(record)

  def _table(self, path: pathlib.Path, record: Record) -> _Table:
    rows = Rows(record)
    schema = self._to_arrow({n: np.empty((0, *f.shape), f.dtype) for n, f in rows.fields.items()})
    partial = path.with_name(path.name + ".writing")
    with self._beginning(path, anew=not (self._append or path in self._made)):
      claimed = _callgate.FileClaim("Parquet", str(partial))
    writer = self._parquet.ParquetWriter(str(partial), schema.schema)
    table = _Table(tap_key(record.info), rows, writer, partial, path, claimed)
    if (self._append or path in self._made) and path.exists():
      try:
        with self._parquet.ParquetFile(str(path)) as old:
          for group in range(old.num_row_groups):
            writer.write_table(old.read_row_group(group))
      except BaseException:
        table.discard()
        raise
    return table

  def _commit(self) -> None:
    for table in self._tables.values():
      if len(table.rows) >= _GROUP_ROWS or table.rows.nbytes >= _GROUP_BYTES:
        self._write_group(table)

  def _flush(self) -> None:
    for table in self._tables.values():
      self._write_group(table)

  def _stop(self) -> None:
    tables, self._tables = self._tables, {}
    first: Exception | None = None
    for table in tables.values():
      try:
        self._write_group(table)
      except Exception as error:  # noqa: BLE001 - the row groups before it are kept
        first = first or error
    close_all(list(tables.values()))
    if first is not None:
      raise first

  def _write_group(self, table: _Table) -> None:
    if len(table.rows) > 0:
      count = len(table.rows)
      rows = self._to_arrow(table.rows.take())
      if table.broken is None:
        try:
          table.writer.write_table(rows)
          table.written += count
          return
        except Exception as error:  # noqa: BLE001 - the library's file is of no use from here on
          table.broken = error
      raise SinkError(
        f"callgate.sinks.{self!r}: tap {table.tap!r} cannot be written: {table.broken}", lost=count
      ) from table.broken

  def _to_arrow(self, columns: dict[str, np.ndarray]) -> Any:
    table: dict[str, Any] = {}
    for name, array in columns.items():
      short = name.removeprefix("value/")  # unless a column of the record's own is called so
      table[name if short in columns else short] = self._column(array)
    return self._arrow.table(table)

  def _column(self, array: np.ndarray) -> Any:
    """Rows as an Arrow array: nested fixed-size lists for the axes after the first."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype.kind == "c":
      parts = [self._arrow.array(part) for part in (np.real(flat).copy(), np.imag(flat).copy())]
      column = self._arrow.StructArray.from_arrays(parts, ["re", "im"])
    else:
      column = self._arrow.array(flat)
    for axis in range(array.ndim - 1, 0, -1):
      column = self._lists(column, array.shape[axis], int(np.prod(array.shape[:axis])))
    return column

  def _lists(self, column: Any, size: int, count: int) -> Any:
    if size > 0:
      return self._arrow.FixedSizeListArray.from_arrays(column, size)
    offsets = self._arrow.array(np.zeros(count + 1, np.int32))
    return self._arrow.ListArray.from_arrays(offsets, column)


class _Table:
  """The file of one tap, being written beside the path that it will have."""

  def __init__(
    self,
    tap: str,
    rows: Rows,
    writer: Any,
    partial: pathlib.Path,
    path: pathlib.Path,
    claimed: Any,
  ) -> None:
    self.tap = tap
    self.rows = rows
    self.writer = writer
    self.broken: Exception | None = None  # why nothing more can be written
    self.written = 0  # rows
    self._partial = partial
    self._path = path
    self._claimed = claimed  # keeps other processes away

  def close(self) -> None:
    """Puts the file in its place; where it can't be finished, the one that is there stays."""
    try:
      if self.broken is None:
        self.writer.close()
        os.replace(self._partial, self._path)
        return
    except Exception as error:  # noqa: BLE001 - said below
      self.broken = error
    finally:
      if self.broken is not None:
        self.discard()
      self._claimed.close()
    raise SinkError(
      f"callgate.sinks.Parquet: tap {self.tap!r}: {str(self._path)!r} cannot be finished, and is "
      f"as it was: {self.broken}",
      lost=self.written,
    ) from self.broken

  def discard(self) -> None:
    with contextlib.suppress(Exception):  # it has failed before
      self.writer.close()
    self._partial.unlink(missing_ok=True)
    self._claimed.close()
