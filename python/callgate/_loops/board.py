# SPDX-License-Identifier: Apache-2.0
"""Begins, updates and ends bars on the board, from a loop that is being lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from callgate._jax import tracing
from callgate._loops.primitive import Bar, progress_call_p

_Values = Sequence[Any]


def begin(bar: Bar, numbers: _Values, values: _Values) -> Begun:
  """Begins a bar, once `values` are there; `numbers` are those that its mark reads."""
  anchor = _anchor(values)
  if bar.by_value:
    last, first = (jnp.asarray(x, np.float32) for x in numbers)
    shown = [first, last]
    if not bar.lanes and first.ndim:
      shown = [_longest(first, last, x) for x in shown]
    shape = (bar.count,) if bar.lanes else ()
    shown = [x.reshape(shape) for x in shown]
    return Begun(bar, _call("begin_at", bar, *shown, *anchor), (first, last))
  if not numbers:
    return Begun(bar, _call("begin", bar, *anchor))
  total = jnp.asarray(numbers[0]).astype(np.int32)
  total = jnp.broadcast_to(total.ravel(), (bar.count,)) if bar.lanes else jnp.max(total)
  return Begun(bar, _call("begin_of", bar, total, *anchor))


@dataclasses.dataclass(frozen=True)
class Begun:
  """A bar, or a lane's each, that a loop has begun.

  Attributes:
    bar: as the loop knows it.
    handle: the board's number; a vector of lanes.
    limits: of a bar by value: where that began and where it ends, with the lanes' axes.
  """

  bar: Bar
  handle: Any
  limits: tuple[Any, Any] | None = None

  def update(self, count: Any, lanes: Any, numbers: _Values, going: Any) -> Any:
    """Says how far the loop is; returns the number of steps until the next update.

    Args:
      count: of steps.
      lanes: the counts of the lanes, where they are known.
      numbers: those that the bar's mark reads.
      going: which lanes go on, where that is known.
    """
    if self.bar.lanes and going is not None and going.shape == self.bar.lanes:
      going = going.ravel()
    else:
      going = jnp.ones(self.handle.shape, np.int32)
    return _call("update", self.bar, self.handle, *self._reached(count, lanes, numbers), going)

  def end(self, count: Any, lanes: Any, numbers: _Values, values: _Values) -> None:
    """Ends the bar, once `values` are there."""
    _call("end", self.bar, self.handle, *self._reached(count, lanes, numbers), *_anchor(values))

  def _reached(self, count: Any, lanes: Any, numbers: _Values) -> tuple[Any, Any]:
    """The board's operands for a count, and for a value: NaN for a bar without."""
    if self.bar.lanes:
      is_own = getattr(lanes, "shape", None) == self.bar.lanes
      count = lanes.ravel() if is_own else jnp.broadcast_to(count, (self.bar.count,))
    if self.limits is None:
      return count, jnp.full(self.handle.shape, jnp.nan, np.float32)
    at = numbers[1]
    if self.bar.lanes or not at.ndim:
      return count, at.reshape(self.handle.shape)
    first, last = self.limits  # of many lanes: that which has the longest way to go
    share = jnp.nanmin((at - first) / jnp.where(last == first, 1.0, last - first))
    begin, way = (_longest(first, last, x) for x in (first, last - first))
    return count, begin + share * way


def _longest(first: Any, last: Any, of: Any) -> Any:
  """The entry of the lane whose value goes the longest way."""
  return of.ravel()[jnp.argmax(jnp.abs(last - first).ravel())]


def _call(kind: str, bar: Bar, *operands: Any) -> Any:
  return progress_call_p.bind(*operands, kind=kind, bar=bar)[0]


def _anchor(values: _Values) -> _Values:
  """A number of the smallest array, if there is one: a call that takes it waits for all of it."""
  arrays = [x for x in values if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.number)]
  smallest = sorted((x for x in arrays if x.size), key=lambda x: x.size)[:1]
  return [tracing.unvaried(x)[(slice(1),) * x.ndim] for x in smallest]
