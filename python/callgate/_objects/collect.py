# SPDX-License-Identifier: Apache-2.0
"""Frees objects that nothing can name any more, by a look through all of JAX's arrays.

Programs hold handles as plain words, so nobody counts them. But who may still name an object is
known where no program runs: then every handle is in some array of JAX's. So when there are many
objects, at a barrier and when asked, and if

- every program with handles that has been dispatched has ended (they have an effect, so that their
  ends are known), and so have those that give an array in which a handle could be, and
- the object was made before the oldest call of a jitted function began that has not returned yet,
  whose results nobody knows but XLA (`_callgate.oldest_underway`),

then an object whose words are in no array has its end. An array that holds the same words by chance
keeps an object longer: with a 20-bit number of the process in them that is rare. The moment is
looked for after a program's dispatch, and where the next call begins: who waits for each result
calls when all programs have ended. Where programs always run there is no such moment; then one is
waited for, for 0.1 s at most, since what runs may itself wait for this thread.
"""

from __future__ import annotations

import contextlib
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

_LEAST = 8  # objects that need no look
_WAIT_SECONDS = 0.1
_DROP_SECONDS = 1  # that threads have to drop what was freed
_collecting = threading.Lock()
# Objects beyond which the next look is due. Under the GIL: one assignment, of a number that need
# not be exact.
_limit = _LEAST


def due(count: int) -> None:
  """Told of each new object: has the next dispatch look, where there are many."""
  if count > _limit:
    _part.on("program dispatched", after_call)


def after_call(returning: bool) -> None:
  """After a program's dispatch, in its thread."""
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
  """Frees what nothing names; False where that can't be known now.

  Args:
    returning: called when a program's dispatch is about to return its results.
    seconds: how long to wait for programs that run.
  """
  global _limit
  if not table.count():
    return True
  if not _collecting.acquire(blocking=False):
    return False
  try:
    # In this order: a program that is dispatched meanwhile has its handles from these arrays, or
    # makes newer objects; one that was dispatched before has ended, and what it gave is there.
    before = min(_callgate.oldest_underway(returning), _callgate.new_number())
    arrays = list(filter(_may_name, escape.without_views(dispatch.live_arrays)))
    if not Wait(seconds).poll(lambda: all(map(_is_there, arrays))):
      return False
    if not Wait(seconds).poll(dispatch.programs_have_ended):
      return False
    named = set[int]()
    for array in arrays:
      with contextlib.suppress(Exception):  # of a program that failed
        named |= table.numbers_in(np.asarray(shard.data) for shard in array.addressable_shards)
    table.keep_only(named, before)
    _limit = max(_LEAST, 2 * table.count())
    return True
  finally:
    _collecting.release()


def _may_name(array: Any) -> bool:
  return array.dtype == np.uint32 and array.ndim > 0 and array.shape[-1] == table.WORDS


def _is_there(array: Any) -> bool:
  """False also for one that was donated meanwhile: what took it knows what was in it."""
  return not array.is_deleted() and array.is_ready()


@_part.joins("objects")
class Objects(Part):
  """Frees the objects that nothing names."""

  def settle(self, wait: Wait) -> bool:
    """Waits for the ends of what it frees, too, for a moment."""
    collect()
    threads.has_dropped(Wait(_DROP_SECONDS))
    return True


def held() -> dict[str, int]:
  """How many objects of the host programs hold now, by the names of their makers.

  ```python
  import callgate as cg, jax

  lists = cg.hold(lambda n: list(range(int(n))), name="lists")
  handle = lists(3)
  assert cg.held() == {"lists": 1}
  del handle
  assert cg.held() == {}
  ```

  Frees what nothing can name any more before it counts, once the programs that were dispatched have
  ended; it waits for them. Objects of another thread's programs count while these run.
  """
  jax.effects_barrier()
  collect(seconds=1)
  threads.has_dropped(Wait(_DROP_SECONDS))
  return table.by_maker()
