# SPDX-License-Identifier: Apache-2.0
"""Curves over time in bounded memory, the record axis of streams, and rates of records.

Plain data, used under the model's lock.
"""

from __future__ import annotations

import collections
from typing import Any, Literal

import numpy as np

from callgate._stream.records import StreamRecord

Window = Literal["whole", "recent"]
Axis = Literal["record", "seconds"]
Span = tuple[Axis, float, float]
_Array = np.ndarray[Any, Any]
# Rows of the matrices here. A column is a point: its position on the record axis, and the minimum,
# maximum, sum and number of the finite elements of its records.
_X, _SECONDS, _SESSION, _LOW, _HIGH, _SUM, _COUNT, _BUCKET = range(8)


def as_float(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
  """Returns the array as float64; the absolute value of complex numbers."""
  return (np.abs(array) if array.dtype.kind == "c" else array).astype(np.float64)


class Curve:
  """A curve of minimum, mean and maximum: a coarse one of all records, and a fine one of the last.

  Args:
    points: the most points of the whole curve.
    recent: the most points of its end. Default: as many.
  """

  def __init__(self, points: int, recent: int | None = None) -> None:
    self._limit, self._tail = points, recent or points
    self._stride = 1  # records in a point of the whole curve
    self._records = 0
    self._last_x = -1.0
    self._whole, self._recent = _Points(), _Points()

  def extend(self, rows: _Array) -> None:
    """Adds points, f64[7, n], at the right end; points of one position (lanes) are merged."""
    steps = np.diff(rows[_X], prepend=self._last_x) != 0
    index = self._records - 1 + np.cumsum(steps)
    self._records = int(index[-1]) + 1
    self._last_x = float(rows[_X, -1])
    self._recent.append(np.vstack([rows, index]))
    if self._recent.size > 2 * self._tail:  # not each time, since it copies everything
      self._recent.hold(self._recent.all()[:, -self._tail :])
    self._whole.append(np.vstack([rows, index // self._stride]))
    while self._whole.size > self._limit and self._stride <= self._records:
      self._stride *= 2
      points = self._whole.all()
      points[_BUCKET] //= 2
      self._whole.hold(_merge(points))

  def columns(
    self, window: Window, span: Span | None = None, most: int | None = None
  ) -> dict[str, _Array]:
    """Returns the points as `record`, `seconds`, `low`, `mean`, `high`; NaN between sessions.

    Args:
      window: "whole" or "recent".
      span: an axis, and a range on it; None for all points.
      most: the most points; neighbors are merged beyond that. None for all stored points.
    """
    points = self._whole.all() if window == "whole" else self._recent.all()[:, -self._tail :]
    if span is not None:
      axis, low, high = span
      x = points[_X if axis == "record" else _SECONDS]
      inside = np.flatnonzero((x >= low) & (x <= high))
      if inside.size:  # with one point beyond each end, so that the curve reaches the edge
        points = points[:, max(0, inside[0] - 1) : inside[-1] + 2]
      else:
        points = points[:, :0]
    if most is not None and points.shape[1] > most:
      points = points.copy()
      points[_BUCKET] = np.arange(points.shape[1]) // -(-points.shape[1] // most)
      points = _merge(points)
    gaps = np.flatnonzero(np.diff(points[_SESSION])) + 1
    x, seconds, _, low, high, total, count, _ = np.insert(points, gaps, np.nan, axis=1)
    mean = np.divide(total, count, out=np.full_like(count, np.nan), where=count > 0)
    return {"record": x, "seconds": seconds, "low": low, "mean": mean, "high": high}


class _Points:
  """A matrix of points that grows at its end."""

  def __init__(self) -> None:
    self._room = np.zeros((8, 64))
    self.size = 0

  def all(self) -> _Array:
    return self._room[:, : self.size]

  def append(self, rows: _Array) -> None:
    """Adds points; the first one may belong to the last point's bucket."""
    if self.size:
      rows = np.hstack([self._room[:, self.size - 1 : self.size], rows])
    added, begin = _merge(rows), max(0, self.size - 1)
    end = begin + added.shape[1]
    if end > self._room.shape[1]:
      room = np.zeros((8, 2 * end))
      room[:, : self.size] = self.all()
      self._room = room
    self._room[:, begin:end] = added
    self.size = end

  def hold(self, points: _Array) -> None:
    """Replaces all points by these, which may be views of its own."""
    points = points.copy()
    self.size = points.shape[1]
    self._room[:, : self.size] = points


def _merge(points: _Array) -> _Array:
  """Merges consecutive points of the same bucket and session."""
  changes = (np.diff(points[_BUCKET]) != 0) | (np.diff(points[_SESSION]) != 0)
  starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
  if len(starts) == points.shape[1]:
    return points
  merged = points[:, starts]
  for row, ufunc in ((_LOW, np.fmin), (_HIGH, np.fmax), (_SUM, np.add), (_COUNT, np.add)):
    merged[row] = ufunc.reduceat(points[row], starts)
  return merged


class Distributions:
  """Histograms of an array's records over time, thinned out as they get many."""

  MOST, BINS, SAMPLE = 64, 32, 1 << 16

  def __init__(self) -> None:
    self._stride, self._records = 1, 0
    # For each: position, seconds, the ends of the range, and the counts of equal bins.
    self._held: list[tuple[int, float, float, float, list[int]]] = []

  def add(self, position: int, seconds: float, array: _Array) -> None:
    """Adds a record's elements; an even selection if there are more than a few ten thousand."""
    due = self._records % self._stride == 0
    self._records += 1
    if not due:
      return
    values = as_float(array.reshape(-1)[:: -(-array.size // self.SAMPLE)])
    values = values[np.isfinite(values)]
    if not values.size:
      return
    low, high = float(values.min()), float(values.max())
    with np.errstate(over="ignore", invalid="ignore"):
      wide = np.isfinite(high - low) and np.nextafter(low, high) < low + (high - low) / self.BINS
    if wide:
      counts, _ = np.histogram(values, self.BINS, (low, high))
    else:  # too narrow for bins
      counts = np.array([values.size])
    self._held.append((position, seconds, low, high, counts.tolist()))
    if len(self._held) >= self.MOST:
      del self._held[1::2]
      self._stride *= 2

  def all(self) -> list[tuple[int, float, float, float, list[int]]]:
    """Returns position, seconds, ends of the range and counts of each."""
    return list(self._held)


class RecordCounts:
  """Counts of records of each device over time, in a fixed number of buckets that widen."""

  BUCKETS = 240

  def __init__(self) -> None:
    self.width = 0.125  # seconds in a bucket
    self._counts: dict[int, _Array] = {}
    self._used = 0

  def add(self, device: int, seconds: _Array) -> None:
    """Counts records by their seconds since the first; earlier ones count at 0."""
    self._counts.setdefault(device, np.zeros(self.BUCKETS, np.int64))
    seconds = np.maximum(seconds, 0)
    while seconds.max() >= self.width * self.BUCKETS:
      self.width *= 2
      for one, held in self._counts.items():
        self._counts[one] = np.pad(held.reshape(-1, 2).sum(1), (0, self.BUCKETS // 2))
      self._used = -(-self._used // 2)
    bucket = (seconds / self.width).astype(np.int64)
    self._counts[device] += np.bincount(bucket, minlength=self.BUCKETS)
    self._used = max(self._used, int(bucket.max()) + 1)

  def counts(self) -> dict[int, _Array]:
    """Returns the records in each bucket up to the last used one, by device."""
    return {device: held[: self._used].copy() for device, held in sorted(self._counts.items())}


class Rate:
  """Records a second, over the last seconds of the stream's own time."""

  SECONDS = 10.0

  def __init__(self) -> None:
    # (time, number of records by then).
    self._marks: collections.deque[tuple[float, int]] = collections.deque()
    self._count = 0

  def add(self, seconds: _Array) -> None:
    last = float(seconds.max())
    begin = last - self.SECONDS
    older = int((seconds < begin).sum())
    if older:
      self._marks.append((begin, self._count + older))
    elif not self._marks:
      self._marks.append((float(seconds.min()), 1))  # counts the records after the first one
    self._count += len(seconds)
    self._marks.append((last, self._count))
    while len(self._marks) > 2 and self._marks[1][0] <= begin:
      self._marks.popleft()

  @property
  def value(self) -> float:
    if not self._marks:
      return 0.0
    (before, count_before), (after, count_after) = self._marks[0], self._marks[-1]
    return (count_after - count_before) / (after - before) if after > before else 0.0


class StreamSource:
  """One stream, and the mapping of its sequence numbers to positions on the record axis."""

  def __init__(self, started_ns: int | None = None) -> None:
    self.started_ns = started_ns  # the zero of seconds; None before the first record
    self.session = 0
    self.is_new_session = False  # True if the next record is another writer's
    self._base = 0  # offset of the session, which begins where the one before ended
    self._top = 0  # the first free position
    self._missing_before = 0
    self._descriptions: dict[int, Any] = {}  # by id; keeping the descriptions keeps the ids unique
    # By device, in this session: (first number, highest number, count).
    self._spans: dict[int, tuple[int, int, int]] = {}

  def position(self, record: StreamRecord) -> int:
    """Returns a record's position on the record axis."""
    seq, device, about = record.seq, record.device, record.description
    # A writer describes each tap once. A new description with an old number is another writer's.
    passed = device in self._spans and seq <= self._spans[device][1]
    if self.is_new_session or (passed and id(about) not in self._descriptions):
      self.is_new_session = False
      self._missing_before = self.missing
      self.session += 1
      self._base = self._top
      self._descriptions.clear()
      self._spans.clear()
    self._descriptions[id(about)] = about
    first, last, distinct = self._spans.get(device, (seq, seq, 1))
    self._spans[device] = first, max(last, seq), distinct + (seq != last)
    self._top = max(self._top, self._base + seq + 1)
    return self._base + seq

  @property
  def missing(self) -> int:
    missing = sum(last - first + 1 - distinct for first, last, distinct in self._spans.values())
    return self._missing_before + max(0, missing)
