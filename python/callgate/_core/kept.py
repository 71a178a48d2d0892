# SPDX-License-Identifier: Apache-2.0
"""The exceptions of failed programs, kept until those who called them ask.

A program's error is text; the exception that it stands for is here, under the id that the text
carries. The store is bounded: an exception holds its traceback's frames, and with them arrays. All
functions run under the GIL, on any thread.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import threading
from collections.abc import Container

import jax

from callgate import _callgate
from callgate._core import foreign, handlers
from callgate._core.errors import GateTimeoutError

# Outside of `callgate.errors()` nobody may ever ask: only the newest failures are kept then. A
# block asks for what fails in it, so all of that is kept, up to the second number.
_LIMIT, _LIMIT_IN_BLOCKS = 256, 4096
_LIMIT_CLAIMED = 4  # of those that somebody has got: the same program's other results may ask again
NO_RUN = -1  # not known; others may be negative, too
THIS_THREAD = 0
_ID = re.compile(r"\[callgate error #(\d+)\]")
# A timeout that the runtime told of without the GIL (src/xla/call_site.h): kept when first read.
_TIMEOUT = re.compile(r"\[callgate timeout #(\d+)\] (.*)", re.DOTALL)
_timeouts: collections.OrderedDict[int, int] = collections.OrderedDict()  # their newest ids


@dataclasses.dataclass(eq=False)
class Kept:
  """A failure: its id, the thread that called the program, and XLA's number of the program's run.

  The thread may be one of XLA's own, where XLA doesn't tell who called. What is `for_main` the main
  thread raises by itself.
  """

  id: int
  exception: BaseException
  thread: int
  run: int
  claimed: bool = False  # somebody has got it
  for_main: bool = False


_store: collections.OrderedDict[int, Kept] = collections.OrderedDict()
_let_go: collections.OrderedDict[int, None] = collections.OrderedDict()  # claimed ones, by id
blocks: list[int] = []  # for each block that is open, the first id that can be of a failure in it
# Failures that no program's error tells of. The caller has only wrong numbers, so these stay here
# whatever happens to the store.
deferred: list[Kept] = []
# The runs whose exception for the main thread somebody has got: each shard's call may raise one.
_interrupted: collections.deque[int] = collections.deque(maxlen=64)
_TOLD = "callgate_told"  # an attribute of those that Python's own handler raises, too
# The main thread may be told of an interrupt anywhere, so also where it has the lock.
_lock = threading.RLock()
_next_id = 0


def told(exception: KeyboardInterrupt) -> KeyboardInterrupt:
  """Marks an interrupt that the main thread raises by itself, so that it raises no second one."""
  foreign.attach(exception, _TOLD, True)
  return exception


def keep(exception: BaseException, run: int = NO_RUN, thread: int = THIS_THREAD) -> int:
  """Stores an exception for the caller; returns its id."""
  return _keep(exception, run, thread, handlers.has_raised(exception))


def keep_for_main(exception: BaseException) -> int:
  """Stores what a signal's handler raised, for the main thread to raise; returns its id."""
  return _keep(exception, NO_RUN, THIS_THREAD, True)


def _keep(exception: BaseException, run: int, thread: int, for_main: bool) -> int:
  global _next_id
  with _lock:
    _next_id += 1
    kept = Kept(_next_id, exception, thread or threading.get_ident(), run)
    if for_main:
      kept.claimed = run in _interrupted or foreign.is_attached(exception, _TOLD)
      kept.for_main = not kept.claimed
      if kept.for_main:
        _callgate.wake_main_thread()
    _store[_next_id] = kept
    if len(_store) > _LIMIT:
      _forget(len(_store) - _LIMIT)
    return _next_id


def _forget(count: int) -> None:
  """Forgets so many: what has been claimed first, then what no open block may ask for."""
  claimed = [one.id for one in _store.values() if one.claimed][:count]
  for one in claimed:
    del _store[one]
  first = min(blocks, default=_next_id + 1)
  for oldest in list(itertools.islice(_store, count - len(claimed))):
    if oldest >= first and len(_store) <= _LIMIT_IN_BLOCKS:
      return
    del _store[oldest]


def id_in(text: str) -> int | None:
  """The id that an error's text carries."""
  if (match := _ID.search(text)) is not None:
    return int(match.group(1))
  if (match := _TIMEOUT.search(text)) is None:
    return None
  number = int(match.group(1))
  with _lock:
    if number not in _timeouts:
      _timeouts[number] = keep(GateTimeoutError(match.group(2)))
      if len(_timeouts) > _LIMIT_IN_BLOCKS:
        _timeouts.popitem(last=False)
    return _timeouts[number]


def find(text: str, *, claim: bool = True) -> Kept | None:
  """The failure that an error's text stands for, if it is still here."""
  number = id_in(text) or 0
  with _lock:
    kept = _store.get(number)
    if kept is not None and claim:
      claimed(kept)
    return kept


def claimed(kept: Kept) -> None:
  """Somebody has got it. Older ones that somebody has got are kept no longer."""
  with _lock:
    kept.claimed = True
    ids = [one.id for one in _store.values() if one.claimed and one is not kept]
    for one in ids[: -(_LIMIT_CLAIMED - 1)]:
      del _store[one]
      _let_go[one] = None
    while len(_let_go) > _LIMIT_IN_BLOCKS:
      _let_go.popitem(last=False)


def take(text: str) -> Kept | None:
  """As `find`; it is kept no longer, nor is what its traceback's frames hold."""
  with _lock:
    if (kept := find(text)) is not None:
      _store.pop(kept.id, None)
    return kept


def newest_first() -> list[Kept]:
  """All that is kept, the newest first."""
  with _lock:
    return list(reversed(_store.values()))


def is_claimed(number: int) -> bool:
  """True if somebody has got it."""
  return number in _let_go or ((kept := _store.get(number)) is not None and kept.claimed)


def enter_block() -> int:
  """A block of `callgate.errors()` begins; returns the first id of what may fail in it."""
  with _lock:
    blocks.append(_next_id + 1)
    return _next_id + 1


def defer(text: str) -> BaseException:
  """Puts the failure that the text stands for aside until somebody asks; returns its exception.

  The runtime's own errors stand for none, nor do those that others have pushed out of the store.
  """
  with _lock:
    kept = find(text, claim=False)
    if kept is None:
      kept = _store[keep(jax.errors.JaxRuntimeError(text))]
    if len(deferred) < _LIMIT:
      deferred.append(kept)
  return kept.exception


def take_for_main() -> BaseException | None:
  """The newest for the main thread that nobody has got, or None; a block asks for its own."""
  with _lock:
    if blocks:
      return None
    waiting = [kept for kept in reversed(_store.values()) if kept.for_main and not kept.claimed]
    if not waiting:
      return None
    for kept in waiting:
      kept.claimed = kept.run == waiting[0].run
    if waiting[0].run != NO_RUN:
      _interrupted.append(waiting[0].run)
    return waiting[0].exception


def take_deferred(others: Container[int | None]) -> list[BaseException]:
  """Takes what was put aside and nobody has got, oldest first; not that of `others`, threads."""
  with _lock:
    waiting = [one for one in deferred if not one.claimed]
    taken = [one for one in waiting if one.thread not in others]
    deferred[:] = [one for one in waiting if one.thread in others]
    for one in taken:
      claimed(one)
  return [one.exception for one in taken]
