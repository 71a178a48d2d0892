"""Sinks of arrays that grow: Zarr and HDF5. A group for each tap, an array for each field.

`loss/seq`, `loss/time_ns`, `loss/process`, `loss/device`, `loss/value` of the tap "loss" have a row
for each record, in step; a pytree has `grad/value/w/0` and so on. Each batch of a channel is one
append to each array: the slower the storage, the larger the batches.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._core import options
from callgate._tap.records import Record, tap_key
from callgate.sinks._base import LibrarySink, StrPath, library
from callgate.sinks._rows import Field, Rows

_CHUNK_BYTES = 1 << 20


class _GrowingArrays(LibrarySink):
  """What Zarr and HDF5 share; their arrays have `shape` and take slices alike."""

  def __init__(self, path: StrPath, *, append: bool) -> None:
    super().__init__(options.path(f"sinks.{type(self).__name__}", "path", path))
    self._append = options.boolean(f"sinks.{type(self).__name__}", "append", append)
    self._root: Any = None
    self._claimed: Any = None
    self._taps: dict[str, tuple[Rows, dict[str, Any]]] = {}  # with their arrays

  def _start(self) -> None:
    pathlib.Path(self._target).parent.mkdir(parents=True, exist_ok=True)
    self._claim()
    try:
      self._root = self._open_root(keep=self._append)
    except BaseException:
      self._claimed.close()
      raise
    self._append = True  # opened anew, it goes on
    self._taps.clear()

  def _take(self, record: Record) -> None:
    tap = tap_key(record.info)
    if tap not in self._taps:
      rows = Rows(record)
      self._taps[tap] = rows, self._arrays_of(tap, rows.fields)
    self._taps[tap][0].add(record)

  def _arrays_of(self, tap: str, fields: dict[str, Field]) -> dict[str, Any]:
    """The arrays of a tap: existing ones, which must fit, or new ones."""
    group = self._root.require_group(tap)
    existing = {name: group[name] for name in fields if name in group}
    for name, array in existing.items():
      found = Field(tuple(array.shape[1:]), np.dtype(array.dtype))
      if found != fields[name]:
        raise ValueError(f"expected {name} to be {found} as in the file, got {fields[name]}")
    if existing:
      length = min(array.shape[0] for array in existing.values())
      if len(existing) != len(fields):
        missing = ", ".join(sorted(set(fields) - set(existing)))
        raise ValueError(f"expected the arrays of the file, got also {missing}")
      for array in existing.values():
        array.resize((length, *array.shape[1:]))  # a crash may have left some ahead of others
      return existing
    return {name: self._create(group, name, field) for name, field in fields.items()}

  def _commit(self) -> None:
    for tap, (rows, arrays) in self._taps.items():
      if len(rows) == 0:
        continue
      with self._naming(f"tap {tap!r} cannot be written"):
        for name, values in rows.take().items():
          array = arrays[name]
          start = array.shape[0]
          array.resize((start + len(values), *array.shape[1:]))
          array[start:] = values

  def _claim(self) -> None:
    """Keeps other writers away, until the sink is closed; an error names who has it."""
    raise NotImplementedError

  def _open_root(self, *, keep: bool) -> Any:
    raise NotImplementedError

  def _create(self, group: Any, name: str, field: Field) -> Any:
    raise NotImplementedError


class Zarr(_GrowingArrays):
  """A Zarr group on disk: https://zarr.readthedocs.io

  Args:
    path: the store's folder. It is emptied when the sink is opened, unless `append`.
    append: continue an existing store.
  """

  def __init__(self, path: StrPath, *, append: bool = False) -> None:
    super().__init__(path, append=append)
    self._zarr = library("zarr", sink="Zarr", extra="zarr")

  def _claim(self) -> None:
    # Beside the store: Zarr makes its folder anew.
    folder = pathlib.Path(self._target)
    self._claimed = _callgate.FileClaim("Zarr", str(folder.with_name(f".{folder.name}.writing")))

  def _open_root(self, *, keep: bool) -> Any:
    return self._zarr.open_group(self._target, mode="a" if keep else "w")

  def _create(self, group: Any, name: str, field: Field) -> Any:
    return group.create_array(
      name, shape=(0, *field.shape), dtype=field.dtype, chunks=_chunks(field)
    )

  def _stop(self) -> None:
    self._root = None  # every append is complete in itself
    self._taps.clear()
    self._claimed.remove()


class HDF5(_GrowingArrays):
  """An HDF5 file of resizable datasets: https://docs.h5py.org

  A process that is killed may leave a file that HDF5 cannot read: `flush` it now and then.

  Args:
    path: the file. It is emptied when the sink is opened, unless `append`.
    append: continue an existing file.
  """

  def __init__(self, path: StrPath, *, append: bool = False) -> None:
    super().__init__(path, append=append)
    self._h5py = library("h5py", sink="HDF5", extra="hdf5")

  def _claim(self) -> None:
    self._claimed = _callgate.FileClaim("HDF5", self._target)  # HDF5 would empty it first

  def _open_root(self, *, keep: bool) -> Any:
    keep = keep and pathlib.Path(self._target).stat().st_size > 0
    return self._h5py.File(self._target, "a" if keep else "w")

  def _create(self, group: Any, name: str, field: Field) -> Any:
    # HDF5 has chunks of at least one element, and none beyond an extent that is fixed.
    limits = (None, *(extent or None for extent in field.shape))
    return group.create_dataset(
      name, shape=(0, *field.shape), maxshape=limits, dtype=field.dtype,
      chunks=_chunks(field),
    )  # fmt: skip

  def _flush(self) -> None:
    self._root.flush()

  def _stop(self) -> None:
    root, self._root = self._root, None
    self._taps.clear()
    try:
      root.close()
    finally:
      self._claimed.close()


def _chunks(field: Field) -> tuple[int, ...]:
  """Chunks of about a mebibyte, of whole rows where they fit, else of a part of one."""
  chunk = [max(1, extent) for extent in field.shape]
  for axis in range(len(chunk)):
    while int(np.prod(chunk)) * field.dtype.itemsize > _CHUNK_BYTES and chunk[axis] > 1:
      chunk[axis] = (chunk[axis] + 1) // 2
  rows = _CHUNK_BYTES // max(1, int(np.prod(chunk)) * field.dtype.itemsize)
  return (min(max(1, rows), 8192), *chunk)
