# SPDX-License-Identifier: Apache-2.0
"""The one store of exceptions: all that callgate keeps until somebody asks is here.

A program's error is text; the exception that it stands for is here, under the id that the text
carries. No program's error tells the failures of consumers and of programs over several devices:
they are in lists of their own for the callers that wait for them. The store is bounded: an
exception holds its traceback's frames, and with them arrays. All functions run under the GIL, on
any thread.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Container

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
# Their newest ids. Guarded by _lock; at most _LIMIT_IN_BLOCKS entries.
_timeouts: collections.OrderedDict[int, int] = collections.OrderedDict()


@dataclasses.dataclass(eq=False)
class KeptError:
  """A failure of a program or of a consumer.

  Attributes:
    id: the number that a program's error names; 0 for a consumer's.
    thread: the one that called the program; one of XLA's own where XLA doesn't tell who called.
    run: XLA's number of the program's run.
    claimed: True once somebody has got it.
    for_main: True if the main thread raises it by itself.
    consumer: names the consumer, the tap and the record; "" for a program's.
  """

  id: int
  exception: BaseException
  thread: int = 0
  run: int = NO_RUN
  claimed: bool = False
  for_main: bool = False
  consumer: str = ""


# Guarded by _lock; at most _LIMIT entries, in blocks _LIMIT_IN_BLOCKS.
_store: collections.OrderedDict[int, KeptError] = collections.OrderedDict()
# Claimed ones, by id. Guarded by _lock; at most _LIMIT_IN_BLOCKS entries.
_let_go: collections.OrderedDict[int, None] = collections.OrderedDict()
# For each block that is open, the first id that can be of a failure in it. Guarded by _lock,
# but for the end of a block, which is a single step; emptied by the end of each block.
blocks: list[int] = []
# Failures of programs whose errors do not tell of them, oldest first: whatever happens to the
# others, these stay. Guarded by _lock; emptied by whoever asks, and at most _LIMIT entries.
deferred: list[KeptError] = []
# Failures of consumers, oldest first. Bounded, as a consumer that raises for every record of a long
# run must not fill the memory. Guarded by _lock; emptied by whoever asks, and at most
# _LIMIT_OF_CONSUMERS entries.
_of_consumers: list[KeptError] = []
_LIMIT_OF_CONSUMERS = 64
_uncounted = 0  # consumers' failures beyond that. Guarded by _lock
# The runs whose exception for the main thread somebody has got: each shard's call may raise one.
_interrupted: collections.deque[int] = collections.deque(maxlen=64)  # guarded by _lock
_TOLD = "callgate_told"  # an attribute of those that Python's own handler raises, too
# The main thread may be told of an interrupt anywhere, so also where it has the lock.
_lock = threading.RLock()
_next_id = 0  # guarded by _lock


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
    kept = KeptError(_next_id, exception, thread or threading.get_ident(), run)
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


def find(text: str, *, claim: bool = True) -> KeptError | None:
  """The failure that an error's text stands for, if it is still here."""
  number = id_in(text) or 0
  with _lock:
    kept = _store.get(number)
    if kept is not None and claim:
      claimed(kept)
    return kept


def claimed(kept: KeptError) -> None:
  """Somebody has got it. Older ones that somebody has got are kept no longer."""
  with _lock:
    kept.claimed = True
    ids = [one.id for one in _store.values() if one.claimed and one is not kept]
    for one in ids[: -(_LIMIT_CLAIMED - 1)]:
      del _store[one]
      _let_go[one] = None
    while len(_let_go) > _LIMIT_IN_BLOCKS:
      _let_go.popitem(last=False)


def set_aside(exception: BaseException) -> int:
  """Stores an exception until `take_back`, which nobody else asks for; returns its id."""
  return _keep(exception, NO_RUN, THIS_THREAD, False)


def take_back(text: str) -> BaseException | None:
  """The exception of `set_aside`, if a text is its id alone; it is kept no longer."""
  number = _ID.fullmatch(text)
  with _lock:
    kept = _store.pop(int(number[1]), None) if number else None
  return None if kept is None else kept.exception


def take(text: str) -> KeptError | None:
  """As `find`; it is kept no longer, nor is what its traceback's frames hold."""
  with _lock:
    if (kept := find(text)) is not None:
      _store.pop(kept.id, None)
    return kept


def newest_first() -> list[KeptError]:
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
  """Has the failure that the text stands for wait until somebody asks; returns its exception.

  The runtime's own errors stand for none, nor do those that others have pushed out of the store.
  """
  with _lock:
    kept = find(text, claim=False)
    if kept is None:
      kept = _store[keep(jax.errors.JaxRuntimeError(text))]
    if len(deferred) < _LIMIT:
      deferred.append(kept)
  return kept.exception


def keep_consumers(exception: BaseException, consumer: str) -> bool:
  """Has a consumer's exception wait until somebody asks; False past the bound, where it counts."""
  global _uncounted
  with _lock:
    if has_room := len(_of_consumers) < _LIMIT_OF_CONSUMERS:
      _of_consumers.append(KeptError(0, exception, consumer=consumer))
    else:
      _uncounted += 1
  return has_room


def find_consumers(
  holds: Callable[[KeptError], bool], *, take: bool = False
) -> BaseException | None:
  """The oldest exception of a consumer for which `holds`, or None."""
  with _lock:
    for index, one in enumerate(_of_consumers):
      if holds(one):
        return _of_consumers.pop(index).exception if take else one.exception
  return None


def take_consumers() -> tuple[list[BaseException], int]:
  """Takes all exceptions of consumers, oldest first; with the number of those past the bound."""
  global _uncounted
  with _lock:
    taken, more = [one.exception for one in _of_consumers], _uncounted
    _of_consumers.clear()
    _uncounted = 0
  return taken, more


def take_for_main() -> BaseException | None:
  """The newest for the main thread that nobody has got, or None; a block asks for its own."""
  with _lock:
    if blocks:
      return None
    found = [kept for kept in reversed(_store.values()) if kept.for_main and not kept.claimed]
    if not found:
      return None
    for kept in found:
      kept.claimed = kept.run == found[0].run
    if found[0].run != NO_RUN:
      _interrupted.append(found[0].run)
    return found[0].exception


def take_deferred(others: Container[int | None]) -> list[BaseException]:
  """Takes what programs deferred and nobody has got, oldest first.

  The failures of programs that the threads `others` called stay.
  """
  with _lock:
    waiting = [one for one in deferred if not one.claimed]
    taken = [one for one in waiting if one.thread not in others]
    deferred[:] = [one for one in waiting if one.thread in others]
    for one in taken:
      claimed(one)
  return [one.exception for one in taken]
