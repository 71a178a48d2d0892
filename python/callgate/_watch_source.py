"""Where a stream's numbers stand, and how fast records come, for `_watch_model`.

Plain data, used under the model's lock.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from callgate._stream_records import StreamRecord

_RECENT_SECONDS = 10.0  # what "records per second" looks back over


class Rate:
  """Records a second, looking back over the last seconds of the stream's own time."""

  def __init__(self) -> None:
    self._marks: collections.deque[tuple[float, int]] = collections.deque()
    self._count = 0

  def add(self, seconds: np.ndarray[Any, Any]) -> None:
    """Counts records.

    Args:
      seconds: their times.
    """
    last = float(seconds.max())
    older = int((seconds < last - _RECENT_SECONDS).sum())
    if older:
      self._marks.append((last - _RECENT_SECONDS, self._count + older))
    elif not self._marks:
      self._marks.append((float(seconds.min()), 1))  # the rate is that of the ones behind it
    self._count += len(seconds)
    self._marks.append((last, self._count))
    while len(self._marks) > 2 and self._marks[1][0] <= last - _RECENT_SECONDS:
      self._marks.popleft()

  @property
  def value(self) -> float:
    if len(self._marks) < 2:
      return 0.0
    (before, count_before), (after, count_after) = self._marks[0], self._marks[-1]
    return (count_after - count_before) / (after - before) if after > before else 0.0


class Source:
  """One stream: where its numbers stand, and how they become positions on the record axis."""

  def __init__(self) -> None:
    self.session = 0
    self.base = 0  # of the session, so that it begins where the one before ended
    self.top = 0  # the first position behind all that came
    self.missing_before = 0
    self.is_new_session = False  # whether the next record is another writer's
    self._descriptions: dict[int, Any] = {}  # by id, which holding them keeps their own
    self._first: dict[int, int] = {}
    self._last: dict[int, int] = {}
    self._distinct: dict[int, int] = {}

  def _begin_session(self) -> None:
    self.is_new_session = False
    self.missing_before = self.missing
    self.session += 1
    self.base = self.top
    self._descriptions.clear()
    for counts in (self._first, self._last, self._distinct):
      counts.clear()

  def position(self, record: StreamRecord) -> int:
    """Where a record lies on the record axis.

    A writer describes each tap once: a new description with a number that the device has passed
    is from another writer.
    """
    device, seq = record.device, record.seq
    is_described = id(record.description) in self._descriptions
    passed = seq <= self._last.get(device, -1)
    if self.is_new_session or (passed and not is_described):
      self._begin_session()
      is_described = False
    if not is_described:
      self._descriptions[id(record.description)] = record.description
    last = self._last.get(device)
    if last is None:
      self._first[device] = seq
    if last != seq:
      self._distinct[device] = self._distinct.get(device, 0) + 1
    self._last[device] = seq if last is None else max(last, seq)
    self.top = max(self.top, self.base + seq + 1)
    return self.base + seq

  @property
  def missing(self) -> int:
    spans = (self._last[d] - self._first[d] + 1 - n for d, n in self._distinct.items())
    return self.missing_before + max(0, sum(spans))
