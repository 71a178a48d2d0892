# SPDX-License-Identifier: Apache-2.0
"""`python -m callgate tail`: the records of a stream as lines of text or JSON."""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from callgate._core.terminal import Command, integer, printable
from callgate._stream.reader import is_address, open_stream
from callgate._stream.records import StreamRecord


def command(name: str, parser: argparse.ArgumentParser) -> Command:
  """Adds `tail`, which prints the last records of a stream, and later ones with `-f`."""
  del name
  add = parser.add_argument
  add("where", metavar="PATH_OR_ADDRESS", nargs="+",
      help="a file, a glob pattern, unix:PATH or tcp://HOST:PORT")  # fmt: skip
  add("-n", "--lines", type=integer("a number of records", most=sys.maxsize), default=10,
      metavar="N", help="the number of last records to print from files (default: 10)")  # fmt: skip
  add("-f", "--follow", action="store_true",
      help="print new records until the writer closes the stream")  # fmt: skip
  add("--name", help="print only the records of this tap")
  add("--json", action="store_true", help="print one JSON object per line")
  return _tail


def _tail(arguments: argparse.Namespace) -> int:
  show = json_line if arguments.json else text_line
  is_live = any(map(is_address, arguments.where))

  def print_all(records: Iterable[StreamRecord]) -> None:
    for record in records:
      print(printable(show(record)), flush=True)

  def wanted(records: Iterable[StreamRecord]) -> Iterable[StreamRecord]:
    return (record for record in records if arguments.name in (None, record.name))

  with open_stream(arguments.where, follow=arguments.follow) as stream:
    if not is_live:  # shows all of a connection: records sent earlier are gone
      last: collections.deque[StreamRecord] = collections.deque(maxlen=arguments.lines)
      try:
        last.extend(wanted(iter(stream.read, None)))  # the records that are there now
      finally:  # also the records before a damaged place
        print_all(last)
    if is_live or arguments.follow:
      print_all(wanted(stream))
  return 0


def text_line(record: StreamRecord) -> str:
  """Returns one readable line: time, device, name, number, flags, values."""
  moment = datetime.datetime.fromtimestamp(record.time_ns // 10**9)
  clock = f"{moment:%H:%M:%S}.{record.time_ns % 10**9 // 10**6:03d}"
  process = f" process {record.process}" if record.process else ""
  lane = f"[{record.lane}]" if record.lane else ""
  where = f"{clock}{process} device {record.device} {record.name}{lane} #{record.seq}"
  role = f" ({record.role})" if record.role != "primal" else ""
  leaves = record.leaves.items()
  values = "  ".join(f"{path}={_short(array)}" if path else _short(array) for path, array in leaves)
  return f"{where}{role}{' (repeated)' if record.repeated else ''} {values}".rstrip()


def _short(array: np.ndarray[Any, Any]) -> str:
  if array.size <= 8:
    return np.array2string(array, separator=", ", max_line_width=1000).replace("\n", "")
  kind = f"{array.dtype}{list(array.shape)}"
  if array.dtype.kind not in "biuf":
    return kind
  return f"{kind} min {array.min():.6g} mean {array.mean():.6g} max {array.max():.6g}"


def json_line(record: StreamRecord) -> str:
  """Returns one JSON object: the record's fields, its arrays as (nested lists of) numbers."""
  names = ("name", "seq", "time_ns", "process", "device", "run", "role", "lane", "repeated")
  leaves = {path: _plain(array) for path, array in record.leaves.items()}
  return json.dumps({**{name: getattr(record, name) for name in names}, "leaves": leaves})


def _plain(array: np.ndarray[Any, Any]) -> Any:
  """Converts to JSON's numbers: complex ones to [real, imaginary], others by way of float64."""
  if array.dtype.kind == "c":
    return np.stack([array.real, array.imag], axis=-1).tolist()
  return (array if array.dtype.kind in "biuf" else array.astype(np.float64)).tolist()
