# SPDX-License-Identifier: Apache-2.0
"""Sinks of text: readable lines, and CSV tables of scalars."""

from __future__ import annotations

import csv
import datetime
import functools
import io
import json
import pathlib
import re
import string
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO, Unpack

import jax
import numpy as np

from callgate import _callgate
from callgate._core import options, signatures
from callgate._core.errors import GateDefinitionError
from callgate._tap.records import Record, columns, named_leaves, parts_of, tap_key
from callgate.sinks import _base
from callgate.sinks._base import ChoiceOptions, FilesSink, LibrarySink, SinkError, StrPath


class Print(LibrarySink):
  """Prints each record.

  Args:
    file: an open text file, which stays open. Default: `sys.stdout` at the time of printing.
    format: a function from the `Record` to text, or a format string with the fields `value`,
      `name`, `seq`, `time` (a `datetime`), `time_ns`, `process`, `device`, `run`, `lane`, `role`
      and `repeated`, such as "{name} {value:.3f}". Default: lines such as "loss #3: 0.25".
  """

  def __init__(
    self,
    file: TextIO | None = None,
    format: str | Callable[[Record], str] | None = None,
    **choice: Unpack[ChoiceOptions],
  ) -> None:
    options.or_none(options.writable, "sinks.Print", "file", file)
    super().__init__(str(getattr(file, "name", "")) if file is not None else "stdout", **choice)
    self._file = file
    signatures.refuse_unrun("sinks.Print: format: expected a function", format)
    self._shown: Callable[[Record], str] = format if callable(format) else _line
    if format is not None and not callable(format):
      _check_format(options.text("sinks.Print", "format", format))
      self._shown = lambda record: format.format(**_fields(record))
    self._lines: list[str] = []

  def _take(self, record: Record) -> None:
    self._lines.append(self._shown(record) + "\n")

  def _commit(self) -> None:
    lines, self._lines = self._lines, []
    errors: list[UnicodeEncodeError] = []
    try:
      self._out().write("".join(lines))
    except UnicodeEncodeError:  # one record can't be encoded: print the others
      for line in lines:
        try:
          self._out().write(line)
        except UnicodeEncodeError as error:
          errors.append(error)
    if errors:
      raise self._error(f"cannot print: {errors[0]}", lost=len(errors)) from errors[0]

  def _flush(self) -> None:
    getattr(self._out(), "flush", lambda: None)()

  def _stop(self) -> None:
    if not getattr(self._out(), "closed", False):  # its owner may have closed it
      self._flush()

  def _out(self) -> TextIO:
    return sys.stdout if self._file is None else self._file


_FIELDS = frozenset(
  "value time name seq time_ns process device run lane role repeated".split()  # noqa: SIM905
)


def _check_format(text: str) -> None:
  """Raises for a text that `str.format` can't read, or that has other fields."""
  try:
    for _, field, spec, _ in string.Formatter().parse(text):
      if field is not None and re.split(r"[.\[]", field)[0] not in _FIELDS:
        raise ValueError(f"a field '{field}'; expected one of {', '.join(sorted(_FIELDS))}")
      _check_format(spec or "")
  except ValueError as error:
    expected = f"expected text for str.format, got {text!r}: {error}"
    raise GateDefinitionError(f"sinks.Print: format: {expected}") from error


def _line(record: Record) -> str:
  info, leaves = record.info, named_leaves(record.value)
  texts = [f"{path}={_value(leaf)!s}" if path else str(_value(leaf)) for path, leaf in leaves]
  between = "\n" if any("\n" in text for text in texts) else " "
  return between.join([f"{tap_key(info)}{_base.lane_suffix(info.lane)} #{info.seq}:", *texts])


def _value(leaf: Any) -> Any:
  array = np.asarray(leaf)
  return array[()] if array.ndim == 0 else array  # a 0-d array takes no format


def _fields(record: Record) -> dict[str, Any]:
  named = {name: getattr(record.info, name) for name in _FIELDS - {"value", "time"}}
  time = datetime.datetime.fromtimestamp(record.info.time_ns * 1e-9)
  return {**named, "time": time, "value": jax.tree.map(_value, record.value)}


class CSV(FilesSink):
  """Writes a table of scalars: `seq`, `time_ns`, `device`, `lane`, then a column for each leaf.

  In a program over several devices `run`, `process`, `global_shape` and `shard` come before the
  leaves, the last two as JSON. An older file without these columns is continued without them.

  The first record defines the header. A record with another column raises an error; a missing
  column leaves its cell empty.

  Args:
    path: the file. With "{name}" in it, each tap has a file of its own. Folders are made.
    append: continues existing files with their headers, and removes an incomplete last line. Only
      one process at a time may write to a file.
    columns: the names of the columns, for one table of several taps (`callgate.sinks.columns`).
  """

  def __init__(
    self,
    path: StrPath,
    *,
    append: bool = False,
    columns: Sequence[str] | None = None,
    **choice: Unpack[ChoiceOptions],
  ) -> None:
    super().__init__(path, append=append, **choice)
    self._columns = options.or_none(options.strings, "sinks.CSV", "columns", columns) or ()
    if len(set(self._columns)) < len(self._columns):
      options.refuse("sinks.CSV", "columns", "a name once", columns)

  def _start(self) -> None:
    if "{name}" not in self._target:
      self._table("")  # a path that can't be written raises an error now

  def _table(self, tap: str) -> _CSVFile:
    file = _base.file_for(self._target, tap)
    return self._open_table(file, functools.partial(_CSVFile, file))

  def _take(self, record: Record) -> None:
    info = record.info
    found = {name: _base.plain(leaf) for name, leaf in columns(record).items()}
    row = {name: str(_base.scalar(name, array)[()]) for name, array in found.items()}
    for text in (*row, *row.values()):
      text.encode()  # a record that the file can't hold must not take others along
    lane = ";".join(map(str, info.lane))
    meta = {"seq": info.seq, "time_ns": info.time_ns, "device": info.device, "lane": lane}
    table = self._table(tap_key(info))
    meta |= {k: x for k, x in _of_shard(record).items() if not table.header or k in table.header}
    table.header = table.header or [*meta, *(self._columns or row)]
    if (new := next((name for name in row if name not in table.header), None)) is not None:
      known = f"the columns {', '.join(table.header)} of {str(table.path)!r}"
      advice = 'pass all names as columns=, or put "{name}" in the path for a file for each tap'
      raise ValueError(f"expected {known}, got {new!r}; {advice}")
    table.rows.append(meta | row)

  def _commit(self) -> None:
    self._flush()


def _of_shard(record: Record) -> dict[str, Any]:
  """Returns the columns for a shard's record; the parts are JSON, an object if there are leaves."""
  if not (parts := parts_of(record)):
    return {}
  info, paths = record.info, [path for path, _ in named_leaves(record.value)]
  shapes = [list(shape) for _, shape in parts]
  shards = [[[s.start, s.stop] for s in part] for part, _ in parts]
  text = {
    name: json.dumps(each[0] if paths == [""] else dict(zip(paths, each, strict=True)))
    for name, each in (("global_shape", shapes), ("shard", shards))
  }
  return {"run": info.run, "process": info.process, **text}


class _CSVFile:
  """An open CSV file, and the rows that aren't in it yet."""

  def __init__(self, path: pathlib.Path, keep: bool) -> None:
    self.path = path
    self._file = _callgate.LineFile("CSV", str(path), keep)
    line = self._file.first_line().decode("utf-8")
    self.header: list[str] = next(csv.reader([line]), []) if line else []
    self._heads = not self.header  # the header is still to be written
    self.rows: list[dict[str, Any]] = []

  def flush(self) -> None:
    """Writes the rows as far as there is room; the error counts the others, which are lost."""
    rows, self.rows = self.rows, []
    if not rows and not (self._heads and self.header):
      return
    text = io.StringIO()
    writer = csv.DictWriter(text, self.header, lineterminator="\n")
    if heads := self._heads:
      writer.writeheader()
    writer.writerows(rows)
    written, problem = self._file.append(text.getvalue())
    self._heads = heads and written == 0
    if self._heads:  # the next records bring the header again
      self.header = []
    if problem:
      raise SinkError(problem, lost=len(rows) - max(0, written - heads))

  def close(self) -> None:
    self._file.close()
