# SPDX-License-Identifier: Apache-2.0
"""Images and texts of a tap over time, thinned out as their number grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from callgate._stream.records import StreamRecord
from callgate._tap import kinds
from callgate._watch.images import Image, small

MEDIA = ("image", "text")
_MOST_CHARACTERS = 4000  # the most characters of a text


class Shown(NamedTuple):
  """One image or text, and its position."""

  position: int
  seconds: float
  lane: int
  value: Image | str


def kind_of(record: StreamRecord) -> str | None:
  """Returns the kind of the record's tap, if the page shows it in a special way."""
  kind = record.description.get("kind")
  return kind if kind in MEDIA and record.role == "primal" else None


def leaves_of(record: StreamRecord, kind: str | None) -> Mapping[str, Any]:
  """Returns the leaves that the page shows; a text is one leaf, its bytes."""
  if kind != "text":
    return record.leaves
  try:
    text = kinds.text(list(record.leaves.values()), record.description.get("fields"))
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
    # The writer may have sent any format.
    text = f"(a text that can't be formatted: {type(error).__name__})"
  return {"": kinds.text_bytes(text)}


def shown(kind: str, array: np.ndarray[Any, Any]) -> Image | str:
  """Returns the value of a leaf as the page shows it."""
  if kind == "text":
    text = array.tobytes().decode(errors="replace")
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"
  if array.ndim not in (2, 3, 4) or not array.size:
    return f"({array.dtype}{list(array.shape)}, not an image)"
  # Kinds that NumPy lacks, such as bfloat16, aren't among "f".
  finite = array if array.dtype.kind in "biu" else array[np.isfinite(array)]
  ends = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
  return Image(small(kinds.sheet(array)), *ends)


class Media:
  """The images or texts of one leaf of one stream, evenly selected from its records."""

  MOST = 32

  def __init__(self) -> None:
    self._stride, self._records = 1, 0
    self._held: list[Shown] = []
    self._last: tuple[int, float, int, str, np.ndarray[Any, Any]] | None = None

  def add(
    self, position: int, seconds: float, lane: int, kind: str, array: np.ndarray[Any, Any]
  ) -> None:
    due = self._records % self._stride == 0
    self._records += 1
    self._last = position, seconds, lane, kind, array
    if due:
      self._held.append(Shown(position, seconds, lane, shown(kind, array)))
      if len(self._held) >= self.MOST:
        del self._held[1::2]
        self._stride *= 2

  def all(self) -> list[Shown]:
    """Returns the selected ones and the last, in order."""
    if self._last is None:
      return []
    position, seconds, lane, kind, array = self._last
    if (self._held[-1].position, self._held[-1].lane) == (position, lane):
      return list(self._held)
    return [*self._held, Shown(position, seconds, lane, shown(kind, array))]
