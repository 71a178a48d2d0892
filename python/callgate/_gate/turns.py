# SPDX-License-Identifier: Apache-2.0
"""Calls of a gate one at a time (`serial=`), and lanes at once (`parallel=`)."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from callgate import _part
from callgate._core import weak
from callgate._part import Part


def is_free_threaded() -> bool:
  """Returns True if Python runs without the GIL."""
  return not getattr(sys, "_is_gil_enabled", lambda: True)()


class _Turn:
  """The lock of a gate. A call within a call of the same thread runs at once."""

  def __init__(self) -> None:
    self.lock = threading.RLock()
    _turns.add(self)


# The turns of all gates. Atomic: single steps.
_turns: weakref.WeakSet[_Turn] = weakref.WeakSet()


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the function with calls that wait for each other."""
  turn = _Turn()

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    with turn.lock:
      return function(*args, **kwargs)

  return call


@_part.joins("turns")
class Turns(Part):
  """Gives a forked child locks of its own: the parent's threads, which may hold them, are gone."""

  def forked(self) -> None:
    for turn in weak.members(_turns):
      turn.lock = threading.RLock()


@functools.cache  # at most one entry
def warn_of_gil() -> None:
  """Warns, once, that lanes don't run at once."""
  warnings.warn(
    "callgate.gate: parallel=True has no effect, because Python runs with the GIL: the lanes of a "
    "vmap run one after another. Run the program on free-threaded Python, or use "
    "run_on='processes'",
    stacklevel=2,
  )
