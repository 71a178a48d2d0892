# SPDX-License-Identifier: Apache-2.0
"""A started call: it runs on a thread of callgate, or on the event loop.

A started call always finishes, once. Its result is taken once. The barrier waits for calls whose
results nobody takes, and raises their errors. All functions run under the GIL; a wait releases it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from callgate import _callgate, _part
from callgate._core import failures, foreign
from callgate._core.errors import GateError, GateTimeoutError, Interruption
from callgate._core.weak import members
from callgate._part import Part, Phase, Wait
from callgate._places.threads import ThreadPlace

if TYPE_CHECKING:
  import asyncio

# Calls that run, or have failed and were not taken. Guarded by _lock, but for a fork's child;
# emptied by the end of each call, or by taking its exception.
_open: set[Job] = set()
_lock = threading.Lock()
_MOST = 64  # the most results that are kept after they were taken


class Job:
  """A started call."""

  __slots__ = (
    "__weakref__", "_done", "_error", "_kept", "_limit", "_result", "_taken", "interrupts", "label",
    "place", "timeout",
  )  # fmt: skip

  def __init__(self, label: str, place: str, timeout: float) -> None:
    self.label, self.place, self.timeout = label, place, timeout
    self._done, self._limit = threading.Event(), Wait(timeout or None)
    self.interrupts: int = _callgate.interrupts()
    self._result: Any = None
    self._error: BaseException | None = None
    self._taken: str | None = None
    self._kept = True  # the result so far

  def start(self, call: Callable[[], Any], queue: CallQueue | ThreadPlace | None = None) -> None:
    """Runs `call`, in its turn if there is a queue; the event loop runs the rest of a coroutine.

    Ctrl-C ends calls that wait in a queue, and calls on workers.
    """

    def run() -> None:
      try:
        if queue is not None and _callgate.interrupted_since(self.interrupts):
          raise Interruption
        value = call()
        if isinstance(value, Coroutine):
          self._run_coroutine(value)
          return
        self._settle(value, None)
      except Interruption:
        with _lock:
          _open.discard(self)  # there is no error to report
        self._settle(None, GateError(f"{self.label}, started at {self.place}: Ctrl-C ended it"))
      except BaseException as error:  # noqa: BLE001 - raised for the result's taker
        self._settle(None, error)

    with _lock:
      _open.add(self)
    try:
      is_taken = (_callgate.submit if queue is None else queue.submit)(run)
    except RuntimeError as error:  # the system can't start a thread
      with _lock:
        count = len(_open)
        _open.discard(self)
      raise GateError(
        f"{self.label}: the call can't be started, because the system has no thread for it while "
        f"{count} started calls run; start fewer at once, or use an async def, whose calls share "
        "a thread"
      ) from error
    if not is_taken:
      with _lock:
        _open.discard(self)
      if isinstance(queue, ThreadPlace):
        queue.refuse()
      raise GateError(
        f"{self.label}: the call can't be started, because the process is ending or was forked "
        "from one that ran such calls; start processes with multiprocessing's 'spawn' or "
        "'forkserver'"
      )

  def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> None:
    import asyncio  # 30 modules, only for users of coroutines

    try:
      loop = _event_loop()
    except RuntimeError:  # the process ends, and no thread starts
      coroutine.close()
      raise
    asyncio.run_coroutine_threadsafe(self._follow(coroutine), loop)

  async def _follow(self, coroutine: Coroutine[Any, Any, Any]) -> None:
    import asyncio

    try:
      self._settle(await coroutine, None)
    except BaseException as error:
      self._settle(None, error)
      if foreign.is_a(error, asyncio.CancelledError):
        raise

  def _settle(self, result: Any, error: BaseException | None) -> None:
    self._result, self._error = result, error
    with _lock:
      if error is None or self._taken is not None:
        _open.discard(self)
    self._done.set()

  def take(self, place: str, shared: bool = False) -> Any:
    """Waits for the result, once; `place` is the place of the wait, for messages.

    `shared`: lanes of a `jax.vmap` wait, and may share the call; then each lane waits for it once.

    Raises:
      GateError: the result was taken before.
      GateTimeoutError: the call has run longer than the gate's timeout.
      Interruption: Ctrl-C came meanwhile.
      BaseException: the call raised it.
    """
    interrupts = _callgate.interrupts()
    with _lock:
      if self._taken is not None and not (shared and self._kept):
        self._refuse(place)
      self._taken = place
    if not self._is_done(interrupts):
      raise GateTimeoutError(
        f"{self.label}, started at {self.place}, has run longer than its timeout of "
        f"{self.timeout:g} s; the program waits for it at {place}; increase "
        "timeout= if the call needs longer"
      )
    with _lock:
      _open.discard(self)
      if self._error is not None:
        raise self._error
      if not self._kept:  # results of other calls have replaced it meanwhile
        self._refuse(place)
      result = self._result
    if shared:
      _keep(self, sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(result)))
    else:
      self.forget()
    return result

  def _refuse(self, place: str) -> NoReturn:
    raise GateError(
      f"{self.label}: a ticket can be waited for once, got a second wait at {place}; it was "
      f"started at {self.place} and waited for at {self._taken}. Keep the first wait's result"
    )

  def forget(self) -> None:
    """Drops the result, after it was taken."""
    with _lock:
      result, self._result, self._kept = self._result, None, False
    del result  # without the lock: its destructor may do anything

  def _is_done(self, interrupts: int) -> bool:
    """Waits for the end of the call. False if the gate's time ran out."""

    def look() -> None:
      if _callgate.interrupted_since(interrupts):
        raise Interruption(f"{self.label}: Ctrl-C ended the program")

    done = self._limit.looking(look).event(self._done)
    if not done or self._error is not None:
      look()
    return done

  def report(self) -> None:
    """Keeps the error of a finished call that nobody has taken, for the barrier to raise."""
    with _lock:
      if self._taken is not None or self not in _open:
        return
      _open.discard(self)
      self._taken = "the barrier"
    if self._error is not None:
      where = f"callgate: raised in {self.label}, started at {self.place} and not waited for"
      failures.keep_consumer_error(self._error, where)

  def ended(self, wait: Wait) -> bool:
    return wait.until(self._done.wait)


# Results that lanes have taken recently, which other lanes of the call may take soon. Guarded by
# _lock; at most _MOST entries.
_taken: collections.deque[tuple[weakref.ref[Job], int]] = collections.deque()
_MOST_KEPT = 16 << 20  # the most bytes of results; at least one result is kept


def _keep(job: Job, size: int) -> None:
  out: list[Job | None] = []
  with _lock:
    _taken.append((weakref.ref(job), size))
    while len(_taken) > 1 and (len(_taken) > _MOST or sum(size for _, size in _taken) > _MOST_KEPT):
      out.append(_taken.popleft()[0]())
  for one in out:
    if one is not None and one is not job:
      one.forget()


class CallQueue:
  """A queue of calls for other processes or an executor.

  At most `most` of them run; a thread of this process waits for each.
  """

  def __init__(self, most: int) -> None:
    self._most, self._threads = most, 0
    self._waiting: collections.deque[Callable[[], None]] = collections.deque()
    _queues.add(self)

  def submit(self, run: Callable[[], None]) -> bool:
    """Queues a call, as the runtime does; False if no call can run any more."""
    with _lock:
      self._waiting.append(run)
      if self._threads >= self._most:
        return True
      self._threads += 1
    failure: RuntimeError | None = None
    try:
      if _callgate.submit(self._run):
        return True
    except RuntimeError as error:  # the system can't start a thread
      failure = error
    with _lock:
      self._threads -= 1
      if failure is not None and self._threads:
        return True  # the existing threads will run it
      if run not in self._waiting:  # another thread of the queue has taken it
        return True
      self._waiting.remove(run)
    if failure is not None:
      raise failure
    return False

  def _run(self) -> None:
    while True:
      with _lock:
        if not self._waiting:
          self._threads -= 1
          return
        run = self._waiting.popleft()
      run()

  def clear(self) -> None:
    self._waiting.clear()
    self._threads = 0


# Atomic: single steps, but for a fork's child, which has one thread.
_queues: weakref.WeakSet[CallQueue] = weakref.WeakSet()


def settle(wait: Wait) -> bool:
  """Waits for all started calls; keeps the errors of those that nobody waited for.

  False if the time ran out.
  """
  for job in list(_open):
    if not job.ended(wait):
      return False
    job.report()
  return True


def finish(wait: Wait) -> None:
  """Waits for all started calls at the end of the process."""
  if settle(wait):
    return
  with _lock:
    count = len(_open)
    _open.clear()
  late = f"still ran {wait.seconds:g} s after the end of the program and were abandoned"
  print(f"callgate: {count} started call(s) {late}", file=sys.stderr)


def after_effects_barrier() -> None:
  """Runs in `jax.effects_barrier()`, after the programs have ended."""
  if _open:
    settle(Wait(None))
    failures.raise_consumer_errors()


# -- the event loop --------------------------------------------------------------------------------
# Guarded by _lock, but for the end of the process and a fork's child.
_loop: asyncio.AbstractEventLoop | None = None
_loop_thread: threading.Thread | None = None


def _event_loop() -> asyncio.AbstractEventLoop:
  """Returns the event loop of all coroutines, on a thread of its own."""
  import asyncio

  global _loop, _loop_thread
  with _lock:
    if _loop is None:
      _loop = loop = asyncio.new_event_loop()
      run = functools.partial(_run_loop, loop)
      thread = threading.Thread(target=run, name="callgate async", daemon=True)
      try:
        thread.start()
      except RuntimeError:
        _loop = None
        raise
      _loop_thread = thread
    return _loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
  """Runs the loop until `close` ends it, even if a coroutine stops it."""
  import asyncio

  while _loop is loop and not loop.is_closed():
    loop.run_forever()
  # Here, because Python's end may finalize the loop's sockets before the loop.
  for task in asyncio.all_tasks(loop):
    task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
  loop.close()


def close(seconds: float) -> None:
  """Ends the event loop's thread."""
  global _loop
  if (loop := _loop) is not None and _loop_thread is not None:
    _loop = None
    with contextlib.suppress(RuntimeError):
      loop.call_soon_threadsafe(loop.stop)
    _loop_thread.join(seconds)


def after_fork() -> None:
  """Forgets all started calls in a fork's child, where none of them runs."""
  global _loop
  _open.clear()
  for queue in members(_queues):
    queue.clear()
  _loop = None


@_part.joins("futures")
class StartedCalls(Part):
  """Waits for the started calls that nobody waits for."""

  calls = "started calls"

  def settle(self, wait: Wait) -> bool:
    return settle(wait)

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase == "deliver":
      finish(wait)
    elif phase == "join":
      close(wait.left)

  def forked(self) -> None:
    after_fork()


_part.on("effects barrier", after_effects_barrier)
