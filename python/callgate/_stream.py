"""Reads streams of tapped values: from files, and from processes that serve one on a socket.

The format is that of include/callgate/stream.h, read in C++ without the GIL. Here whole records
become one `StreamRecord` for each lane that was sent, and columns and tables of these. One thread
reads a `StreamReader` at a time; another may close it, which ends the wait of the first.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from callgate import _callgate

Address = str | os.PathLike[str]

ROLES = ("primal", "tangent", "cotangent")
_AT_ONCE = 256  # records read in one go
_REPEATED = 1  # RecordFlags of src/channel/record.h
_NUMBERS = {"seq": np.uint64, "time_ns": np.int64, "device": np.int32, "lane": np.int64}


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRecord:
  """One tapped value: what one lane of one execution of a tap sent.

  Attributes:
    name: the tap's name.
    seq: number of the record on its device in its channel, from 0, dropped ones included.
    time_ns: wall clock, in nanoseconds since the Unix epoch.
    device: global id of the device.
    run: XLA's id of the execution.
    role: "primal", "tangent" or "cotangent".
    lane: index of the lane in row-major order of the levels of vmap; 0 without vmap.
    leaves: the value's arrays, by their path in its pytree; "" for a lone array.
    description: what else the writer said of the tap.
    repeated: whether the tap ran before in this execution, as under `jax.checkpoint`.
  """

  name: str
  seq: int
  time_ns: int
  device: int
  run: int
  role: str
  lane: int
  leaves: Mapping[str, np.ndarray[Any, Any]]
  description: Mapping[str, Any]
  repeated: bool = False


@dataclasses.dataclass(frozen=True)
class _Leaf:
  path: str
  dtype: str
  bits: int
  dims: tuple[int, ...]
  levels: tuple[int, ...]  # those that it has as leading axes

  def array(self, stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The stored elements as an array: packed ones come as their bytes."""
    if self.bits >= 8 or stored.dtype != np.uint8:
      return stored
    return _unpack(stored, self).reshape(self.dims)


def _unpack(stored: np.ndarray[Any, Any], leaf: _Leaf) -> np.ndarray[Any, Any]:
  import ml_dtypes

  per_byte = 8 // leaf.bits
  shifts = np.arange(per_byte, dtype=np.uint8) * leaf.bits
  values = (stored[:, None] >> shifts) & ((1 << leaf.bits) - 1)
  values = values.reshape(-1)[: int(np.prod(leaf.dims, dtype=np.int64))].astype(np.uint8)
  if leaf.dtype.startswith("int"):
    sign = np.uint8(1 << (leaf.bits - 1))
    values = (values ^ sign) - sign  # extends the sign to the byte, modulo 256
  dtype = getattr(ml_dtypes, leaf.dtype, None)
  return values if dtype is None else values.view(dtype)


class _Source:
  """What the records of one tap share, and how a whole record becomes those of its lanes."""

  def __init__(self, fields: Mapping[str, Any]) -> None:
    self.name: str = fields["name"]
    self.description = _parse_description(fields["description"])
    self.role = ROLES[fields["role"]] if fields["role"] < len(ROLES) else str(fields["role"])
    sizes: list[tuple[int, str]] = fields["levels"]
    self.sizes = tuple(size for size, _ in sizes)
    leaves: list[tuple[str, str, int, tuple[int, ...]]] = fields["leaves"]
    self.leaves = [
      _Leaf(*leaf, levels=tuple(n for n, (_, mask) in enumerate(sizes) if mask[index] == "1"))
      for index, leaf in enumerate(leaves)
    ]
    self.value_leaves: int = fields["value_leaves"]
    self.has_where: bool = fields["has_where"]
    self.has_packed = any(leaf.bits < 8 for leaf in self.leaves)
    self.paths = [leaf.path for leaf in self.leaves[: self.value_leaves]]

  def records(self, whole: Sequence[Any]) -> list[StreamRecord]:
    """The records of the lanes that were sent, from what the native reader gives."""
    _, seq, time_ns, run, device, flags, arrays = whole
    if self.has_packed:
      arrays = [leaf.array(array) for leaf, array in zip(self.leaves, arrays, strict=True)]
    repeated = bool(flags & _REPEATED)
    return [
      StreamRecord(
        self.name, seq, time_ns, device, run, self.role, lane, leaves, self.description, repeated
      )
      for lane, leaves in self._lanes(arrays)
    ]

  def _lanes(self, arrays: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the value leaves of each lane that was sent."""
    for lane, index in enumerate(itertools.product(*map(range, self.sizes))):
      selected = arrays
      if index:
        selected = [
          array[(*[index[level] for level in leaf.levels], ...)] if leaf.levels else array
          for leaf, array in zip(self.leaves, arrays, strict=True)
        ]
      if not self.has_where or selected[self.value_leaves].any():
        yield lane, dict(zip(self.paths, selected, strict=False))  # without the control leaves


def _parse_description(text: str) -> Mapping[str, Any]:
  try:
    parsed = json.loads(text) if text else {}
  except ValueError:
    parsed = {"text": text}
  return parsed if isinstance(parsed, dict) else {"value": parsed}


class _Input:
  """One file or connection, and the records that have been read but not been asked for."""

  def __init__(self, address: str) -> None:
    self.address = address
    self.is_file = not address.startswith(("unix:", "tcp://"))
    if self.is_file and not os.path.exists(address):
      raise FileNotFoundError(f"callgate.open_stream: there is no file {address!r}")
    self.native = _callgate.StreamReader(address)
    self.ready: list[StreamRecord] = []  # the next one last
    self._sources: dict[int, tuple[Any, _Source]] = {}  # by id() of what the native reader gives

  def fill(self, timeout: float) -> bool:
    """Whether a record is ready; reads some, and waits for the first up to `timeout` seconds."""
    while not self.ready:
      read: list[Any] = self.native.read(timeout, _AT_ONCE)
      if not read:
        return False
      for whole in read:
        self.ready.extend(self._source(whole[0]).records(whole))
      self.ready.reverse()
    return True

  def _source(self, fields: Mapping[str, Any]) -> _Source:
    known = self._sources.get(id(fields))
    if known is None:
      known = self._sources[id(fields)] = (
        fields,
        _Source(fields),
      )  # holds it: its id stays its own
    return known[1]

  def over(self, follow: bool) -> bool:
    """Whether no record will follow, for all that this reader is to wait."""
    if self.is_file:
      return self.native.closed or not follow
    return self.native.closed or self.native.ended

  def order(self) -> tuple[int, int, int]:
    head = self.ready[-1]
    return head.time_ns, head.device, head.seq


class StreamReader:
  """The records of a stream, as `open_stream` gives it: an iterator and a context manager."""

  def __init__(self, addresses: Sequence[str], *, follow: bool) -> None:
    self._addresses = tuple(addresses)
    self._follow = follow
    self._inputs = [_Input(address) for address in addresses]

  def __iter__(self) -> Iterator[StreamRecord]:
    return self

  def __next__(self) -> StreamRecord:
    record = self.read(None)
    if record is None:
      raise StopIteration
    return record

  def read(self, timeout: float | None = 0.0) -> StreamRecord | None:
    """The next record; None at the end of the stream, or when none came in time.

    Args:
      timeout: seconds to wait for a record that may still come; None for no limit. Files are
        waited for only with `follow=True`.

    Returns:
      The record that comes first by time, device and sequence number, of those that are there.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
      ready = [one for one in self._inputs if one.ready or one.fill(0.0)]
      if ready:
        first = ready[0] if len(ready) == 1 else min(ready, key=_Input.order)
        return first.ready.pop()
      waiting = [one for one in self._inputs if not self._over(one)]
      left = np.inf if deadline is None else deadline - time.monotonic()
      if not waiting or left <= 0:
        return None
      for one in waiting:
        if one.fill(min(left, 0.2) / len(waiting)):
          break

  def _over(self, one: _Input) -> bool:
    if not one.over(self._follow):
      return False
    if not one.is_file and not one.native.closed:
      raise ConnectionError(
        f"callgate.open_stream: {one.address}: the connection ended before the stream did: its "
        "writer is gone, or it disconnected this reader for being slow"
      )
    return True

  def names(self) -> list[str]:
    """The names of the taps in the stream, sorted: of a connection, those described so far."""
    found: set[str] = set()
    for one in self._inputs:
      native = one.native
      if one.is_file:
        native = _callgate.StreamReader(one.address)
        native.scan()
      found.update(source["name"] for source in native.sources())
    return sorted(found)

  @property
  def ended(self) -> bool:
    """Whether the writers of all files and connections have closed them, as far as was read.

    Of a file, a later writer may continue it: `read` then goes on.
    """
    return all(one.native.closed and not one.ready for one in self._inputs)

  def columns(self, name: str | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """The records of one tap as columns.

    Args:
      name: the tap's name; None when the stream has only one.

    Returns:
      Arrays with one entry a record: `seq`, `time_ns`, `device`, `lane`, and each leaf by its path
      ("value" for a lone array), stacked along a new first axis. Of files, all records, wherever
      the iteration stands; of a connection, the rest until it ends.

    Raises:
      ValueError: the stream has no such tap, or the shapes of a leaf differ among its records.
    """
    records = self._all(name)
    columns: dict[str, np.ndarray[Any, Any]] = {
      key: np.asarray([getattr(record, key) for record in records], dtype)
      for key, dtype in _NUMBERS.items()
    }
    for path in records[0].leaves if records else ():
      column = column_name(path)
      columns[column] = _stack(records, path)
    return columns

  def table(self, name: str | None = None) -> Any:
    """The records of one tap as an Arrow table, with the columns of `columns`.

    Args:
      name: as for `columns`.

    Returns:
      A `pyarrow.Table`; arrays with dims become columns of fixed-size lists, nested for more
      than one.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: as for `columns`; or a dtype that Arrow lacks.
    """
    try:
      import pyarrow  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
      raise ImportError(
        "callgate: StreamReader.table needs pyarrow: pip install callgate[arrow]"
      ) from error
    columns = self.columns(name)
    return pyarrow.table({key: _arrow_array(pyarrow, key, c) for key, c in columns.items()})

  def _all(self, name: str | None) -> list[StreamRecord]:
    if all(one.is_file for one in self._inputs):
      with StreamReader(self._addresses, follow=False) as fresh:
        records = [record for record in fresh if name in (None, record.name)]
    else:
      records = [record for record in self if name in (None, record.name)]
    names = sorted({record.name for record in records})
    if len(names) > 1:
      raise ValueError(f"callgate: columns of one tap, by its name: expected one of {names}")
    if not names and name is not None and name not in self.names():
      raise ValueError(f"callgate: no tap {name!r} in {self!r}, which has {self.names()}")
    return records

  def close(self) -> None:
    """Closes the files and connections; reading on is an error, also for a thread that waits."""
    for one in self._inputs:
      one.native.close()

  def __enter__(self) -> StreamReader:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"<stream reader of {', '.join(self._addresses)}>"


def column_name(path: str) -> str:
  """The column of a leaf: its path, "value" for a lone array, apart from the other columns."""
  column = path or "value"
  return f"{column}_" if column in _NUMBERS else column


def _stack(records: Sequence[StreamRecord], path: str) -> np.ndarray[Any, Any]:
  arrays = [record.leaves.get(path) for record in records]
  kinds = {None if a is None else (a.dtype, a.shape) for a in arrays}
  if len(kinds) > 1:
    what = ", ".join(sorted("none" if k is None else f"{k[0]}{list(k[1])}" for k in kinds))
    raise ValueError(
      f"callgate: leaf {path!r} of tap {records[0].name!r} differs among records, so it makes no "
      f"column: expected one dtype and shape, got {what}"
    )
  column = np.empty((len(arrays), *records[0].leaves[path].shape), records[0].leaves[path].dtype)
  for row, array in enumerate(arrays):
    column[row] = array
  return column


def _arrow_array(pyarrow: Any, key: str, column: np.ndarray[Any, Any]) -> Any:
  if len(column) and not column.size:  # lists without elements don't say how many they are
    return pyarrow.array(column.tolist())
  try:
    array = pyarrow.array(column.reshape(-1))
  except (TypeError, NotImplementedError, pyarrow.ArrowException) as error:
    raise ValueError(
      f"callgate: Arrow has no type for column {key!r}, {column.dtype}: take columns() instead"
    ) from error
  for extent in reversed(column.shape[1:]):
    array = pyarrow.FixedSizeListArray.from_arrays(array, extent)
  return array


def _addresses(where: Address | Iterable[Address]) -> list[str]:
  if not isinstance(where, str | os.PathLike):
    return [address for one in where for address in _addresses(one)]
  address = os.fspath(where)
  is_pattern = not address.startswith(("unix:", "tcp://")) and glob.has_magic(address)
  if not is_pattern or os.path.exists(address):
    return [address]
  found = sorted(glob.glob(address, recursive=True))
  if not found:
    raise FileNotFoundError(f"callgate.open_stream: no file matches {address!r}")
  return found


def open_stream(where: Address | Iterable[Address], *, follow: bool = False) -> StreamReader:
  """Opens a stream of tapped values.

  Args:
    where: a file, a pattern of files ("run/*.cgs"), `unix:PATH`, `tcp://HOST:PORT`, or several of
      these, whose records are merged by time, then device and sequence number.
    follow: wait at the end of a file for more records, until its writer closes the stream.
      Connections are always followed until then.

  Returns:
    An iterator of `StreamRecord`, a context manager, with `columns()`, `table()` and `names()`.

  Raises:
    FileNotFoundError: no such file.
    ValueError: not a stream, or a damaged one: then when its records are read, with the offset.
    ConnectionError: while reading: the connection ended before the stream did.
  """
  addresses = _addresses(where)
  if not addresses:
    raise ValueError("callgate.open_stream: expected at least one file or address, got none")
  return StreamReader(addresses, follow=follow)
