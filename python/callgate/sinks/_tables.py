# SPDX-License-Identifier: Apache-2.0
"""Sinks of columns: Zarr and HDF5 with growing arrays, and Parquet by pyarrow.

A tap has an array or a column for each field: `loss/seq`, `loss/value` and so on for the tap
"loss", `grad/value/w/0` for a pytree's leaf. All of them have the same number of rows. Each batch
of a channel is one append to each.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from callgate import _callgate
from callgate._tap.records import Record, leaves_under, parts_of, tap_key
from callgate.sinks._base import FilesSink, file_for, plain

_META = {"seq": np.uint64, "time_ns": np.int64, "process": np.int32, "device": np.int32}
_CHUNK_BYTES = 1 << 20
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 1 << 26


# -- rows ------------------------------------------------------------------------------------------
class Field(NamedTuple):  # a field of a row
  shape: tuple[int, ...]
  dtype: np.dtype


class _Rows:
  """Rows of one tap, all with the fields of its first record."""

  def __init__(self, first: Record) -> None:
    self.fields = _fields(_row(first))
    self._taken: list[dict[str, np.ndarray]] = []
    self.nbytes = 0

  def __len__(self) -> int:
    return len(self._taken)

  def add(self, record: Record) -> None:
    row = _row(record)
    if (fields := _fields(row)) != self.fields:
      expected, got = _text(self.fields), _text(fields)
      raise ValueError(f"expected {expected} as in the first record, got {got}")
    self._taken.append(row)
    self.nbytes += sum(array.nbytes for array in row.values())

  def take(self) -> dict[str, np.ndarray]:
    """Removes all rows and returns them, as a stacked array for each field."""
    taken, self._taken, self.nbytes = self._taken, [], 0
    return {
      name: np.asarray([row[name] for row in taken], dtype).reshape(len(taken), *shape)
      for name, (shape, dtype) in self.fields.items()
    }


def _row(record: Record) -> dict[str, np.ndarray]:
  """Returns a record by field: numbers, `lane` under `vmap`, "value" or "value/w/0" for a leaf."""
  row = {name: np.asarray(getattr(record.info, name), dtype) for name, dtype in _META.items()}
  row |= parts_row(record)
  if record.info.lane:
    row["lane"] = np.asarray(record.info.lane, np.int64)
  for name, leaf in leaves_under("value", record.value).items():
    row[name] = plain(leaf)
    if row[name].dtype.kind not in "biufc":
      raise ValueError(f"expected a dtype of JAX, got {row[name].dtype} for {name}")
  return row


def parts_row(record: Record) -> dict[str, np.ndarray]:
  """Returns a shard's `run`, and the global shape and the part ([begin, end)) of each leaf."""
  if not (parts := parts_of(record)):
    return {}
  row = {"run": np.asarray(record.info.run, np.int64)}
  tree = jax.tree.structure(record.value)
  ends = [[(s.start, s.stop) for s in part] for part, _ in parts]
  for root, arrays in (
    ("global_shape", [np.array(shape, np.int64) for _, shape in parts]),
    ("shard", [np.array(part, np.int64).reshape(-1, 2) for part in ends]),
  ):
    row |= leaves_under(root, jax.tree.unflatten(tree, arrays))
  return row


def _fields(row: dict[str, np.ndarray]) -> dict[str, Field]:
  return {name: Field(array.shape, array.dtype) for name, array in row.items()}


def _text(fields: dict[str, Field]) -> str:
  shown = [f"{name} {f.dtype}{list(f.shape)}" for name, f in fields.items() if name not in _META]
  return ", ".join(shown) or "no leaf"


# -- growing arrays --------------------------------------------------------------------------------
class _GrowingArrays(FilesSink):
  """The common part of Zarr and HDF5, whose arrays have `shape` and take slices."""

  _root: Any = None
  _claimed: Any = None  # excludes other writers until the sink is closed; its error names them

  def _open_root(self, path: pathlib.Path, mode: str) -> Any: ...
  def _create(self, group: Any, name: str, field: Field) -> Any: ...
  def _flush(self) -> None: ...

  def _claim(self, path: pathlib.Path) -> pathlib.Path:
    return path

  def _start(self) -> None:
    path = pathlib.Path(self._target)
    path.parent.mkdir(parents=True, exist_ok=True)
    self._claimed = _callgate.FileClaim(f"the sink {type(self).__name__}", str(self._claim(path)))
    try:
      self._root = self._open_root(path, "a" if self._append else "w")
    except BaseException:
      self._claimed.close()
      raise
    self._append = True  # a reopened sink continues the file
    self._tables.clear()  # the rows and arrays of each tap

  def _take(self, record: Record) -> None:
    tap = tap_key(record.info)
    if tap not in self._tables:
      rows = _Rows(record)
      self._tables[tap] = rows, self._arrays_of(tap, rows.fields)
    self._tables[tap][0].add(record)

  def _arrays_of(self, tap: str, fields: dict[str, Field]) -> dict[str, Any]:
    """Returns the arrays of a tap: existing ones, which must fit, or new ones."""
    group = self._root.require_group(tap)
    existing = {name: group[name] for name in fields if name in group}
    for name, array in existing.items():
      if (found := Field(tuple(array.shape[1:]), np.dtype(array.dtype))) != fields[name]:
        raise ValueError(f"expected {name} to be {found} as in the file, got {fields[name]}")
    if not existing:
      return {name: self._create(group, name, field) for name, field in fields.items()}
    if missing := ", ".join(sorted(fields.keys() - existing)):
      raise ValueError(f"expected only the arrays of the file, got also {missing}")
    length = min(array.shape[0] for array in existing.values())
    for array in existing.values():
      # After a crash, some arrays may be longer than others.
      array.resize((length, *array.shape[1:]))
    return existing

  def _commit(self) -> None:
    for tap, (rows, arrays) in self._tables.items():
      with self._naming(f"tap {tap!r} cannot be written"):
        for name, values in rows.take().items() if len(rows) else ():
          array = arrays[name]
          start = array.shape[0]
          array.resize((start + len(values), *array.shape[1:]))
          array[start:] = values


class Zarr(_GrowingArrays):
  """Writes a Zarr group on disk: https://zarr.readthedocs.io

  Args:
    path: the store's folder. It is emptied when the sink is opened, unless `append`.
    append: continues an existing store.
  """

  _extra, _needs = "zarr", ("zarr",)

  def _claim(self, path: pathlib.Path) -> pathlib.Path:
    # Beside the store, because Zarr replaces its folder.
    return path.with_name(f".{path.name}.writing")

  def _open_root(self, path: pathlib.Path, mode: str) -> Any:
    return self._module.open_group(str(path), mode=mode)

  def _create(self, group: Any, name: str, field: Field) -> Any:
    shape = (0, *field.shape)
    return group.create_array(name, shape=shape, dtype=field.dtype, chunks=_chunks(field))

  def _stop(self) -> None:
    self._root = None  # every append is complete in itself
    self._tables.clear()
    self._claimed.remove()


class HDF5(_GrowingArrays):
  """Writes an HDF5 file of resizable datasets: https://docs.h5py.org

  If the process is killed, HDF5 may be unable to read the file. Call `flush` from time to time.

  Args:
    path: the file. It is emptied when the sink is opened, unless `append`.
    append: continues an existing file.
  """

  _extra, _needs = "hdf5", ("h5py",)

  def _open_root(self, path: pathlib.Path, mode: str) -> Any:
    # The claimed file exists.
    return self._module.File(str(path), mode if path.stat().st_size else "w")

  def _create(self, group: Any, name: str, field: Field) -> Any:
    # HDF5's chunks have at least one element, and end at an extent that is fixed.
    limits = (None, *(extent or None for extent in field.shape))
    options = {"maxshape": limits, "dtype": field.dtype, "chunks": _chunks(field)}
    return group.create_dataset(name, shape=(0, *field.shape), **options)

  def _flush(self) -> None:
    self._root.flush()

  def _stop(self) -> None:
    root, self._root = self._root, None
    self._tables.clear()
    try:
      root.close()
    finally:
      self._claimed.close()


def _chunks(field: Field) -> tuple[int, ...]:
  """Returns the shape of chunks of about 1 MiB: whole rows if they fit, else parts of a row."""
  chunk = [max(1, extent) for extent in field.shape]
  size = field.dtype.itemsize
  for axis in range(len(chunk)):
    while math.prod(chunk) * size > _CHUNK_BYTES and chunk[axis] > 1:
      chunk[axis] = (chunk[axis] + 1) // 2
  rows = _CHUNK_BYTES // max(1, math.prod(chunk) * size)
  return (min(max(1, rows), 8192), *chunk)


# -- Parquet ---------------------------------------------------------------------------------------
class Parquet(FilesSink):
  """Writes a Parquet table for each tap: https://arrow.apache.org/docs/python/parquet.html

  The columns are `seq`, `time_ns`, `process`, `device`, `lane` under `vmap`, and `value`, or one
  column for each leaf, such as "w/0". A leaf with the name of another column is "value/seq". A
  program over several devices also has `run`, `global_shape` and `shard` (for a pytree
  "global_shape/w/0" and "shard/w/0"): the global array's shape, and [begin, end) of the part in
  each dimension. Arrays are nested lists, complex numbers structs of `re` and `im`.

  Args:
    path: the file, which appears when the sink is closed. With "{name}" in it, each tap has a file
      of its own; several taps need that. Folders are made.
    append: keeps the rows of existing files, which are copied.
  """

  _extra, _needs = "parquet", ("pyarrow.parquet", "pyarrow")

  def _start(self) -> None:
    file_for(self._target, "_")  # makes the folder

  def _take(self, record: Record) -> None:
    tap = tap_key(record.info)
    path = pathlib.Path(os.path.realpath(file_for(self._target, tap)))
    if path.exists() and not path.is_file():
      raise ValueError(f"expected a regular file, got {str(path)!r}")
    make = functools.partial(_TableFile, self._module, self._error, path, record)
    table = self._open_table(path, make)
    if table.tap != tap:
      got = f'got {tap!r}; put "{{name}}" in the path for a file for each tap'
      raise ValueError(f"expected only the tap {table.tap!r} in {str(path)!r}, {got}")
    table.rows.add(record)

  def _commit(self) -> None:
    for table in self._tables.values():
      if len(table.rows) >= _GROUP_ROWS or table.rows.nbytes >= _GROUP_BYTES:
        table.flush()


class _TableFile:
  """The file of one tap, written under a temporary name beside its path."""

  def __init__(
    self, arrow: Any, error: Callable[..., Exception], path: pathlib.Path, first: Record, keep: bool
  ) -> None:
    self.tap, self.rows = tap_key(first.info), _Rows(first)
    self._arrow, self._error = arrow, error
    self._path, self._partial = path, path.with_name(path.name + ".writing")
    self._broken: Exception | None = None  # the reason why nothing more can be written
    self._written = 0  # the number of rows
    schema = self._to_arrow().schema
    # Excludes other writers.
    self._claimed = _callgate.FileClaim("the sink Parquet", str(self._partial))
    self._writer = arrow.parquet.ParquetWriter(str(self._partial), schema)
    if keep and path.exists():
      try:
        with arrow.parquet.ParquetFile(str(path)) as old:
          for group in range(old.num_row_groups):
            self._writer.write_table(old.read_row_group(group))
      except BaseException:
        self._discard()
        raise

  def flush(self) -> None:
    """Writes a group of rows."""
    if (count := len(self.rows)) == 0:
      return
    rows = self._to_arrow()
    self._try(lambda: self._writer.write_table(rows), " cannot be written", count)
    self._written += count

  def close(self) -> None:
    """Moves the finished file to its path; keeps the old file if the new one can't be finished."""

    def finish() -> None:
      self._writer.close()
      os.replace(self._partial, self._path)
      self._claimed.close()

    try:
      problem = f": {str(self._path)!r} cannot be finished, and is unchanged"
      self._try(finish, problem, self._written)
    except Exception:
      self._discard()
      raise

  def _try(self, act: Callable[[], object], problem: str, lost: int) -> None:
    """Calls `act`, unless a call has failed: the library's file is useless from then on."""
    if self._broken is None:
      try:
        act()
        return
      except Exception as error:  # noqa: BLE001 - reported below
        self._broken = error
    raise self._error(f"tap {self.tap!r}{problem}: {self._broken}", lost=lost) from self._broken

  def _discard(self) -> None:
    with contextlib.suppress(Exception):  # the library's file has failed before
      self._writer.close()
    self._partial.unlink(missing_ok=True)
    self._claimed.close()

  def _to_arrow(self) -> Any:
    """Removes the rows and returns them; the axes after the first are nested fixed-size lists."""
    columns = self.rows.take()
    table: dict[str, Any] = {}
    for name, array in columns.items():
      flat = np.ascontiguousarray(array).reshape(-1)
      if array.dtype.kind == "c":
        parts = [self._arrow.array(part.copy()) for part in (np.real(flat), np.imag(flat))]
        column = self._arrow.StructArray.from_arrays(parts, ["re", "im"])
      else:
        column = self._arrow.array(flat)
      for axis in range(array.ndim - 1, 0, -1):
        if size := array.shape[axis]:
          column = self._arrow.FixedSizeListArray.from_arrays(column, size)
        else:
          offsets = self._arrow.array(np.zeros(math.prod(array.shape[:axis]) + 1, np.int32))
          column = self._arrow.ListArray.from_arrays(offsets, column)
      short = name.removeprefix("value/")  # unless one of the record's own columns has that name
      table[name if short in columns else short] = column
    return self._arrow.table(table)
