# SPDX-License-Identifier: Apache-2.0
"""The records of a stream in Python: one for each lane of a tap, or columns of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from callgate._core import extras
from callgate._sharding.tiles import ShardedArray, shard_of
from callgate._tap.delivery import REPEATED, ROLES, SizeError, cut


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRecord:
  """One tapped value of a stream: one lane of one execution of a tap.

  Attributes:
    name: the tap's name.
    seq: number of the record on its device and channel, from 0; dropped records count.
    time_ns: wall clock, in nanoseconds since the Unix epoch.
    device: global id of the device.
    run: XLA's id of the execution.
    role: "primal", "tangent" or "cotangent".
    lane: index of the lane in row-major order of the vmapped levels; 0 without vmap.
    leaves: the value's arrays, by their path in its pytree; "" for a single array.
    description: further data of the writer about the tap.
    repeated: True if the tap sent this value before in this execution, as under `jax.checkpoint`.
    process: index of the writer's process (`jax.process_index()`); 0 if unknown.
    shard: slices of the global array for each leaf, by its path; None for whole values.
    global_shape: the shapes of the global arrays, by path; None for whole values.
  """

  name: str
  seq: int
  time_ns: int
  device: int
  run: int
  role: str
  lane: int
  leaves: Mapping[str, np.ndarray]
  description: Mapping[str, Any]
  repeated: bool = False
  process: int = 0
  shard: Mapping[str, tuple[slice, ...]] | None = None
  global_shape: Mapping[str, tuple[int, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class _Leaf:
  path: str
  dtype: str
  bits: int
  dims: tuple[int, ...]
  levels: tuple[int, ...]  # the levels that the leaf has as leading axes

  def array(self, stored: np.ndarray) -> np.ndarray:
    """Returns the stored elements as an array; packed elements stay bytes."""
    if self.bits >= 8 or stored.dtype != np.uint8:
      return stored
    shifts = np.arange(8 // self.bits, dtype=np.uint8) * self.bits
    values = (stored[:, None] >> shifts) & ((1 << self.bits) - 1)
    values = values.reshape(-1)[: math.prod(self.dims)].astype(np.uint8)
    if self.dtype.startswith("int"):
      sign = np.uint8(1 << (self.bits - 1))
      values = (values ^ sign) - sign  # extends the sign to the byte, modulo 256
    dtype = getattr(ml_dtypes, self.dtype, None)
    return (values if dtype is None else values.view(dtype)).reshape(self.dims)


class TapSource:
  """The common data of one tap's records, and the split of a record into lanes.

  The native reader has checked everything except the description. For example, there are no more
  lanes than the leaves have.
  """

  def __init__(self, fields: Mapping[str, Any]) -> None:
    self.name: str = fields["name"]
    self._label = f"callgate: a stream's tap {self.name!r}"
    self.description = _parse_description(fields["description"])
    self.role = ROLES[fields["role"]] if fields["role"] < len(ROLES) else str(fields["role"])
    levels: list[tuple[int, str]] = fields["levels"]
    self.sizes = tuple(size for size, _ in levels)
    # Levels that no leaf has: the program sends a record for each of their lanes, with its number.
    self.numbered = tuple("1" not in mask for _, mask in levels)
    self.leaves: list[_Leaf] = []
    for index, (path, dtype, bits, dims) in enumerate(fields["leaves"]):
      own = tuple(n for n, (_, mask) in enumerate(levels) if mask[index] == "1")
      self.leaves.append(_Leaf(path, dtype, bits, dims, own))
    self.value_leaves: int = fields["value_leaves"]
    self.has_where: bool = fields["has_where"]
    # The index of the leaf with the number.
    self._number = self.value_leaves + int(self.has_where) if any(self.numbered) else None
    shards: dict[str, Any] = self.description.get("shards") or {}
    with self._sensible("its shards"):
      self.parts = [ShardedArray(part) for part in shards.get("leaves", ())]
      self.lane_starts: list[list[int]] = shards.get("lanes", [])
      self.all_sizes: tuple[int, ...] = tuple(shards.get("sizes", self.sizes))
    self.process = max(0, int(fields["process_index"]))
    self.has_packed = any(leaf.bits < 8 for leaf in self.leaves)
    with self._sensible("its padded leaves"):
      padded: list[int] = list(self.description.get("logical", ()))
      self.values = self.value_leaves - len(padded)  # the leaves' logical sizes follow
      self.padded = [range(self.values)[index] for index in padded]
      self.paths = [leaf.path for leaf in self.leaves[: self.values]]

  @contextlib.contextmanager
  def _sensible(self, what: str) -> Generator[None]:
    """Raises ValueError for a description that makes no sense: the writer may write anything."""
    try:
      yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
      got = repr(self.description)
      raise ValueError(f"{self._label}: expected {what} as a tap writes them, got {got}") from error

  def records(self, whole: Sequence[Any]) -> list[StreamRecord]:
    """Returns the records of the lanes that were sent, from the native reader's data."""
    _, seq, time_ns, run, device, flags, arrays = whole
    with self._sensible("its shards and lanes"):
      number = shard_of(flags)
      shard = shapes = None
      if number >= 0 and self.parts:
        named = dict(zip(self.paths, self.parts, strict=True))
        shard = {path: part.slices(number) for path, part in named.items()}
        shapes = {path: part.shape for path, part in named.items()}
      repeated = bool(flags & REPEATED)
      about = (self.description, repeated, self.process, shard, shapes)
      each = self._lanes(arrays, number)
      head = (self.name, seq, time_ns, device, run, self.role)
      return [StreamRecord(*head, lane, leaves, *about) for lane, leaves in each]

  def _ranges(self, arrays: list[Any]) -> list[range]:
    """Returns the indices of the lanes in each level; a numbered level has the record's own."""
    if self._number is None:
      return [range(size) for size in self.sizes]
    levels = list(zip(self.sizes, self.numbered, strict=True))
    own = iter(np.unravel_index(int(arrays[self._number]), [size for size, flag in levels if flag]))
    starts = [int(next(own)) if flag else 0 for _, flag in levels]
    return [
      range(start, start + (1 if flag else size))
      for start, (size, flag) in zip(starts, levels, strict=True)
    ]

  def _lanes(self, arrays: list[Any], shard: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the leaves of each lane that was sent."""
    if self.has_packed:
      arrays = [leaf.array(array) for leaf, array in zip(self.leaves, arrays, strict=True)]
    starts = [level[shard] for level in self.lane_starts] if shard >= 0 else []
    for lane, index in enumerate(itertools.product(*self._ranges(arrays))):
      selected = arrays
      if index:
        pairs = zip(self.leaves, arrays, strict=True)
        selected = [x[(*map(index.__getitem__, leaf.levels), ...)] for leaf, x in pairs]
      if self.has_where and not selected[self.value_leaves].any():
        continue
      # The number among all devices' lanes and all calls' lanes.
      if starts or self._number is not None:
        place = tuple(map(operator.add, index, starts)) if starts else index
        lane = int(np.ravel_multi_index(place, self.all_sizes))
      values = selected[: self.values]
      with contextlib.suppress(SizeError):  # the writer has counted it as lost
        cut(values, self.padded, selected[self.values : self.value_leaves], self.parts, shard)
        yield lane, dict(zip(self.paths, values, strict=True))


def _parse_description(text: str) -> Mapping[str, Any]:
  try:
    parsed = json.loads(text or "{}")
  except (ValueError, RecursionError):
    parsed = {"text": text}
  return parsed if isinstance(parsed, dict) else {"value": parsed}


_NUMBERS: Mapping[str, Any] = {
  "seq": np.uint64, "time_ns": np.int64, "process": np.int32, "device": np.int32, "lane": np.int64
}  # fmt: skip


def columns_of(records: Sequence[StreamRecord]) -> dict[str, np.ndarray]:
  """Returns the records of one tap as arrays with one entry for each: numbers, then each leaf."""
  columns: dict[str, np.ndarray] = {}
  for key, dtype in _NUMBERS.items():
    columns[key] = np.asarray([getattr(record, key) for record in records], dtype)
  for path, first in records[0].leaves.items() if records else ():
    arrays = [record.leaves.get(path) for record in records]
    kinds = {None if a is None else (a.dtype, a.shape) for a in arrays}
    if len(kinds) > 1:
      got = ", ".join(sorted("none" if k is None else f"{k[0]}{list(k[1])}" for k in kinds))
      differs = f"leaf {path!r} of tap {records[0].name!r} differs among records"
      expected = "so it can't be a column: expected one dtype and shape"
      raise ValueError(f"callgate: {differs}, {expected}, got {got}")
    column = path or "value"
    column = f"{column}_" if column in _NUMBERS else column
    columns[column] = np.asarray(arrays, first.dtype).reshape(len(arrays), *first.shape)
  return columns


def table_of(columns: Mapping[str, np.ndarray]) -> Any:
  """Returns the columns as a `pyarrow.Table`."""
  by = "callgate: StreamReader.table"
  pyarrow = extras.library("pyarrow", "pyarrow", "arrow", by=by, error=ImportError)

  def converted(key: str, column: np.ndarray) -> Any:
    if len(column) and not column.size:  # empty lists don't show their number
      return pyarrow.array(column.tolist())
    try:
      array = pyarrow.array(column.reshape(-1))
    except (TypeError, NotImplementedError, pyarrow.ArrowException) as error:
      none = f"Arrow has no type for column {key!r}, {column.dtype}"
      raise ValueError(f"callgate: {none}; use columns() instead") from error
    for extent in reversed(column.shape[1:]):
      array = pyarrow.FixedSizeListArray.from_arrays(array, extent)
    return array

  return pyarrow.table({key: converted(key, column) for key, column in columns.items()})
