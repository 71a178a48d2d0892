# SPDX-License-Identifier: Apache-2.0
"""Holds as data what `python -m callgate watch` shows: neither a server nor a browser.

A `Model` takes the records of streams and keeps curves, counts and the latest values in memory that
does not grow with their number. Feeds (`feed.py`) add from threads of their own, the page reads
from the server's: a lock makes each call whole.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from callgate._stream.records import StreamRecord
from callgate._watch.curves import Curve, Lanes, Rate, Source, Window

_PART = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")  # of a path in a pytree
_PATH = re.compile(rf"(?:{_PART.pattern})*")
_LATEST = 2048  # elements of an array's latest value that are kept, evenly spread


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
  """One leaf of one tap: what the page has a plot for."""

  name: str
  role: str
  path: str  # as in `StreamRecord.leaves`

  @property
  def leaf(self) -> str:
    """The path as people read it: "w/0" for "['w'][0]"; as it is where JAX does not write it so."""
    known = _PATH.fullmatch(self.path) is not None
    return "/".join(map("".join, _PART.findall(self.path))) if known else self.path

  @property
  def label(self) -> str:
    """The name and the leaf, and the role unless it is the usual one."""
    name = f"{self.name}/{self.leaf}" if self.path else self.name
    return f"{name} ({self.role})" if self.role != "primal" else name


class Totals(NamedTuple):
  """Counts over all streams."""

  records: int  # values that came, each lane of a vmap one
  missing: int  # numbers between a device's first and last that were dropped, or kept by `where`
  sessions: int  # writers that were read
  per_second: float  # of the last ten seconds of the streams' own time
  latest_ns: int


class Panel:
  """Holds what is known of one leaf."""

  def __init__(self, points: int) -> None:
    # By device.
    self.curves: dict[int, Curve] = collections.defaultdict(functools.partial(Curve, points))
    self.latest = np.zeros(0)  # the latest value, flat, at most _LATEST elements of it
    self.is_array = False  # whether a record held more than one number, all lanes taken together
    self.records = 0
    self.nonfinite = 0  # elements that were NaN or infinite, which curves leave out
    self.kind = ""  # of the latest value, as "float32[3, 4]"
    self.version = 0  # changes with each change
    self.rate = Rate()

  def extend(self, device: int, rows: np.ndarray[Any, Any]) -> None:
    """Adds a device's records: of each the place on both axes, the session and its `_summary`."""
    elements, finite = rows[-1], rows[-2]
    self.curves[device].extend(rows[:-1])
    repeats = bool((rows[0, 1:] == rows[0, :-1]).any())  # lanes of one record
    self.is_array = self.is_array or repeats or bool((elements != 1).any())
    self.records += rows.shape[1]
    self.nonfinite += int((elements - finite).sum())
    self.rate.add(rows[1])
    self.version += 1

  @property
  def last(self) -> float:
    """The last number, or the mean of the last array's finite elements; NaN before there is one."""
    finite = self.latest[np.isfinite(self.latest)]
    return float(finite.mean()) if finite.size else float("nan")


class Model:
  """Curves, counts and latest values of any number of streams."""

  def __init__(self, points: int = 1000) -> None:
    if points < 2:
      raise ValueError(f"callgate watch: expected 2 points a curve or more, got {points}")
    self._points = points  # of each curve, at most; the whole run and its recent part each
    self._lock = threading.Lock()
    self._panels: dict[Key, Panel] = {}
    self._sources: dict[int, Source] = {}
    self._lanes, self._rate = Lanes(), Rate()
    self._records = 0
    self._started_ns: int | None = None
    self._latest_ns = 0

  def begin_session(self, source: int = 0) -> None:
    """Notes that what follows in a stream comes from another writer: curves get a gap."""
    with self._lock:
      if source in self._sources:
        self._sources[source].is_new_session = True

  def add(self, records: Sequence[StreamRecord], source: int = 0) -> None:
    """Takes records in the order in which their stream has them."""
    if records:
      with self._lock:
        self._add(records, self._sources.setdefault(source, Source()))

  def _add(self, records: Sequence[StreamRecord], source: Source) -> None:
    self._started_ns = records[0].time_ns if self._started_ns is None else self._started_ns
    rows: dict[tuple[Key, int], list[tuple[float, ...]]] = {}
    arrays: dict[Key, np.ndarray[Any, Any]] = {}
    times: dict[int, list[float]] = {}
    for record in records:
      position = source.position(record)
      seconds = (record.time_ns - self._started_ns) * 1e-9
      times.setdefault(record.device, []).append(seconds)
      for path, array in record.leaves.items():
        key = Key(record.name, record.role, path)
        row = (position, seconds, source.session, *_summary(array))
        rows.setdefault((key, record.device), []).append(row)
        arrays[key] = array
    for (key, device), added in rows.items():
      panel = self._panels.setdefault(key, Panel(self._points))
      panel.extend(device, np.array(added, np.float64).T)
    for key, array in arrays.items():
      flat, panel = as_float(array).reshape(-1), self._panels[key]
      kept = np.linspace(0, flat.size - 1, _LATEST).round().astype(np.int64)
      panel.latest = flat if flat.size <= _LATEST else flat[kept]
      panel.kind = f"{array.dtype}{list(array.shape)}"
    for device, seconds in times.items():
      self._lanes.add(device, np.asarray(seconds))
    self._rate.add(np.concatenate([*map(np.asarray, times.values())]))
    self._records += len(records)
    self._latest_ns = max(self._latest_ns, *(record.time_ns for record in records))

  # -- what the page shows -----------------------------------------------------------------------
  def versions(self) -> dict[Key, int]:
    """The leaves that there are, in the order in which they came, with what changes with them."""
    with self._lock:
      return {key: panel.version for key, panel in self._panels.items()}

  def curves(self, key: Key, window: Window) -> dict[int, dict[str, np.ndarray[Any, Any]]]:
    return self.ask(key, lambda p: {i: c.columns(window) for i, c in sorted(p.curves.items())})

  def ask(self, key: Key, question: Callable[[Panel], Any]) -> Any:
    """Returns what a function says of a leaf's panel, which it sees whole."""
    with self._lock:
      return question(self._panels[key])

  def lanes(self) -> tuple[float, dict[int, np.ndarray[Any, Any]]]:
    """Seconds a bucket, and for each device the records in each bucket from the first record on."""
    with self._lock:
      return self._lanes.width, self._lanes.counts()

  def totals(self) -> Totals:
    with self._lock:
      missing = sum(source.missing for source in self._sources.values())
      sessions = sum(source.session + 1 for source in self._sources.values())
      return Totals(self._records, missing, sessions, self._rate.value, self._latest_ns)

  def table(self) -> dict[str, list[Any]]:
    """Columns with a row for each leaf: what the page's table shows."""
    with self._lock:
      panels = self._panels.items()
      return {name: [show(*panel) for panel in panels] for name, (_, show) in COLUMNS.items()}


# Of the table: the title, and what it has of a leaf.
COLUMNS: dict[str, tuple[str, Callable[[Key, Panel], Any]]] = {
  "tap": ("tap", lambda key, panel: key.name),
  "leaf": ("leaf", lambda key, panel: key.leaf),
  "role": ("role", lambda key, panel: key.role),
  "kind": ("latest value's type", lambda key, panel: panel.kind),
  "devices": ("devices", lambda key, panel: ", ".join(map(str, sorted(panel.curves)))),
  "records": ("records", lambda key, panel: panel.records),
  "per_second": ("records/s", lambda key, panel: round(panel.rate.value, 1)),
  "last": ("last value or mean", lambda key, panel: f"{panel.last:.6g}"),
  "nonfinite": ("NaN, inf", lambda key, panel: panel.nonfinite),
}


def as_float(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
  """The array as float64; complex numbers by their absolute value."""
  return (np.abs(array) if array.dtype.kind == "c" else array).astype(np.float64)


def _summary(array: np.ndarray[Any, Any]) -> tuple[float, float, float, int, int]:
  """Least, greatest and sum of the finite elements, how many these are, and how many there are."""
  if array.ndim == 0:
    value = abs(complex(array)) if array.dtype.kind == "c" else float(array)
    finite = abs(value) < np.inf
    return (value, value, value, 1, 1) if finite else (np.nan, np.nan, 0.0, 0, 1)
  values = as_float(array)
  kept = values[np.isfinite(values)]
  if not kept.size:
    return np.nan, np.nan, 0.0, 0, array.size
  return float(kept.min()), float(kept.max()), float(kept.sum()), kept.size, array.size
