# SPDX-License-Identifier: Apache-2.0
"""Calls of a gate one at a time (`serial=`), and lanes at once (`parallel=`)."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from callgate._core import weak


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


def _after_fork() -> None:
  """Replaces the locks in a forked child: the parent's threads, which may hold them, are gone."""
  for turn in weak.members(_turns):
    turn.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@functools.cache  # at most one entry
def warn_of_gil() -> None:
  """Warns, once, that lanes don't run at once."""
  warnings.warn(
    "callgate.gate: parallel=True has no effect, because Python runs with the GIL: the lanes of a "
    "vmap run one after another. Run the program on free-threaded Python, or use "
    "run_on='processes'",
    stacklevel=2,
  )
