# SPDX-License-Identifier: Apache-2.0
"""The data that `python -m callgate watch` shows, without a server or a browser.

A `Model` takes the records of streams, and keeps curves, counts and the latest values in bounded
memory. Followers (`feed.py`) add records on their own threads, and the server's threads read. A
lock makes each call atomic.
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
from callgate._watch.curves import (
  Curve,
  Distributions,
  Rate,
  RecordCounts,
  Span,
  StreamSource,
  Window,
  as_float,
)
from callgate._watch.images import Image, image_of
from callgate._watch.media import Media, kind_of, leaves_of

_PART = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")  # a part of a path in a pytree
_PATH = re.compile(rf"(?:{_PART.pattern})*")
_LATEST = 2048  # the most elements of an array's latest value, evenly selected
_RECENT = 1000  # points of a curve's end
_LANES = 16  # the most lanes with curves of their own
_SHARDS = 4096
_Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
  """One leaf of one tap: the page has a plot for each."""

  name: str
  role: str
  path: str  # as in `StreamRecord.leaves`

  @property
  def leaf(self) -> str:
    """The readable path: "w/0" for "['w'][0]"; unchanged if JAX doesn't write paths so."""
    known = _PATH.fullmatch(self.path) is not None
    return "/".join(map("".join, _PART.findall(self.path))) if known else self.path

  @property
  def label(self) -> str:
    """The name and the leaf, and the role unless it is "primal"."""
    name = f"{self.name}/{self.leaf}" if self.path else self.name
    return f"{name} ({self.role})" if self.role != "primal" else name


class Totals(NamedTuple):
  """Counts over all streams."""

  records: int  # values; each lane of a vmap counts
  missing: int  # numbers without a record: dropped, or left out by a sink's options
  sessions: int  # the number of writers
  per_second: float  # over the last ten seconds of the streams' own time
  latest_ns: int


class Series(NamedTuple):
  """Identifies a curve: a stream, a device, and one lane or all."""

  source: int
  device: int
  lane: int | None = None


class Panel:
  """The data of one leaf."""

  def __init__(self, points: int) -> None:
    recent = min(points, _RECENT)
    self.curves: dict[Series, Curve] = collections.defaultdict(
      functools.partial(Curve, points, recent)
    )
    # Curves of the first lanes only, with fewer points.
    self.lane_curves: dict[Series, Curve] = collections.defaultdict(
      functools.partial(Curve, max(2, points // 8), recent)
    )
    self.distributions: dict[int, Distributions] = collections.defaultdict(Distributions)
    self.media: dict[int, Media] = collections.defaultdict(Media)  # by stream
    self.latest = np.zeros(0)  # the latest value, flat, at most _LATEST elements
    self.image: Image | None = None  # the latest value as a picture, if possible
    self.is_array = False  # True if a record had more than one number, over all lanes
    self.lanes = 0  # the number of lanes, at least
    self.shards: set[Any] = set()  # at most _SHARDS of the shards
    self.records = 0
    self.nonfinite = 0  # the number of NaN and infinite elements, which curves leave out
    self.kind = ""  # the latest value's type, such as "float32[3, 4]"
    self.version = 0  # changes with each change
    self.rate = Rate()

  def extend(self, series: Series, rows: _Array, lanes: _Array) -> None:
    """Adds records: their places on both axes, session and `_summary`, and their lanes."""
    elements, finite = rows[-1], rows[-2]
    self.curves[series].extend(rows[:-1])
    repeats = bool((rows[0, 1:] == rows[0, :-1]).any())  # lanes of one record
    self.is_array = self.is_array or repeats or bool((elements != 1).any())
    self.lanes = max(self.lanes, int(lanes.max()) + 1)
    for lane in range(min(self.lanes, _LANES)) if self.lanes > 1 else ():
      own = rows[:-1, lanes == lane]
      if own.size:
        self.lane_curves[series._replace(lane=lane)].extend(own)
    self.records += rows.shape[1]
    self.nonfinite += int((elements - finite).sum())
    self.rate.add(rows[1])
    self.version += 1

  def show(self, array: _Array) -> None:
    """Stores the latest value."""
    flat = as_float(array).reshape(-1)
    kept = np.linspace(0, flat.size - 1, _LATEST).round().astype(np.int64)
    self.latest = flat if flat.size <= _LATEST else flat[kept]
    self.image = image_of(array)
    self.kind = f"{array.dtype}{list(array.shape)}"

  @property
  def last(self) -> float:
    """The last number, or the mean of the last array's finite elements; NaN before the first."""
    finite = self.latest[np.isfinite(self.latest)]
    return float(finite.mean()) if finite.size else float("nan")


class Model:
  """Curves, counts and latest values of any number of streams.

  Args:
    points: the most points of each curve.
    runs: the names of streams, by number; other streams have their number.
  """

  def __init__(self, points: int = 16_000, runs: Sequence[str] = ()) -> None:
    if points < 2:
      raise ValueError(f"callgate watch: points: expected at least 2 for each curve, got {points}")
    self._points = points
    self._runs = dict(enumerate(runs))
    self._lock = threading.Lock()
    self._panels: dict[Key, Panel] = {}
    self._sources: dict[int, StreamSource] = {}
    self._lanes, self._rate = RecordCounts(), Rate()
    self._records = 0
    self._latest_ns = 0

  def add_run(self, name: str, started_ns: int | None = None) -> int:
    """Adds a stream; returns its number. Seconds count from `started_ns` or its first record."""
    with self._lock:
      number = len(self._runs)
      self._runs[number] = name
      self._sources[number] = StreamSource(started_ns)
      return number

  def run(self, source: int) -> str:
    """Returns the name of a stream."""
    return self._runs.get(source, f"run {source}")

  def begin_session(self, source: int = 0) -> None:
    """Marks that the next records come from another writer: curves get a gap."""
    with self._lock:
      if source in self._sources:
        self._sources[source].is_new_session = True

  def add(self, records: Sequence[StreamRecord], source: int = 0) -> None:
    """Adds records in the order of their stream."""
    if records:
      with self._lock:
        self._add(records, source, self._sources.setdefault(source, StreamSource()))

  def _add(self, records: Sequence[StreamRecord], number: int, source: StreamSource) -> None:
    if source.started_ns is None:
      source.started_ns = records[0].time_ns
    rows: dict[tuple[Key, int], list[tuple[float, ...]]] = {}
    lanes: dict[tuple[Key, int], list[int]] = {}
    arrays: dict[Key, np.ndarray[Any, Any]] = {}
    shards: dict[Key, set[Any]] = {}
    times: dict[int, list[float]] = {}
    for record in records:
      position = source.position(record)
      seconds = (record.time_ns - source.started_ns) * 1e-9
      times.setdefault(record.device, []).append(seconds)
      kind = kind_of(record)
      for path, array in leaves_of(record, kind).items():
        key = Key(record.name, record.role, path)
        panel = self._panel(key)
        row = (position, seconds, source.session, *_summary(array))
        rows.setdefault((key, record.device), []).append(row)
        lanes.setdefault((key, record.device), []).append(record.lane)
        arrays[key] = array
        if kind is not None:
          panel.media[number].add(position, seconds, record.lane, kind, array)
        elif array.size > 1:
          panel.distributions[number].add(position, seconds, array)
        if record.shard is not None:
          part = tuple((one.start, one.stop) for one in record.shard.get(path, ()))
          shards.setdefault(key, set()).add(part)
    for (key, device), added in rows.items():
      series = Series(number, device)
      table = np.array(added, np.float64).T
      self._panels[key].extend(series, table, np.array(lanes[key, device]))
    for key, array in arrays.items():
      self._panels[key].show(array)
    for key, seen in shards.items():
      held = self._panels[key].shards
      held |= set(list(seen)[: _SHARDS - len(held)])
    for device, seconds in times.items():
      self._lanes.add(device, np.asarray(seconds))
    self._rate.add(np.concatenate([*map(np.asarray, times.values())]))
    self._records += len(records)
    self._latest_ns = max(self._latest_ns, *(record.time_ns for record in records))

  def _panel(self, key: Key) -> Panel:
    if key not in self._panels:
      self._panels[key] = Panel(self._points)
    return self._panels[key]

  # -- for the page ------------------------------------------------------------------------------
  def versions(self) -> dict[Key, int]:
    """Returns the leaves, in the order in which they came, with their versions."""
    with self._lock:
      return {key: panel.version for key, panel in self._panels.items()}

  def curves(
    self, key: Key, window: Window = "whole", span: Span | None = None, most: int | None = None,
    *, by_lane: bool = False,
  ) -> dict[Series, dict[str, _Array]]:  # fmt: skip
    """Returns the curves of a leaf, each as from `Curve.columns`; with `by_lane` those of lanes."""

    def columns(panel: Panel) -> dict[Series, dict[str, _Array]]:
      curves = panel.lane_curves if by_lane else panel.curves
      return {one: curves[one].columns(window, span, most) for one in sorted(curves)}

    return self.ask(key, columns)

  def ask(self, key: Key, question: Callable[[Panel], Any]) -> Any:
    """Calls a function with a leaf's panel, under the lock, and returns the result."""
    with self._lock:
      return question(self._panels[key])

  def lanes(self) -> tuple[float, dict[int, np.ndarray[Any, Any]]]:
    """Returns the seconds in a bucket, and for each device the records in each bucket."""
    with self._lock:
      return self._lanes.width, self._lanes.counts()

  def totals(self) -> Totals:
    with self._lock:
      missing = sum(source.missing for source in self._sources.values())
      sessions = sum(source.session + 1 for source in self._sources.values())
      return Totals(self._records, missing, sessions, self._rate.value, self._latest_ns)

  def table(self) -> dict[str, list[Any]]:
    """Returns columns with a row for each leaf: the page's table."""
    with self._lock:
      panels = self._panels.items()
      return {name: [show(*panel) for panel in panels] for name, (_, show) in COLUMNS.items()}


# The table's columns: the title, and its text for a leaf.
COLUMNS: dict[str, tuple[str, Callable[[Key, Panel], Any]]] = {
  "tap": ("tap", lambda key, panel: key.name),
  "leaf": ("leaf", lambda key, panel: key.leaf),
  "role": ("role", lambda key, panel: key.role),
  "kind": ("latest value's type", lambda key, panel: panel.kind),
  "devices": (
    "devices", lambda key, panel: ", ".join(map(str, sorted({one.device for one in panel.curves})))
  ),
  "lanes": ("lanes", lambda key, panel: panel.lanes if panel.lanes > 1 else 0),
  "shards": ("shards", lambda key, panel: len(panel.shards)),
  "records": ("records", lambda key, panel: panel.records),
  "per_second": ("records/s", lambda key, panel: round(panel.rate.value, 1)),
  "last": ("last value or mean", lambda key, panel: f"{panel.last:.6g}"),
  "nonfinite": ("NaN, inf", lambda key, panel: panel.nonfinite),
}  # fmt: skip


def _summary(array: np.ndarray[Any, Any]) -> tuple[float, float, float, int, int]:
  """Returns least, greatest and sum of the finite elements, their number, and the number of all."""
  if array.ndim == 0:
    value = abs(complex(array)) if array.dtype.kind == "c" else float(array)
    finite = abs(value) < np.inf
    return (value, value, value, 1, 1) if finite else (np.nan, np.nan, 0.0, 0, 1)
  values = as_float(array)
  kept = values[np.isfinite(values)]
  if not kept.size:
    return np.nan, np.nan, 0.0, 0, array.size
  return float(kept.min()), float(kept.max()), float(kept.sum()), kept.size, array.size
