# SPDX-License-Identifier: Apache-2.0
"""Reads streams of tapped values: from files, and from processes that serve one on a socket.

C++ reads the format of include/callgate/stream.h without the GIL. One thread at a time reads a
`StreamReader`. Another thread may close it, which ends the wait of the first.
"""

from __future__ import annotations

import contextlib
import glob
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._core import options
from callgate._core.public import Closing
from callgate._part import Wait
from callgate._process.group import PLACEHOLDER
from callgate._stream.records import StreamRecord, TapSource, columns_of, table_of

Address = str | os.PathLike[str]
_AT_ONCE = 256  # the most records in one read
_ORDER = operator.attrgetter("time_ns", "process", "device", "seq")


def is_address(where: str) -> bool:
  """True for the address of a process that serves a stream, False for a file."""
  return where.startswith(("unix:", "tcp://"))


class _Input:
  """One file or connection, and the records that have been read and not yet returned."""

  def __init__(self, address: str) -> None:
    self.address = address
    self.is_file = not is_address(address)
    if self.is_file and not os.path.exists(address):
      raise FileNotFoundError(f"callgate.open_stream: the file {address!r} doesn't exist")
    self.native = _callgate.StreamReader(address)
    self.ready: list[StreamRecord] = []  # in reverse order
    # By id() of the native reader's object, which is kept here so that the id stays unique.
    self._sources: dict[int, tuple[Any, TapSource]] = {}

  def fill(self, timeout: float) -> bool:
    """True if a record is ready; reads some, and waits for the first up to `timeout` seconds."""
    while not self.ready:
      if not (read := self.native.read(timeout, _AT_ONCE)):
        return False
      for whole in read:
        key = id(whole[0])
        if key not in self._sources:
          self._sources[key] = whole[0], TapSource(whole[0])
        self.ready.extend(self._sources[key][1].records(whole))
      self.ready.reverse()
    return True

  def over(self, follow: bool) -> bool:
    """True if this reader need not wait for further records."""
    if self.native.ended and not (self.is_file or self.native.closed):
      why = "the writer has ended, or disconnected this reader because it was slow"
      ended = f"{self.address}: the connection ended before the stream: {why}"
      raise ConnectionError(f"callgate.open_stream: {ended}")
    return self.native.closed or (self.is_file and not follow)


class StreamReader(Closing):
  """An iterator over the records of a stream, and a context manager; `open_stream` returns one."""

  def __init__(self, addresses: Sequence[str], *, follow: bool) -> None:
    self._addresses, self._follow = tuple(addresses), follow
    self._inputs = [_Input(address) for address in addresses]

  def __iter__(self) -> Iterator[StreamRecord]:
    return self

  def __next__(self) -> StreamRecord:
    if (record := self.read(None)) is None:
      raise StopIteration
    return record

  def read(self, timeout: float | None = 0.0) -> StreamRecord | None:
    """Returns the next record; None at the end of the stream, or after `timeout` seconds.

    Args:
      timeout: seconds to wait for a record; None for no limit. Files are waited for only with
        `follow=True`.

    Returns:
      The first of the inputs' next records, by time, process, device and `seq`.
    """
    seconds = options.or_none(options.seconds, "StreamReader.read", "timeout", timeout, zero=True)
    wait = Wait(seconds)
    while True:
      if ready := [one for one in self._inputs if one.ready or one.fill(0.0)]:
        return min(ready, key=lambda one: _ORDER(one.ready[-1])).ready.pop()
      waiting = [one for one in self._inputs if not one.over(self._follow)]
      left = wait.left
      if not waiting or left <= 0:
        return None
      for one in waiting:
        if one.fill(min(left, 0.2) / len(waiting)):
          break

  def names(self) -> list[str]:
    """Returns the sorted names of the taps; for a connection, of those described so far."""
    found: set[str] = set()
    for one in self._inputs:
      native = _callgate.StreamReader(one.address) if one.is_file else one.native
      if one.is_file:
        native.scan()
      found.update(source["name"] for source in native.sources())
    return sorted(found)

  @property
  def ended(self) -> bool:
    """True if every writer has closed the stream and all its records have been read."""
    return all(one.native.closed and not one.ready for one in self._inputs)

  def columns(self, name: str | None = None) -> dict[str, np.ndarray]:
    """Returns the records of one tap as columns.

    Args:
      name: the tap's name. Default: the stream's only tap.

    Returns:
      A dictionary of arrays with one entry for each record: `seq`, `time_ns`, `process`, `device`,
      `lane`, and each leaf by its path ("value" for a single array), stacked along a new first
      axis. A file gives all its records, regardless of the iteration; a connection gives the
      remaining ones, until it ends.

    Raises:
      ValueError: the stream has no such tap, or the shapes of a leaf differ among its records.
    """
    finite = all(one.is_file for one in self._inputs)
    fresh = StreamReader(self._addresses, follow=False) if finite else contextlib.nullcontext(self)
    with fresh as reader:
      records = [record for record in reader if name in (None, record.name)]
    names = sorted({record.name for record in records})
    if len(names) > 1:
      raise ValueError(f"callgate: columns: expected one tap; pass one of {names}")
    if not names and name is not None and name not in self.names():
      raise ValueError(f"callgate: tap {name!r} is not in {self!r}, which has {self.names()}")
    return columns_of(records)

  def table(self, name: str | None = None) -> Any:
    """Returns the records of one tap as an Arrow table, with the columns of `columns`.

    Args:
      name: the tap's name. Default: the stream's only tap.

    Returns:
      A `pyarrow.Table`. Arrays are columns of fixed-size lists, nested for several dimensions.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: as for `columns`, or Arrow lacks a dtype.
    """
    return table_of(self.columns(name))

  def close(self) -> None:
    """Closes the files and connections. Later reads, and a read that waits, raise an error."""
    for one in self._inputs:
      one.native.close()

  def __repr__(self) -> str:
    return f"<stream reader of {', '.join(self._addresses)}>"


def _addresses(where: Address | Iterable[Address]) -> list[str]:
  if not isinstance(where, str | os.PathLike):
    if isinstance(where, (bytes, bytearray)) or not isinstance(where, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
      options.refuse("open_stream", "where", "paths or addresses", where)
    try:
      several = list(where)
    except TypeError:  # an array without dimensions
      options.refuse("open_stream", "where", "paths or addresses", where)
    return [address for one in several for address in _addresses(one)]
  address = options.path("open_stream", "where", where)
  if os.path.isdir(address):
    raise IsADirectoryError(
      f"callgate.open_stream: expected a file, got the folder {address!r}; pass its streams, as "
      f"{os.path.join(address, '*.cgs')!r}, or watch it with `python -m callgate watch {address}`"
    )
  if is_address(address) or os.path.exists(address):
    return [address]
  if PLACEHOLDER in address:
    address = glob.escape(address).replace(PLACEHOLDER, "[0-9]*")
  if not glob.has_magic(address):
    return [address]
  if not (found := sorted(glob.glob(address, recursive=True))):
    raise FileNotFoundError(
      f"callgate.open_stream: expected a file, got the pattern {address!r}, which matches no file"
    )
  return found


def open_stream(where: Address | Iterable[Address], *, follow: bool = False) -> StreamReader:
  """Opens a stream of tapped values for reading, or several as one.

  ```python
  import callgate as cg, jax

  with cg.channel("open_stream.loss", to=cg.sinks.Stream("run.cgs")):
    jax.jit(lambda x: cg.tap(x, "open_stream.loss"))(2.0)
  with cg.open_stream("run.cgs") as stream:
    assert [float(record.leaves[""]) for record in stream] == [2.0]
  ```

  Records of one file or connection keep their order. On each device this is the order of `seq`.
  Records of several inputs are merged by `time_ns`, process, device and `seq`, as far as they are
  there.

  Args:
    where: a file; a pattern of files, such as "run-*.cgs" or "run-{process}.cgs"; `unix:PATH`;
      `tcp://HOST:PORT`; or a list of these, whose records are merged.
    follow: waits at the end of a file for more records, until its writer closes the stream.
      Connections always wait.

  Returns:
    A `StreamReader`: an iterator of `StreamRecord`s and a context manager, with `columns()`,
    `table()` and `names()`.

  Raises:
    FileNotFoundError: no such file.
    IsADirectoryError: a folder.
    ValueError: it isn't a stream; or, while reading, it is damaged (with the offset).
    ConnectionError: while reading: the connection ended before the stream did.
  """
  options.boolean("open_stream", "follow", follow)
  addresses = _addresses(where)
  if not addresses:
    raise ValueError("callgate.open_stream: where: expected at least one file or address, got none")
  return StreamReader(addresses, follow=follow)
