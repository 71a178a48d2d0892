# SPDX-License-Identifier: Apache-2.0
"""Frees objects that nothing refers to any more, by scanning all JAX arrays.

To programs handles are plain integers, so there is no reference count. But while no program runs,
every handle is in some JAX array. So callgate scans the arrays when there are many objects, at a
barrier, and when asked. An object is freed if its words are in no array, and

- every dispatched program with handles has ended (such programs have an effect, which shows their
  end), and so has every program with a result that could contain a handle, and
- the object was made before the oldest call of a jitted function that hasn't returned yet, because
  only XLA knows the results of that call.

An array with the same words by chance keeps an object alive longer. That is rare, because the words
contain a 20-bit number of the process. A scan comes after a program's dispatch, or at the beginning
of the next call: in code that waits for each result, all programs have ended by then. If programs
always run, callgate waits for their end, but at most 0.1 s, because a running program may itself
wait for this thread.
"""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np

from callgate import _callgate, _part
from callgate._arrays import escape
from callgate._jax import dispatch
from callgate._objects import table
from callgate._part import Part, Wait
from callgate._places import threads

_LEAST = 8  # so many objects need no scan
_WAIT_SECONDS = 0.1
_DROP_SECONDS = 1  # seconds that threads get to drop the freed objects
_collecting = threading.Lock()
# The number of objects at which the next scan is due. Atomic: one assignment, of a number
# that need not be exact.
_limit = _LEAST


def due(count: int) -> None:
  """Called for each new object: if there are many, the next dispatch scans."""
  if count > _limit:
    _part.on("program dispatched", after_call)


def after_call(returning: bool) -> None:
  """Called after a program's dispatch, on its thread."""
  global _limit
  count = table.count()
  seconds = _WAIT_SECONDS if count > 2 * _limit else 0
  if count <= _limit or collect(returning=returning, seconds=seconds):
    _part.off("program dispatched", after_call)
    return
  if count > 2 * _limit:
    _limit = 2 * count
  _callgate.before_next_call(collect)


def collect(*, returning: bool = False, seconds: float = 0) -> bool:
  """Frees objects that nothing refers to; False if that can't be determined now.

  Args:
    returning: True if a program's dispatch is about to return its results.
    seconds: the time to wait for running programs.
  """
  global _limit
  if not table.count():
    return True
  if not _collecting.acquire(blocking=False):
    return False
  try:
    # In this order: a program dispatched meanwhile has its handles from these arrays, or makes
    # objects after `now`; a program dispatched before has ended, and its results are among the
    # arrays.
    now = _callgate.new_number()
    before = min(now, _callgate.oldest_underway(returning))
    named = set[int]()
    with escape.reading_frames:  # an array that a gate has for a call is ready, so it isn't kept
      unfinished = [array for array in dispatch.live_arrays() if not _add_named(array, named)]
    if not Wait(seconds).poll(lambda: all(map(_is_there, unfinished))):
      return False
    if not Wait(seconds).poll(dispatch.programs_have_ended):
      return False
    if not all(_add_named(array, named) for array in unfinished):
      return False
    table.keep_only(named, before)
    _limit = max(_LEAST, 2 * table.count())
    return True
  finally:
    _collecting.release()


def _may_name(array: Any) -> bool:
  return array.dtype == np.uint32 and array.ndim > 0 and array.shape[-1] == table.WORDS


def _add_named(array: Any, named: set[int]) -> bool:
  """Adds the numbers of objects that an array names; False if it isn't there yet."""
  if not _may_name(array):
    return True
  if not _is_there(array):
    return False
  try:
    named |= table.numbers_in(np.asarray(shard.data) for shard in array.addressable_shards)
  except Exception:  # noqa: BLE001 - of a failed program, unless another thread donates it meanwhile
    return not array.is_deleted()
  return True


def _is_there(array: Any) -> bool:
  """False for an unfinished array, and for a donated one, whose content a program has."""
  return not array.is_deleted() and array.is_ready()


@_part.joins("objects")
class Objects(Part):
  """Frees the objects that nothing refers to."""

  def settle(self, wait: Wait) -> bool:
    """Frees objects, and waits a moment for their ends."""
    collect()
    threads.has_dropped(Wait(_DROP_SECONDS))
    return True


def held() -> dict[str, int]:
  """Counts the host objects that programs hold now, by the names of their makers.

  ```python
  import callgate as cg, jax

  lists = cg.hold(lambda n: list(range(int(n))), name="lists")
  handle = lists(3)
  assert cg.held() == {"lists": 1}
  del handle
  assert cg.held() == {}
  ```

  It first waits for all dispatched programs, and frees objects that nothing refers to any more.
  While programs of another thread run, their objects count.

  Returns:
    A dictionary from the maker's name to the number of its objects.
  """
  jax.effects_barrier()
  collect(seconds=1)
  threads.has_dropped(Wait(_DROP_SECONDS))
  return table.by_maker()
