# SPDX-License-Identifier: Apache-2.0
"""The interface of sinks, and what the ones over libraries share: state, errors, lazy imports."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from callgate._core import extras, foreign, options, signatures, spellings
from callgate._core.errors import LossError
from callgate._core.opened import resolved
from callgate._process import group
from callgate._tap.consumers import Choice
from callgate._tap.records import Record, TapInfo

StrPath = str | os.PathLike[str]


class ChoiceOptions(TypedDict, total=False):
  """The options of `Sink`, which every sink takes and hands on."""

  every: int | None
  rate: float | None
  where: Callable[[Record], Any] | None


class SinkError(LossError, RuntimeError):
  """A sink cannot write a record; the message names the sink, the tap and what was expected.

  Attributes:
    lost: how many records it stands for.
  """

  def __init__(self, message: str, *, lost: int = 0) -> None:
    super().__init__(message)
    self.lost, self._said = lost, message

  def count(self, lost: int, so_far: int) -> None:
    """Says how many records it stands for, and in the message how many the sink has lost so far."""
    self.lost = lost
    self.args = (self._said + (f"; {so_far} record(s) lost so far" if so_far else ""),)

  def takes(self, later: BaseException) -> bool:
    """A full disk's error comes batch after batch; the first one counts for all."""
    if not isinstance(later, SinkError) or later._said != self._said:
      return False
    self.lost += later.lost
    self.args = later.args
    return True


class Sink:
  """A consumer of records that a channel opens, feeds, flushes and closes, on its own thread.

  Subclass it and override `write`; the other methods do nothing here. `with sink:` opens and closes
  it where there is no channel. Every sink takes these options, which say what it gets of a
  channel's records; what is written to it by hand is written.

  Args:
    every: of each tap on each device each n-th record; the lanes of a `vmap` are one.
    rate: of these at most so many a second, by when the records were sent, on the steady clock.
    where: of these the ones for which `where(record)` is true; each lane is a record. It is called
      on the channel's thread, in Python, for native sinks, too.
  """

  choice: Choice = Choice()

  def __init__(
    self,
    *,
    every: int | None = None,
    rate: float | None = None,
    where: Callable[[Record], Any] | None = None,
    **unknown: object,
  ) -> None:
    label = f"sinks.{type(self).__name__}"
    for name in unknown:  # which a subclass has handed on
      hint = spellings.near(name, _options(type(self)))
      raise TypeError(f"{label}() got an unexpected keyword argument '{name}'{hint}")
    signatures.refuse_unrun(f"{label}: where: expected a function", where)
    self.choice = Choice(
      options.or_none(options.count, label, "every", every, least=1) or 1,
      options.or_none(
        options.number, label, "rate", rate, above=0, what="records a second, above 0"
      ),
      options.or_none(options.function, label, "where", where),
    )

  def open(self, channel: str) -> None:
    """Called before the first records, and anew where it was closed; `channel` is a name."""

  def write(self, records: Sequence[Record]) -> None:
    """Takes records, in the order in which the channel got them; of a `vmap` one for each lane."""
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


def _options(kind: type[Sink]) -> list[str]:
  """The names of all options of a sink."""
  inits = [inspect.signature(base.__init__) for base in kind.__mro__ if issubclass(base, Sink)]
  return [name for init in inits for name in init.parameters]


class OwnedSink(Sink):
  """A sink that one channel of one process has open at a time."""

  def __init__(self, target: str, **choice: Unpack[ChoiceOptions]) -> None:
    super().__init__(**choice)
    self._target = target  # what repr shows: a path, mostly
    self._channel: str | None = None  # that has it open
    self._process = os.getpid()  # that has opened it

  def _begin(self) -> None: ...  # keeps other writers away

  def __repr__(self) -> str:
    return f"{type(self).__name__}({repr(self._target) if self._target else ''})"

  def _error(self, what: str, *, lost: int = 0) -> SinkError:
    return SinkError(f"callgate.sinks.{self!r}: {what}", lost=lost)

  def open(self, channel: str) -> None:
    if self._channel is not None:
      one = f"expected a sink of one channel, got {channel!r} while {self._channel!r} has it open"
      raise self._error(one)
    self._begin()
    self._channel = channel

  def _check(self, records: Sequence[Any]) -> None:
    """Raises SinkError in a fork's child of the opening process, and for what is no record."""
    if (here := os.getpid()) != self._process:
      by = f"expected to be written to by process {self._process}, which has it open"
      raise self._error(f"{by}, got process {here}, which was forked from it")
    for record in records:
      if not isinstance(record, Record) or not isinstance(record.info, TapInfo):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise self._error(f"expected records, each a Record(value, TapInfo(...)), got {record!r}")


class LibrarySink(OwnedSink):
  """A sink with a state: subclasses say how to start, take one record, write out and stop.

  "{process}" in the target becomes this process's index when the sink is opened. Where a record
  can't be written the others of its batch are, then the first error is raised.
  """

  _extra = ""  # of callgate, that brings
  _needs: tuple[str, ...] = ()  # modules; `_module` is the last
  _module: Any
  _lost = 0  # records

  def __init__(self, target: str, **choice: Unpack[ChoiceOptions]) -> None:
    super().__init__(target, **choice)
    for module in self._needs:
      by, title = f"callgate.sinks.{type(self).__name__}", module.partition(".")[0]
      self._module = extras.library(module, title, self._extra, by=by, error=ImportError)

  def _start(self) -> None: ...  # opens files; those that this sink wrote to before are continued
  def _take(self, record: Record) -> None: ...  # a record, or raises and takes nothing of it
  def _commit(self) -> None: ...  # after each batch
  def _flush(self) -> None: ...  # makes everything visible
  def _stop(self) -> None: ...  # writes out and releases, also when writing fails

  def _begin(self) -> None:
    with self._naming("cannot be opened"):
      self._target = group.fill_index(self._target)
      self._start()
    self._process = os.getpid()

  def write(self, records: Sequence[Record]) -> None:
    if self._channel is None:
      self.open("")
    self._check(records)
    errors: list[SinkError] = []
    for record in records:
      at = record.info
      with self._naming(f"tap {at.name!r}, record {at.seq} of device {at.device}", errors):
        self._take(record)
    for error in errors:
      error.lost = error.lost or 1
    with self._naming("cannot write", errors):
      self._commit()
    if errors:
      lost = sum(error.lost for error in errors)
      self._lost += lost
      errors[0].count(lost, self._lost)
      raise errors[0]

  def flush(self) -> None:
    if self._channel is not None and os.getpid() == self._process:
      with self._naming("cannot flush"):
        self._flush()

  def close(self) -> None:
    opened, self._channel = self._channel, None
    if opened is not None and os.getpid() == self._process:  # in a fork's child: the parent's
      with self._naming("cannot be closed properly"):
        self._stop()

  @contextlib.contextmanager
  def _naming(self, what: str, kept: list[SinkError] | None = None) -> Generator[None]:
    """Errors of the block become SinkErrors that begin with a place, which are raised or kept."""
    try:
      try:
        yield
      except Exception as error:
        if foreign.is_a(error, SinkError):
          raise
        raise self._error(f"{what}: {foreign.said_by(error)}") from error
    except SinkError as error:
      if kept is None:
        raise
      kept.append(error)


class FilesSink(LibrarySink):
  """A sink of a file, or of several that are opened as their first records come."""

  def __init__(
    self, path: StrPath, *, append: bool = False, **choice: Unpack[ChoiceOptions]
  ) -> None:
    label = f"sinks.{type(self).__name__}"
    super().__init__(resolved(options.path(label, "path", path)), **choice)
    self._append = options.boolean(label, "append", append)
    self._tables: dict[Any, Any] = {}  # the open ones, by path
    self._begun: dict[pathlib.Path, bool] = {}  # False where another sink had the file

  def _open_table(self, path: pathlib.Path, make: Callable[[bool], Any]) -> Any:
    """The open file of a path, by `make(keep)`; what another sink had once stays that one's."""
    if path in self._tables:
      return self._tables[path]
    if self._begun.get(path) is False:
      had = "which another sink wrote when the first record came; it is not begun anew"
      raise FileExistsError(f"expected a file that nobody else writes to, got '{path}', {had}")
    try:
      table = self._tables[path] = make(self._append or path in self._begun)
    except FileExistsError:
      if not self._append:
        self._begun.setdefault(path, False)
      raise
    self._begun[path] = True
    return table

  def _flush(self) -> None:
    for table in self._tables.values():
      table.flush()

  def _stop(self) -> None:
    tables, self._tables = self._tables, {}
    with contextlib.ExitStack() as ends:  # each in its turn, last first, whatever the others raise
      for table in tables.values():
        ends.callback(table.close)
        ends.callback(table.flush)


def plain(leaf: Any) -> np.ndarray:
  """A leaf in a dtype that NumPy has, exactly: bfloat16 as float32, int4 as int8, and so on."""
  array = np.asarray(leaf)
  if array.dtype.isbuiltin == 1 or array.dtype.kind in "SU":
    return array
  wider = {"int": np.int8, "uin": np.uint8}.get(array.dtype.name[:3], np.float32)
  with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
    return array.astype(wider)


def scalar(name: str, array: np.ndarray) -> np.ndarray:
  """The array of a column, which must be a scalar."""
  if array.ndim != 0:
    raise ValueError(f"expected scalars, got {name!r} of shape {array.shape}")
  return array


def lane_suffix(lane: tuple[int, ...]) -> str:
  """Returns what tells the lanes of a tap apart in names: "[2,0]"; nothing without `vmap`."""
  return f"[{','.join(map(str, lane))}]" if lane else ""


def file_for(path: str, name: str) -> pathlib.Path:
  """The file of a tap, whose name replaces "{name}" in the path; its folder is made."""
  part = re.sub(r'[/\\:*?"<>|\x00-\x1f]|^\.', "_", name)
  file = pathlib.Path(path.replace("{name}", part))  # without characters that no file's name has
  file.parent.mkdir(parents=True, exist_ok=True)
  return file
