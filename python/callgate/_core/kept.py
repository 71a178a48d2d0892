# SPDX-License-Identifier: Apache-2.0
"""The only store of exceptions that callgate keeps until a caller asks for them.

A program's error is text, with an id of the original exception, which is here. No program's error
reports the failures of consumers and of programs over several devices; they are in separate lists
for the callers that wait for them. The store is bounded, because an exception holds its traceback's
frames, and with them arrays. All functions run under the GIL, on any thread.
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

# The limit of kept failures outside and inside of `callgate.errors()`. Outside, callers may never
# ask for a failure, so only the newest are kept. A block asks for all its failures.
_LIMIT, _LIMIT_IN_BLOCKS = 256, 4096
_LIMIT_CLAIMED = 4  # claimed failures that stay: a program's other results may ask again
NO_RUN = -1  # unknown; known runs may be negative, too
THIS_THREAD = 0
_ID = re.compile(r"\[callgate error #(\d+)\]")
# A timeout that the runtime reported without the GIL (src/xla/call_site.h). It is stored when its
# text is first read.
_TIMEOUT = re.compile(r"\[callgate timeout #(\d+)\] (.*)", re.DOTALL)
# The newest ids of timeouts. Guarded by _lock; at most _LIMIT_IN_BLOCKS entries.
_timeouts: collections.OrderedDict[int, int] = collections.OrderedDict()


@dataclasses.dataclass(eq=False)
class KeptError:
  """A failure of a program or of a consumer.

  Attributes:
    id: the number in the program's error; 0 for a consumer's.
    thread: the thread that called the program, or one of XLA's if the caller is unknown.
    run: XLA's number of the program's run.
    claimed: True once a caller has got it.
    for_main: True if the main thread raises it by itself.
    consumer: the consumer, the tap and the record; "" for a program's.
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
# Claimed failures, by id. Guarded by _lock; at most _LIMIT_IN_BLOCKS entries.
_let_go: collections.OrderedDict[int, None] = collections.OrderedDict()
# Programs' errors that the user's code got from JAX: their ids, or texts without an id. Guarded by
# _lock; at most _LIMIT entries.
_seen: collections.OrderedDict[int | str, None] = collections.OrderedDict()
# For each open block, the first id of a failure in it. Guarded by _lock, but for the end of a
# block, which is a single step; emptied by the end of each block.
blocks: list[int] = []
# Failures that no program's error reports, oldest first. The limits of other failures don't affect
# these. Guarded by _lock; emptied by whoever asks, and at most _LIMIT entries.
deferred: list[KeptError] = []
# Failures of consumers, oldest first. Bounded, because a consumer that raises for each record of a
# long run must not fill the memory. Guarded by _lock; emptied by whoever asks, and at most
# _LIMIT_OF_CONSUMERS entries.
_of_consumers: list[KeptError] = []
_LIMIT_OF_CONSUMERS = 64
_uncounted = 0  # consumers' failures beyond the limit. Guarded by _lock
# The runs whose exception for the main thread was raised: each shard's call may raise one.
_interrupted: collections.deque[int] = collections.deque(maxlen=64)  # guarded by _lock
# An attribute of interrupts that Python's own handler raises, too.
_RAISED_BY_MAIN = "callgate_raised_by_main"
# An interrupt may reach the main thread anywhere, also while it holds the lock.
_lock = threading.RLock()
_next_id = 0  # guarded by _lock


def mark_raised(exception: KeyboardInterrupt) -> KeyboardInterrupt:
  """Marks an interrupt that the main thread raises by itself, so that it raises only one."""
  foreign.attach(exception, _RAISED_BY_MAIN, True)
  return exception


def keep(exception: BaseException, run: int = NO_RUN, thread: int = THIS_THREAD) -> int:
  """Stores an exception for the caller; returns its id."""
  return _keep(exception, run, thread, handlers.has_raised(exception))


def keep_for_main(exception: BaseException) -> int:
  """Stores an exception of a signal handler, for the main thread to raise; returns its id."""
  return _keep(exception, NO_RUN, THIS_THREAD, True)


def _keep(exception: BaseException, run: int, thread: int, for_main: bool) -> int:
  global _next_id
  with _lock:
    _next_id += 1
    kept = KeptError(_next_id, exception, thread or threading.get_ident(), run)
    if for_main:
      kept.claimed = run in _interrupted or foreign.is_attached(exception, _RAISED_BY_MAIN)
      kept.for_main = not kept.claimed
      if kept.for_main:
        _callgate.wake_main_thread()
    _store[_next_id] = kept
    if len(_store) > _LIMIT:
      _forget(len(_store) - _LIMIT)
    return _next_id


def _forget(count: int) -> None:
  """Forgets so many failures: first claimed ones, then those that no open block may ask for."""
  claimed = [one.id for one in _store.values() if one.claimed][:count]
  for one in claimed:
    del _store[one]
  first = min(blocks, default=_next_id + 1)
  for oldest in list(itertools.islice(_store, count - len(claimed))):
    if oldest >= first and len(_store) <= _LIMIT_IN_BLOCKS:
      return
    del _store[oldest]


def id_in(text: str) -> int | None:
  """Returns the id in an error's text."""
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
  """Returns the failure of an error's text, if it is still kept."""
  number = id_in(text) or 0
  with _lock:
    kept = _store.get(number)
    if kept is not None and claim:
      claimed(kept)
    return kept


def claimed(kept: KeptError) -> None:
  """Marks a failure as claimed, and drops older claimed ones."""
  with _lock:
    kept.claimed = True
    ids = [one.id for one in _store.values() if one.claimed and one is not kept]
    for one in ids[: -(_LIMIT_CLAIMED - 1)]:
      del _store[one]
      _let_go[one] = None
    while len(_let_go) > _LIMIT_IN_BLOCKS:
      _let_go.popitem(last=False)


def set_aside(exception: BaseException) -> int:
  """Stores an exception for `take_back` only; returns its id."""
  return _keep(exception, NO_RUN, THIS_THREAD, False)


def take_back(text: str) -> BaseException | None:
  """Removes and returns the exception of `set_aside` if a text is its id; else None."""
  number = _ID.fullmatch(text)
  with _lock:
    kept = _store.pop(int(number[1]), None) if number else None
  return None if kept is None else kept.exception


def take(text: str) -> KeptError | None:
  """Like `find`, but removes the failure, and with it its traceback's frames."""
  with _lock:
    if (kept := find(text)) is not None:
      _store.pop(kept.id, None)
    return kept


def newest_first() -> list[KeptError]:
  """Returns all kept failures, the newest first."""
  with _lock:
    return list(reversed(_store.values()))


def is_claimed(number: int) -> bool:
  """Returns True if a caller has got it."""
  return number in _let_go or ((kept := _store.get(number)) is not None and kept.claimed)


def see(error: BaseException) -> None:
  """Remembers that JAX raises a program's error in the user's code."""
  with _lock:
    _seen[id_in(str(error)) or str(error)] = None
    if len(_seen) > _LIMIT:
      _seen.popitem(last=False)


def is_seen(error: BaseException) -> bool:
  """Returns True if JAX raised this error in the user's code, or another of the same program."""
  return (id_in(str(error)) or str(error)) in _seen


def enter_block() -> int:
  """Begins a block of `callgate.errors()`; returns the first id of a failure in it."""
  with _lock:
    blocks.append(_next_id + 1)
    return _next_id + 1


def defer(text: str) -> BaseException:
  """Defers the failure of a text until a caller asks for it; returns its exception.

  If the store lacks it (the runtime's own errors, or beyond the limit), the exception is made of
  the text.
  """
  with _lock:
    kept = find(text, claim=False)
    if kept is None:
      kept = _store[keep(jax.errors.JaxRuntimeError(text))]
    if len(deferred) < _LIMIT:
      deferred.append(kept)
  return kept.exception


def keep_consumers(exception: BaseException, consumer: str) -> bool:
  """Keeps a consumer's exception until a caller asks; beyond the limit counts it, returns False."""
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
  """Returns the oldest exception of a consumer for which `holds`, or None."""
  with _lock:
    for index, one in enumerate(_of_consumers):
      if holds(one):
        return _of_consumers.pop(index).exception if take else one.exception
  return None


def take_consumers() -> tuple[list[BaseException], int]:
  """Removes and returns consumers' exceptions, oldest first, and the number beyond the limit."""
  global _uncounted
  with _lock:
    taken, more = [one.exception for one in _of_consumers], _uncounted
    _of_consumers.clear()
    _uncounted = 0
  return taken, more


def take_for_main() -> BaseException | None:
  """Claims and returns the newest failure for the main thread; None if none, or in a block."""
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
  """Removes and returns deferred, unclaimed exceptions, oldest first.

  Failures of programs that the threads `others` called stay.
  """
  with _lock:
    waiting = [one for one in deferred if not one.claimed]
    taken = [one for one in waiting if one.thread not in others]
    deferred[:] = [one for one in waiting if one.thread in others]
    for one in taken:
      claimed(one)
  return [one.exception for one in taken]
