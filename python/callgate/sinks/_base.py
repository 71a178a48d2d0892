# SPDX-License-Identifier: Apache-2.0
"""The interface of sinks, and what sinks over libraries share: state, errors, lazy imports."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from callgate._core import extras, foreign, options, signatures, spellings
from callgate._core.errors import SinkError, set_lost
from callgate._core.opened import resolved
from callgate._process import group
from callgate._tap.consumers import Choice
from callgate._tap.records import Record, TapInfo

StrPath = str | os.PathLike[str]


class ChoiceOptions(TypedDict, total=False):
  """The options of `Sink`, which every sink takes and passes on."""

  every: int | None
  rate: float | None
  where: Callable[[Record], Any] | None


class Sink:
  """The base class of sinks: a consumer that a channel opens, writes to, flushes and closes.

  Subclass it and override `write`, which the channel calls on its own thread; the other methods do
  nothing by default. Without a channel, `with sink:` opens and closes the sink.

  Every sink takes these options, which choose among a channel's records. They don't apply to your
  own calls of `write`.

  Args:
    every: takes each n-th record of each tap on each device. The lanes of a `vmap` count as one.
    rate: of the records that `every` takes, takes at most this number a second, by the times at
      which they were sent.
    where: of the records that `every` and `rate` take, takes those for which `where(record)` is
      True; each lane is a record. It is a Python function on the channel's thread, for native sinks
      too.
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
    for name in unknown:  # passed on by a subclass
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
    """Opens the sink before the first records, and again after `close`; `channel` is a name."""

  def write(self, records: Sequence[Record]) -> None:
    """Writes records, in the order of the channel; a `vmap` sends one for each lane."""
    raise NotImplementedError(f"{type(self).__name__}.write")

  def flush(self) -> None:
    """Makes the written records visible to other readers."""

  def close(self) -> None:
    """Writes everything out and releases resources, also after an error. It may be called again."""

  def __enter__(self) -> Sink:
    self.open("")
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"{type(self).__name__}()"


def _options(kind: type[Sink]) -> list[str]:
  """Returns the names of all options of a sink."""
  inits = [signatures.read(base.__init__) for base in kind.__mro__ if issubclass(base, Sink)]
  return [name for init in inits for name in init.parameters]


class OwnedSink(Sink):
  """A sink that only one channel of one process may have open at a time."""

  def __init__(self, target: str, **choice: Unpack[ChoiceOptions]) -> None:
    super().__init__(**choice)
    self._target = target  # shown by repr; mostly a path
    self._channel: str | None = None  # the channel that has it open
    self._process = os.getpid()  # the process that has opened it

  def _begin(self) -> None: ...  # excludes other writers

  def __repr__(self) -> str:
    return f"{type(self).__name__}({repr(self._target) if self._target else ''})"

  def _error(self, what: str, *, lost: int = 0) -> SinkError:
    return SinkError(f"callgate.sinks.{self!r}: {what}", lost=lost)

  def open(self, channel: str) -> None:
    if self._channel is not None:
      one = (
        f"expected one channel for a sink, got {channel!r} while {self._channel!r} has it "
        "open; make a sink for each channel"
      )
      raise self._error(one)
    self._begin()
    self._channel = channel

  def _check(self, records: Sequence[Any]) -> None:
    """Raises SinkError in a fork's child of the opening process, and unless all are records."""
    if (here := os.getpid()) != self._process:
      by = f"expected writes by process {self._process}, which opened the sink"
      raise self._error(f"{by}, got process {here}, which was forked from it")
    for record in records:
      if not isinstance(record, Record) or not isinstance(record.info, TapInfo):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise self._error(f"expected records, each a Record(value, TapInfo(...)), got {record!r}")


class LibrarySink(OwnedSink):
  """A sink with a state: subclasses implement start, one record, write out and stop.

  "{process}" in the target becomes this process's index when the sink is opened. If a record can't
  be written, the sink writes the others of its batch and then raises the first error.
  """

  _extra = ""  # the extra of callgate that installs the modules
  _needs: tuple[str, ...] = ()  # modules; `_module` is the last
  _module: Any
  _lost = 0  # the number of lost records

  def __init__(self, target: str, **choice: Unpack[ChoiceOptions]) -> None:
    super().__init__(target, **choice)
    for module in self._needs:
      by, title = f"callgate.sinks.{type(self).__name__}", module.partition(".")[0]
      self._module = extras.library(module, title, self._extra, by=by, error=ImportError)

  def _start(self) -> None: ...  # opens files; continues those that this sink wrote to before
  # Writes a record, or raises and writes nothing of it.
  def _take(self, record: Record) -> None: ...
  def _commit(self) -> None: ...  # called after each batch
  def _flush(self) -> None: ...  # makes everything visible
  def _stop(self) -> None: ...  # writes out and releases, also if writing fails

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
      set_lost(errors[0], lost, self._lost)
      raise errors[0]

  def flush(self) -> None:
    if self._channel is not None and os.getpid() == self._process:
      with self._naming("cannot flush"):
        self._flush()

  def close(self) -> None:
    opened, self._channel = self._channel, None
    # In a fork's child the parent has it open.
    if opened is not None and os.getpid() == self._process:
      with self._naming("cannot be closed properly"):
        self._stop()

  @contextlib.contextmanager
  def _naming(self, what: str, kept: list[SinkError] | None = None) -> Generator[None]:
    """Turns errors of the block into SinkErrors that begin with a place; raises or keeps them."""
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
  """A sink of one file, or of several that it opens when their first records arrive."""

  def __init__(
    self, path: StrPath, *, append: bool = False, **choice: Unpack[ChoiceOptions]
  ) -> None:
    label = f"sinks.{type(self).__name__}"
    super().__init__(resolved(options.path(label, "path", path)), **choice)
    self._append = options.boolean(label, "append", append)
    self._tables: dict[Any, Any] = {}  # the open files, by path
    self._begun: dict[pathlib.Path, bool] = {}  # False if another sink had the file

  def _open_table(self, path: pathlib.Path, make: Callable[[bool], Any]) -> Any:
    """Returns the open file of a path, made by `make(keep)`; refuses another sink's path."""
    if path in self._tables:
      return self._tables[path]
    if self._begun.get(path) is False:
      had = "which another sink wrote when the first record came; use one file for each sink"
      raise FileExistsError(f"expected a file without another writer, got '{path}', {had}")
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
    # Closes each file, the last one first, even if others raise.
    with contextlib.ExitStack() as ends:
      for table in tables.values():
        ends.callback(table.close)
        ends.callback(table.flush)


def plain(leaf: Any) -> np.ndarray:
  """Converts a leaf exactly to a dtype of NumPy's own: bfloat16 to float32, int4 to int8, ..."""
  array = np.asarray(leaf)
  if array.dtype.isbuiltin == 1 or array.dtype.kind in "SU":
    return array
  wider = {"int": np.int8, "uin": np.uint8}.get(array.dtype.name[:3], np.float32)
  with np.errstate(invalid="ignore"):  # signaling NaNs become quiet ones
    return array.astype(wider)


def scalar(name: str, array: np.ndarray) -> np.ndarray:
  """Returns the array of a column, which must be a scalar."""
  if array.ndim != 0:
    raise ValueError(f"expected scalars, got {name!r} of shape {array.shape}")
  return array


def lane_suffix(lane: tuple[int, ...]) -> str:
  """Returns a suffix for the names of a tap's lanes, such as "[2,0]"; empty without `vmap`."""
  return f"[{','.join(map(str, lane))}]" if lane else ""


def file_for(path: str, name: str) -> pathlib.Path:
  """Replaces "{name}" in the path by the tap's name, and makes the folder."""
  part = re.sub(r'[/\\:*?"<>|\x00-\x1f]|^\.', "_", name)
  file = pathlib.Path(path.replace("{name}", part))  # without characters that no file name may have
  file.parent.mkdir(parents=True, exist_ok=True)
  return file
