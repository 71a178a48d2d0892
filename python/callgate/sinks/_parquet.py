"""The sink Parquet, over pyarrow. A Parquet file is readable once its footer is written, at close:
until then the rows are in a file beside it, which then takes its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._tap.records import Record, tap_key
from callgate.sinks._base import FilesSink, SinkError, StrPath, each, file_for, library
from callgate.sinks._rows import Rows

_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 1 << 26


class Parquet(FilesSink):
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
    super().__init__(path, append=append)
    self._arrow = library("pyarrow", sink="Parquet", extra="parquet")
    self._parquet = library("pyarrow.parquet", sink="Parquet", extra="parquet")

  def _start(self) -> None:
    file_for(self._target, "_")  # the folder

  def _take(self, record: Record) -> None:
    tap = tap_key(record.info)
    path = pathlib.Path(os.path.realpath(file_for(self._target, tap)))
    if path.exists() and not path.is_file():
      raise ValueError(f"expected a regular file, got {str(path)!r}")
    table = self._open_table(path, functools.partial(self._table, path, record))
    if table.tap != tap:
      raise ValueError(
        f'expected the tap {table.tap!r} alone in {str(path)!r}, got {tap!r}; put "{{name}}" in the'
        " path for a file each tap"
      )
    table.rows.add(record)

  def _table(self, path: pathlib.Path, record: Record, keep: bool) -> _Table:
    rows = Rows(record)
    schema = self._to_arrow({n: np.empty((0, *f.shape), f.dtype) for n, f in rows.fields.items()})
    partial = path.with_name(path.name + ".writing")
    claimed = _callgate.FileClaim("Parquet", str(partial))
    writer = self._parquet.ParquetWriter(str(partial), schema.schema)
    table = _Table(tap_key(record.info), rows, writer, partial, path, claimed)
    if keep and path.exists():
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
    each(functools.partial(self._write_group, table) for table in self._tables.values())

  def _stop(self) -> None:
    try:
      self._flush()
    finally:
      super()._stop()

  def _write_group(self, table: _Table) -> None:
    count = len(table.rows)
    if count == 0:
      return
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
      if size := array.shape[axis]:
        column = self._arrow.FixedSizeListArray.from_arrays(column, size)
      else:
        offsets = self._arrow.array(np.zeros(math.prod(array.shape[:axis]) + 1, np.int32))
        column = self._arrow.ListArray.from_arrays(offsets, column)
    return column


@dataclasses.dataclass(eq=False, repr=False)
class _Table:
  """The file of one tap, being written beside the path that it will have."""

  tap: str
  rows: Rows
  writer: Any
  partial: pathlib.Path
  path: pathlib.Path
  claimed: Any  # keeps other processes away
  broken: Exception | None = None  # why nothing more can be written
  written: int = 0  # rows

  def close(self) -> None:
    """Puts the file in its place; where it can't be finished, the one that is there stays."""
    try:
      if self.broken is None:
        self.writer.close()
        os.replace(self.partial, self.path)
        return
    except Exception as error:  # noqa: BLE001 - said below
      self.broken = error
    finally:
      if self.broken is not None:
        self.discard()
      self.claimed.close()
    raise SinkError(
      f"callgate.sinks.Parquet: tap {self.tap!r}: {str(self.path)!r} cannot be finished, and is "
      f"as it was: {self.broken}",
      lost=self.written,
    ) from self.broken

  def discard(self) -> None:
    with contextlib.suppress(Exception):  # it has failed before
      self.writer.close()
    self.partial.unlink(missing_ok=True)
    self.claimed.close()
