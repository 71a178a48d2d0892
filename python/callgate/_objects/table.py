# SPDX-License-Identifier: Apache-2.0
"""The process's table of objects that programs refer to, and the scopes of loops that make them.

A handle consists of two uint32 words: 20 bits for the process, 44 for the object's number. Only the
table owns the objects. Two events free an object: the end of a loop's step after which the loop
doesn't refer to it (here), and a scan of all JAX arrays while no program runs that may use it
(`collect.py`). All functions are called under the GIL, by any thread.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from callgate import _callgate, _part
from callgate._core.errors import HandleError
from callgate._places import threads
from callgate._places.threads import ThreadPlace

WORDS = 2  # the uint32 words of a handle
_PROCESS = int.from_bytes(os.urandom(4), "little") % ((1 << 20) - 1) + 1  # never 0
_TOMBSTONES = 4096  # freed objects whose makers messages still name


class Maker(NamedTuple):
  """A maker of objects: its name, and the place of the call of `callgate.hold`."""

  label: str
  place: str

  def __str__(self) -> str:
    return f"{self.label} ({self.place})" if self.place else self.label


class Held(NamedTuple):
  """An object of the table."""

  number: int
  value: Any
  maker: Maker
  thread: ThreadPlace | None  # the `callgate.thread` that made it and will drop it, if any


class KeptObjects:
  """Keeps alive the objects that a program has as constants; the program holds it."""

  def __init__(self, held: Iterable[Held]) -> None:
    self.numbers = [one.number for one in held]
    with _lock:
      _kept.update(self.numbers)

  def __reduce__(self) -> Any:
    return KeptObjects, ((),)  # empty in another process

  def __del__(self) -> None:
    with _lock:
      _kept.subtract(self.numbers)


class _Scope:
  """A running loop: the objects that its steps made and still refer to, and the loop around it."""

  def __init__(self, parent: int) -> None:
    self.parent, self.objects = parent, set[int]()


_held: dict[int, Held] = {}  # guarded by _lock; emptied by `free`
# Guarded by _lock; emptied by the end of each loop, or `keep_only`.
_scopes: dict[int, _Scope] = {}
# Guarded by _lock; at most _TOMBSTONES entries.
_freed: collections.OrderedDict[int, Maker] = collections.OrderedDict()
_kept: collections.Counter[int] = collections.Counter()  # guarded by _lock; emptied by `keep_only`
_lock = threading.RLock()


def add(value: Any, maker: Maker, scope: Any, number: int = 0) -> Any:
  """Adds an object; returns its words.

  Args:
    value: the object.
    maker: its maker.
    scope: the words of the loop whose step makes it.
    number: its number, if it was chosen before.
  """
  number = number or _callgate.new_number()
  with _lock:
    _held[number] = Held(number, value, maker, threads.current())
    if (loop := _scopes.get(_number(*scope.tolist()))) is not None:
      loop.objects.add(number)
    count = len(_held)
  _part.load("objects").due(count)
  return words(number)


def words(number: int) -> Any:
  return np.array([_PROCESS << 12 | number >> 32, number & 0xFFFFFFFF], np.uint32)


def numbers_in(arrays: Iterable[Any]) -> set[int]:
  """Returns the object numbers of this process in arrays of words; ignores all other words."""
  found = set[int]()
  for array in arrays:
    if array.size == WORDS:  # a single handle: NumPy's functions would take longer
      if number := _number(*array.reshape(WORDS).tolist()):
        found.add(number)
      continue
    pairs = np.asarray(array).reshape(-1, WORDS).astype(np.uint64)
    own = pairs[pairs[:, 0] >> np.uint64(12) == _PROCESS]
    found.update((((own[:, 0] & np.uint64(0xFFF)) << np.uint64(32)) | own[:, 1]).tolist())
  return found


def _number(high: int, low: int) -> int:
  """Returns the number of an object of this process; 0 for other words."""
  return (high & 0xFFF) << 32 | low if high >> 12 == _PROCESS else 0


def get(handle: Any, user: str) -> Held:
  """Returns the object of two words; `user` is the caller, for messages.

  Raises:
    HandleError: the words are another process's, or no handle, or the object was freed.
  """
  high, low = handle.tolist()
  number = (high & 0xFFF) << 32 | low
  if (found := _held.get(number)) is not None and high >> 12 == _PROCESS:
    return found
  if (lent := _lent.get(number)) is not None:
    return lent
  if not high and not low:
    why = "got an empty handle: the call that makes the object failed, or did not run"
  elif high >> 12 != _PROCESS:
    why = (
      f"got one of another process (number {high >> 12}, here {_PROCESS}), or an array that is "
      "not a handle; an object stays in the process that makes it"
    )
  elif (maker := _freed.get(number)) is not None:
    why = f"got object #{number}, made by {maker}, which was freed when nothing referred to it"
  else:
    why = f"got object #{number}, which was freed or never existed"
  raise HandleError(f"{user}: expected the handle of a live object, {why}")


# -- in a worker: objects of its parent's programs -------------------------------------------------
# Atomic: single steps; emptied by the parent, when the object has its end.
_lent: dict[int, Held] = {}


def lend(words: Any, value: Any, maker: Maker) -> None:
  """Keeps an object under the parent's words, until the parent drops it."""
  high, low = np.asarray(words).tolist()
  number = (high & 0xFFF) << 32 | low
  _lent[number] = Held(number, value, maker, None)


def drop(number: int) -> None:
  _lent.pop(number, None)


# -- the scopes of loops ---------------------------------------------------------------------------
def enter(parent: Any) -> Any:
  """Begins a loop, in a step of another one or in none; returns the words of its scope."""
  outer = _number(*parent.tolist())
  number: int = _callgate.new_number()
  with _lock:
    _scopes[number] = _Scope(outer)
  return words(number)


def sweep(scope: Any, carried: Sequence[Any], given: Sequence[Any]) -> None:
  """Ends a step: frees its objects, except those in the carry and in the results."""
  with _lock:
    if (loop := _scopes.get(_number(*scope.tolist()))) is None or not loop.objects:
      return
    if given:
      _move(loop, loop.objects & numbers_in(given))
    kept = loop.objects & numbers_in(carried)
    gone, loop.objects = loop.objects - kept, kept
  if gone:
    free(gone)


def leave(scope: Any) -> None:
  """Ends a loop: its remaining objects go to the loop around it, or to the program."""
  with _lock:
    if (loop := _scopes.pop(_number(*scope.tolist()), None)) is not None:
      _move(loop, set(loop.objects))


def _move(loop: _Scope, numbers: set[int]) -> None:
  loop.objects -= numbers
  if loop.parent in _scopes:
    _scopes[loop.parent].objects |= numbers


# -- for `collect.py` ------------------------------------------------------------------------------
def free(numbers: Iterable[int]) -> None:
  """Drops objects, each on its thread. Ignores exceptions of their destructors."""
  dropped: dict[ThreadPlace | None, list[Held]] = {}
  with _lock:
    for number in numbers:
      if number in _held:
        _freed[number] = _held[number].maker
        dropped.setdefault(_held[number].thread, []).append(_held.pop(number))
    while len(_freed) > _TOMBSTONES:
      _freed.popitem(last=False)
  for thread, objects in dropped.items():  # without the lock: destructors may do anything
    if thread is None:
      objects.clear()
    else:
      thread.drop(objects)


def end_of(place: ThreadPlace) -> None:
  """Drops the objects that live on this thread, which is about to end."""
  with _lock:
    numbers = [number for number, held in _held.items() if held.thread is place]
  free(numbers)


def keep_only(named: set[int], before: int) -> None:
  """Frees objects and scopes that were made before the number `before` and aren't named."""
  with _lock:
    for number in [number for number in _scopes if number < before]:
      del _scopes[number]  # a scope of a failed program
    for number in [number for number, count in _kept.items() if count <= 0]:
      del _kept[number]
    named = named | _kept.keys()
    gone = [number for number in _held if number < before and number not in named]
  free(gone)


def count() -> int:
  return len(_held)


def by_maker() -> dict[str, int]:
  """Returns the number of objects of each maker."""
  with _lock:  # so that no object is dropped meanwhile
    return dict(collections.Counter([held.maker.label for held in _held.values()]))


_part.on("object dropped", drop)
_part.on("thread ends", end_of)
