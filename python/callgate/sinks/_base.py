"""The interface of sinks, and what the ones over libraries share: state, errors, lazy imports.

A sink belongs to one channel at a time, which calls it on its own thread.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import types
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from callgate._core import extras
from callgate._process import group
from callgate._tap.records import Record, TapInfo

StrPath = str | os.PathLike[str]


class SinkError(RuntimeError):
  """A sink cannot write a record; the message names the sink, the tap and what was expected.

  Attributes:
    lost: how many records it stands for.
  """

  def __init__(self, message: str, *, lost: int = 0) -> None:
    super().__init__(message)
    self.lost = lost
    self._said = message

  def count(self, lost: int, so_far: int) -> None:
    """Says how many records it stands for, and in the message how many the sink has lost so far."""
    self.lost = lost
    self.args = (self._said + (f"; {so_far} record(s) lost so far" if so_far else ""),)

  def takes(self, later: BaseException) -> bool:
    """Whether a later error says the same: a full disk's is one, which counts for both then."""
    if not isinstance(later, SinkError) or later._said != self._said:
      return False
    self.lost += later.lost
    self.args = later.args
    return True


def check_process(sink: Sink, process: int) -> None:
  """Raises SinkError in a fork's child of the process that has the sink's files open."""
  if os.getpid() != process:
    raise SinkError(
      f"callgate.sinks.{sink!r}: expected to be written to by process {process}, which has it "
      f"open, got process {os.getpid()}, which was forked from it"
    )


def check_records(sink: Sink, records: Sequence[Any]) -> None:
  """Raises SinkError for what is no `Record` with a `TapInfo`."""
  for record in records:
    if not isinstance(record, Record) or not isinstance(record.info, TapInfo):  # pyright: ignore[reportUnnecessaryIsInstance]
      raise SinkError(
        f"callgate.sinks.{sink!r}: expected records, each a Record(value, TapInfo(...)), got "
        f"{record!r}"
      )


class Sink:
  """A consumer of records that a channel opens, feeds, flushes and closes.

  Subclass it and override `write`; the other methods do nothing here. `with sink:` opens and closes
  it where there is no channel.
  """

  def open(self, channel: str) -> None:
    """Called before the first records, and again when a closed sink is used anew.

    Args:
      channel: name of the channel, for messages.
    """

  def write(self, records: Sequence[Record]) -> None:
    """Takes records.

    Args:
      records: in the order in which the channel got them; those of a `vmap` one for each lane.
    """
    raise NotImplementedError(f"{type(self).__name__}.write")

  def flush(self) -> None:
    """Makes what was written visible to others."""

  def close(self) -> None:
    """Writes out and releases everything, also after an error. May be called again."""

  def __enter__(self) -> Sink:
    self.open("")
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"{type(self).__name__}()"


class LibrarySink(Sink):
  """A sink with a state: subclasses say how to start, take one record, write out and stop.

  The target may hold "{process}", which becomes this process's index when the sink is opened.
  A record that cannot be written does not take the others of its batch along: they are written,
  then the first error is raised.
  """

  def __init__(self, target: str) -> None:
    self._target = target  # what repr shows: a path, mostly
    self._channel: str | None = None  # of the channel that has it open
    self._process = os.getpid()  # that has opened it
    self._started_before = False
    self._refused: set[pathlib.Path] = set()
    self._lost = 0

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self._target!r})"

  def open(self, channel: str) -> None:
    if self._channel is not None:
      raise SinkError(
        f"callgate.sinks.{self!r}: expected a sink of one channel, got {channel!r} while"
        f" {self._channel!r} has it open"
      )
    with self._naming("cannot be opened"):
      self._target = group.fill_index(self._target)
      self._start(resume=self._started_before)
    self._started_before = True
    self._channel = channel
    self._process = os.getpid()

  def write(self, records: Sequence[Record]) -> None:
    if self._channel is None:
      self.open("")
    check_process(self, self._process)
    check_records(self, records)
    first: SinkError | None = None
    lost = 0
    for record in records:
      try:
        with self._naming(_where(record.info)):
          self._take(record)
      except SinkError as error:
        first = first or error
        lost += error.lost or 1
    try:
      with self._naming("cannot write"):
        self._commit()
    except SinkError as error:
      first = first or error
      lost += error.lost
    if first is not None:
      self._lost += lost
      first.count(lost, self._lost)
      raise first

  def flush(self) -> None:
    if self._channel is not None and os.getpid() == self._process:
      with self._naming("cannot flush"):
        self._flush()

  def close(self) -> None:
    if self._channel is None:
      return
    self._channel = None
    if os.getpid() != self._process:
      return  # the parent's files: a fork's child writes nothing to them
    with self._naming("cannot be closed properly"):
      self._stop()

  @contextlib.contextmanager
  def _beginning(self, path: pathlib.Path, *, anew: bool) -> Generator[None]:
    """Opens a file for its first record; one that was another sink's then stays that one's.

    The other may have closed it by the next record: it must not be begun anew.
    """
    if path in self._refused:
      raise FileExistsError(
        f"expected a file that nobody else writes to, got {str(path)!r}, which another sink wrote "
        "when the first record came; it is not begun anew"
      )
    try:
      yield
    except FileExistsError:
      if anew:
        self._refused.add(path)
      raise

  def _naming(self, what: str) -> _Naming:
    return _Naming(f"callgate.sinks.{self!r}: {what}")

  def _start(self, *, resume: bool) -> None:
    """Opens files. `resume`: this sink wrote to them before, so they are continued."""
    raise NotImplementedError

  def _take(self, record: Record) -> None:
    """Checks one record and takes it, or raises and takes nothing of it."""
    raise NotImplementedError

  def _commit(self) -> None:
    """Called after each batch."""

  def _flush(self) -> None:
    """Makes everything visible."""

  def _stop(self) -> None:
    """Writes out and releases, also when writing fails."""
    raise NotImplementedError


class _Naming:
  """Turns errors of the block into SinkErrors that begin with a place."""

  def __init__(self, where: str) -> None:
    self._where = where

  def __enter__(self) -> None:
    return None

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    if isinstance(error, Exception) and not isinstance(error, SinkError):
      raise SinkError(f"{self._where}: {type(error).__name__}: {error}") from error


def _where(info: TapInfo) -> str:
  return f"tap {info.name!r}, record {info.seq} of device {info.device}"


def library(module: str, *, sink: str, extra: str) -> Any:
  """Imports what a sink is made of; the extra of callgate that brings it, for the message."""
  title = module.partition(".")[0]
  return extras.library(module, title, extra, by=f"callgate.sinks.{sink}", error=ImportError)


def plain(leaf: Any) -> np.ndarray:
  """A leaf as an array of a dtype that NumPy has, exactly.

  bfloat16 and smaller floats become float32, int4 and its like int8 or uint8.
  """
  array = np.asarray(leaf)
  if array.dtype.isbuiltin == 1 or array.dtype.kind in "SU":
    return array
  if array.dtype.name.startswith("int"):
    return array.astype(np.int8)
  if array.dtype.name.startswith("uint"):
    return array.astype(np.uint8)
  with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
    return array.astype(np.float32)


def scalar(name: str, array: np.ndarray) -> np.ndarray:
  """The array, which must be a scalar.

  Args:
    name: the column, for the message.
    array: its value.
  """
  if array.ndim != 0:
    raise ValueError(f"expected scalars, got {name!r} of shape {array.shape}")
  return array


def lane_suffix(lane: tuple[int, ...]) -> str:
  """What tells the lanes of a tap apart in names: "[2,0]"; nothing without `vmap`."""
  return f"[{','.join(map(str, lane))}]" if lane else ""


def file_for(path: str, name: str) -> pathlib.Path:
  """The file of a tap or leaf, with its folder made.

  Args:
    path: may hold "{name}", which is replaced.
    name: what by; characters that do not belong into a file's name become "_".
  """
  part = "".join("_" if c in '/\\:*?"<>|' or ord(c) < 32 else c for c in name)
  if part.startswith("."):
    part = "_" + part[1:]
  file = pathlib.Path(path.replace("{name}", part))
  file.parent.mkdir(parents=True, exist_ok=True)
  return file
