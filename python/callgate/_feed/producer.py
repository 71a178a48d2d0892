# SPDX-License-Identifier: Apache-2.0
"""The producer of a feed: a thread that iterates ahead of the program, and the queue between them.

The feed's gate takes items on any thread. The producer's thread holds no lock while user code runs,
so an iterator may run JAX programs and read other feeds. The thread ends by `close()`, with the
data, with the last user that could take items (feed.py), or with the process. It is a daemon
thread, since Python can't interrupt an iterator that doesn't return.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from callgate import _callgate
from callgate._core import foreign
from callgate._core.errors import EndOfFeed, GateError
from callgate._feed.items import ItemTypes
from callgate._runtime import timeline

Item = list[Any]  # the flat arrays of an item
Convert = Callable[[Any, int], Item]
Share = Callable[[Item, int], Item]  # returns a taker's part of an item


class _Entry:
  """An item in the queue, and its uploads to the takers' GPUs; None for one that couldn't begin."""

  def __init__(self, item: Item) -> None:
    self.item = item
    self.uploads: dict[int, _callgate.Upload | None] = {}


_END: Any = object()
_GONE: Any = object()
alive: weakref.WeakSet[Producer] = weakref.WeakSet()  # atomic: single steps


class Producer:
  """A thread that pulls items from an iterator, at most `prefetch` ahead of the takers.

  Takers are numbered. Each takes every item, and an item stays in the queue until all have taken
  it. The first taker of an item never waits for the others, which may in turn wait for its thread.
  """

  def __init__(self, name: str, iterator: Iterator[Any], prefetch: int) -> None:
    self.name = name  # the feed's name
    self.first: Any = None  # the iterator's first item, after `wait_for_first`
    self._prefetch = prefetch
    self._refill = prefetch // 2  # so that the threads don't wake each other for every item
    # Its lock is reentrant: the garbage collector may call `release` on a thread that holds it.
    self._changed = threading.Condition()
    self._queue: collections.deque[_Entry] = collections.deque()
    self._first = 0  # the number of the queue's first item
    self._next = [0]  # the number of each taker's next item
    self._runs = [-1]  # the execution in which each taker took its last item
    self._begun = (-1, 0)  # the newest execution, and the number of its first item
    self._share: Share = lambda item, _: item
    self._convert: Convert | None = None
    # With one taker on the host, the runtime takes the items from here instead of the queue.
    self._staged: _callgate.ItemQueue | None = None
    self._types: ItemTypes | None = None  # the types of the staged items
    self._default: Item | None = None
    self._has_first = self._over = False
    self._failure: tuple[BaseException, Any] | None = None  # (exception, traceback)
    self._closed = False
    self._gpus: list[int | None] = [None]  # the GPU of each taker's latest program
    self._takers_waiting = 0  # the number of takers that wait for an item
    self.skipping = threading.Lock()  # only one taker at a time drops items
    # Seconds to wait for an item at the end of the process; None for no limit.
    self._patience: float | None = None
    self._produced = self._waited = 0
    self._process = os.getpid()
    # Only the thread holds the iterator, so that it closes a generator that it leaves.
    self._thread = threading.Thread(
      target=self._run, args=([iterator],), name=f"callgate {name}", daemon=True
    )
    alive.add(self)
    self._thread.start()

  # -- the producer thread -----------------------------------------------------------------------
  def _run(self, holder: list[Iterator[Any]]) -> None:
    iterator = holder.pop()
    failure = None
    try:
      while self._wait_for_room():
        item = self._make(iterator)
        if item is _END or (item is not _GONE and not self._put(item)):
          break
        del item  # freed while the next one is made
    except BaseException as error:  # noqa: BLE001 - raised again for the item's taker
      failure = error, foreign.frames_begin(error)
    with self._changed:
      self._over, self._failure = True, failure
      self._changed.notify_all()

  def _make(self, iterator: Iterator[Any]) -> Any:
    """Returns the next item; _END after the last; _GONE for an item that is now in `_staged`."""
    staged, types = self._staged, self._types
    if staged is not None and types is not None and types.single and not timeline.is_on():
      shape, dtype = types.single
      why, item = staged.fill(iterator, dtype, shape)
      if why == "awaited":
        with self._changed:
          self._changed.notify_all()
      return item if why == "item" else _END if why == "over" else _GONE
    with timeline.span("produce", self.name):
      return next(iterator, _END)

  def _wait_for_room(self) -> bool:
    """Waits for room, and meanwhile uploads waiting items. False at the end."""
    staged = self._staged  # first without giving up the GIL, which costs more
    if staged is not None and (staged.has_room() or staged.wait_for_room()):
      return True
    while True:
      with self._changed:
        if self._ahead() >= self._prefetch:
          self._changed.wait_for(
            lambda: self._closed or self._ahead() <= self._refill or self._next_upload()
          )
        if self._closed:
          return False
        found = self._next_upload()
      if found is None:
        return True
      entry, taker, gpu = found
      entry.uploads[taker] = None
      # If it fails, the taker of the item tries again, and gets the error.
      with contextlib.suppress(Exception):
        entry.uploads[taker] = self._upload(entry, taker, gpu)

  def _ahead(self) -> int:
    """Returns the number of items that no taker has taken."""
    return self._first + len(self._queue) - max(self._next)

  def _next_upload(self) -> tuple[_Entry, int, int] | None:
    """Returns the first item that should be uploaded to a taker's GPU and isn't yet."""
    wanted = [(taker, gpu) for taker, gpu in enumerate(self._gpus) if gpu is not None]
    for number, entry in enumerate(self._queue if wanted else (), self._first):
      for taker, gpu in wanted:
        if number >= self._next[taker] and taker not in entry.uploads:
          return entry, taker, gpu
    return None

  def _upload(self, entry: _Entry, taker: int, gpu: int) -> _callgate.Upload:
    return _callgate.Upload(gpu, [np.asarray(x, order="C") for x in self._share(entry.item, taker)])

  def _put(self, item: Any) -> bool:
    number = self._count()
    if number == 0:  # for the thread that makes the feed, which takes the types from it
      with self._changed:
        self._has_first, self.first = True, item
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._closed or self._convert is not None)
        self.first = None
    if self._closed or self._convert is None:
      return False
    staged, types = self._staged, self._types
    if staged is not None and types is not None:
      arrays = types.convert(item, number, private=False)
      if staged.put([x if x.flags.c_contiguous else np.ascontiguousarray(x) for x in arrays]):
        if self._takers_waiting:
          with self._changed:
            self._changed.notify_all()
        return True
    entry = _Entry(self._convert(item, number))
    with self._changed:
      if not self._closed:
        self._queue.append(entry)
        self._produced += 1
        if self._takers_waiting:
          self._changed.notify_all()
      return not self._closed

  # -- the thread that makes the feed ------------------------------------------------------------
  def wait_for_first(self) -> bool:
    """Waits for the first item. False if there is none; raises the iterator's exception."""
    with self._changed:
      self._changed.wait_for(lambda: self._has_first or self._over)
      if not self._has_first and self._failure is not None:
        raise self._failure[0]
      return self._has_first

  def serve(
    self, convert: Convert, default: Item | None, takers: int = 1, share: Share | None = None
  ) -> None:
    """Sets the conversion of (item, number) to flat arrays, and the item after the last one."""
    with self._changed:
      self._default, self._convert = default, convert
      self._next, self._gpus = [0] * takers, list(self._gpus) * takers
      self._runs = [-1] * takers
      self._share = share or self._share
      self._changed.notify_all()

  def stage(self, types: ItemTypes) -> _callgate.ItemQueue | None:
    """Returns a queue from which the runtime takes one taker's items, unless they go to a GPU.

    Call it before `serve`. None for items that the queue can't hold.
    """
    if any(sizes := types.sizes or ()):
      self._types = types
      self._staged = _callgate.ItemQueue(list(sizes), self._prefetch, self._refill)
    return self._staged

  # -- the takers' threads -----------------------------------------------------------------------
  def begin(self, taker: int, run: int) -> None:
    """Declares the execution of a program, in which all takers take the same items.

    They begin it with the same item, even if the last execution failed on some of them.

    Raises:
      GateError: the item is no longer in the queue.
    """
    with self._changed:
      if self._runs[taker] == run:
        return
      if run > self._begun[0]:
        self._begun = run, max(self._next)
      newest, first = self._begun
      self._runs[taker] = run
      if run == newest and self._next[taker] != first:
        if first < self._first:
          raise GateError(
            f"feed '{self.name}': a program failed on some devices while others continued, so "
            "the next program's items are lost; make a new feed"
          )
        self._next[taker] = first

  def take(self, taker: int = 0) -> Item:
    """Returns the taker's next item; waits for it, and raises as `Feed.next` does."""
    return self._share(self._take([taker]).item, taker)

  def take_uploaded(self, gpu: int, taker: int = 0) -> _callgate.Upload:
    """Returns the next item as an upload to a GPU; later items are uploaded ahead of time."""
    self._unstage()
    entry = self._take([taker])
    if self._gpus[taker] != gpu:  # after the first item, which is uploaded here
      with self._changed:
        self._gpus[taker] = gpu
        self._changed.notify_all()
    upload = entry.uploads.pop(taker, None)
    if upload is not None and upload.ordinal == gpu:
      return upload
    return self._upload(entry, taker, gpu)

  def _unstage(self) -> None:
    """From now on, keeps items in the queue, from which they can be uploaded to a GPU."""
    with self._changed:
      if (staged := self._staged) is not None and self._types is not None:
        waiting = staged.leave()
        self._staged, self._produced = None, self._produced + staged.put_count()
        self._waited += staged.waited()
        self._first = self._next[0] = self._next[0] + staged.taken()
        self._queue.extend(_Entry(self._types.of_bytes(data)) for data in waiting)

  def position(self, taker: int = 0) -> int:
    """Returns the number of items that the taker has taken, with defaults."""
    self.check()
    with self._changed:
      return self._next[taker] + (0 if self._staged is None else self._staged.taken())

  def drop(self, taker: int = 0) -> None:
    """Drops an item for the taker and for takers at the same item; others still get it."""
    with self._changed:
      first = self._next[taker]
      alike = [other for other, its in enumerate(self._next) if its == first]
    self._take(alike)
    with self._changed:
      if self._begun[1] == first:
        self._begun = self._begun[0], first + 1

  def take_whole(self) -> Item:
    """Returns the next item, for all takers; takers that are behind skip items to get there."""
    return self._take(range(len(self._next))).item

  def _take(self, takers: Sequence[int]) -> _Entry:
    self.check()
    if (entry := self._take_staged()) is not None:
      return entry
    with self._changed:
      if (number := self._next_of(takers)) >= self._first + len(self._queue):
        if (entry := self._wait_for_item(takers)) is not None:
          return entry
        self.check()
        number = self._next_of(takers)
      if (index := number - self._first) < len(self._queue):
        entry = self._queue[index]
      elif self._failure is not None:
        # Without the frames of earlier takers.
        raise self._failure[0].with_traceback(self._failure[1])
      elif self._default is not None:
        entry = _Entry(self._default)
      else:
        more = "use fewer steps, or pass default= for the steps after the end"
        raise EndOfFeed(f"feed '{self.name}' ended after {self._count()} item(s); {more}")
      for taker in takers:
        self._next[taker] = number + 1
      while self._queue and self._first < min(self._next):
        self._queue.popleft()
        self._first += 1
      if self._ahead() <= self._refill:
        self._changed.notify_all()
      return entry

  def _take_staged(self) -> _Entry | None:
    staged, types = self._staged, self._types
    if staged is None or types is None or (data := staged.pop()) is None:
      return None
    return _Entry(types.of_bytes(data))

  def _next_of(self, takers: Sequence[int]) -> int:
    return max(self._next[taker] for taker in takers)

  def _wait_for_item(self, takers: Sequence[int]) -> _Entry | None:
    """Waits, under the lock, until the next item or the end is there; returns a staged item."""
    self._note_waiting(1)
    waited = False
    try:
      while True:
        # Read before the queue: the last item comes before the end.
        over = self._over or self._closed
        if (entry := self._take_staged()) is not None or over:
          return entry
        if self._next_of(takers) < self._first + len(self._queue):
          return None
        self._waited += not waited
        waited = True
        # The end of the process wakes it without an item, and limits its patience from then on.
        if not self._changed.wait(self._patience) and self._patience is not None:
          raise GateError(
            f"feed '{self.name}': the process is ending, and no item arrived within "
            f"{self._patience:g} s; call callgate.barrier() before the process ends"
          )
    finally:
      self._note_waiting(-1)

  def _note_waiting(self, more: int) -> None:
    self._takers_waiting += more
    if (staged := self._staged) is not None:
      staged.awaited = self._takers_waiting > 0

  def _count(self) -> int:
    """Returns the number of items that the iterator has given."""
    staged = self._staged
    return self._produced + (0 if staged is None else staged.put_count())

  def raised(self, error: BaseException) -> bool:
    """True if the iterator raised this exception."""
    return self._failure is not None and error is self._failure[0]

  def check(self) -> None:
    """Raises GateError if the feed is closed, or belongs to another process."""
    if (here := os.getpid()) != self._process:
      its = f"was made in process {self._process}, and its thread is not in the forked process"
      after = "create the feed after the fork"
      raise GateError(f"feed '{self.name}' {its} {here}; {after}")
    if self._closed:
      raise GateError(f"feed '{self.name}' is closed; call next() before close()")

  def stats(self) -> dict[str, int]:
    # In a fork's child the lock may be held forever.
    with self._changed if os.getpid() == self._process else contextlib.nullcontext():
      served, waited, queued = min(self._next), self._waited, len(self._queue)
      produced = self._count() if os.getpid() == self._process else self._produced
      if (staged := self._staged) is not None and os.getpid() == self._process:
        served, waited = served + staged.taken(), waited + staged.waited()
        queued = staged.size()
      return {"produced": produced, "served": served, "waited": waited, "queued": queued}

  # -- the end -----------------------------------------------------------------------------------
  def release(self) -> None:
    """Makes the thread and the waiting takers end, without waiting for them."""
    if os.getpid() == self._process:  # a fork's child has no such thread
      with self._changed:
        self._closed = True
        self._queue.clear()
        if self._staged is not None:
          self._staged.leave()
        self._changed.notify_all()

  def close(self, timeout: float) -> bool:
    """Ends the thread. False if its iterator is still busy; the thread ends when that returns."""
    self.release()
    if os.getpid() == self._process and threading.current_thread() is not self._thread:
      self._thread.join(timeout)
    return not self._thread.is_alive()

  def limit_patience(self, seconds: float) -> None:
    """From now on, takers wait `seconds` at most for an item."""
    if os.getpid() == self._process:
      with self._changed:
        self._patience = seconds
        self._changed.notify_all()
