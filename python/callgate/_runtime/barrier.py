# SPDX-License-Identifier: Apache-2.0
"""`callgate.errors` and `callgate.barrier`: where a program waits for what it has sent off.

Here and in other processes. Runs on the thread that calls it. Across processes it is a meeting
(`_process/meeting.py`): each first does its own part, then says so, and all agree on how it ended.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable

import jax

from callgate import _callgate, _part
from callgate._core import failures, foreign, options
from callgate._core import kept as _kept
from callgate._core.errors import ProcessError
from callgate._jax import dispatch
from callgate._process import group as _group
from callgate._process.meeting import Meeting
from callgate._runtime import fence

_FLUSH_SECONDS = 0.1  # between two looks at the other processes


def barrier(timeout: float | None = None, *, all_processes: bool = False) -> None:
  """Waits until every program dispatched so far has run, and every tap's record is delivered.

  ```python
  import callgate as cg, jax

  seen = []
  jax.jit(lambda x: cg.tap(x, seen.append))(2.0)
  cg.barrier()
  assert seen == [2.0]
  ```

  Programs of all threads count. So do those whose results were dropped, but for programs without
  effects on one CPU device: nothing tells of their end.

  With `all_processes` every process of `jax.distributed` has to call it, equally often, from one
  thread. A process that failed raises its own exception. The others get a `ProcessError` that names
  it within a fraction of a second, even if it ended without calling `barrier`. A process that died
  silently is noticed after `CALLGATE_SILENT_SECONDS` (60).

  Args:
    timeout: seconds to wait at most; None for no limit, as long as all processes live.
    all_processes: wait for all processes, and learn of their failures.

  Raises:
    TimeoutError: programs still ran, records still waited, or processes were not here in time.
    ProcessError: another process failed, ended or died.
    BaseException: the exception of a gate whose program failed during the wait, or of a consumer;
      those of other consumers are attached (`callgate_others`).
  """
  options.or_none(options.seconds, "barrier", "timeout", timeout, zero=True)
  options.boolean("barrier", "all_processes", all_processes)
  group = _group.group() if all_processes else None
  if group is None:
    _settle(timeout, None)
    return
  deadline = _deadline(timeout)
  with Meeting(group) as meeting:
    _settle(timeout, meeting.watch)
    meeting.wait(deadline, timeout)


def _deadline(timeout: float | None) -> float:
  return math.inf if timeout is None else time.monotonic() + timeout


def _settle(timeout: float | None, watch: Callable[[], None] | None) -> None:
  """This process's part; `watch` is called now and then, and may end it by raising."""
  if _callgate.channels_abandoned():
    was = "was forked from one that had channels, whose threads are not here"
    expected = "expected a process of its own (multiprocessing's 'spawn' or 'forkserver')"
    raise RuntimeError(f"callgate.barrier: this process {was}; {expected}")
  deadline = _deadline(timeout)
  failure = wait_for_programs(timeout, watch)
  if not until(deadline, watch, _callgate.drain_devices):
    raise TimeoutError(f"callgate.barrier: records still wait on a GPU after {timeout} s")
  for part in _part.parts():
    if not until(deadline, watch, part.wait):
      raise TimeoutError(f"callgate.barrier: {part.calls} still run after {timeout} s")
  for part in _part.parts():
    part.settle()
  if not until(deadline, watch, _callgate.flush_channels):
    stats = _callgate.channel_stats().items()
    pending = {name: count for name, one in stats if (count := one["pending"])}
    raise TimeoutError(f"callgate.barrier: records still wait after {timeout} s: {pending}")
  dispatch.forget_failed_tokens()
  failures.raise_deferred(of_all_threads=True)
  if failure is not None and not _is_stale(failure, first=0):
    kept = _kept.find(str(failure))
    try:
      foreign.raise_unchained(kept.exception if kept is not None else failure)
    finally:
      failure = kept = None  # as below
  failures.raise_consumer_errors()


def _others_return(number: int, seconds: float) -> bool:
  """Waits for other threads' calls that began before `number`, and so for what JAX runs in them.

  A consumer doesn't: a call may wait for it. Nor does a call on a thread of the runtime's own.
  """
  if _callgate.delivers_here() or _is_of_runtime():
    return True
  end = time.monotonic() + seconds
  while _callgate.others_underway(number):
    if time.monotonic() >= end:
      return False
    time.sleep(0.001)
  return True


def _is_of_runtime() -> bool:
  """True on a thread that Python has not started."""
  return isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore


def until(deadline: float, watch: Callable[[], None] | None, done: Callable[[float], bool]) -> bool:
  """True if `done`, which takes seconds to wait, said so in time."""
  while True:
    rest = min(max(0.0, deadline - time.monotonic()), failures.LONG_SECONDS)
    if watch is None:
      return done(rest)
    if done(min(rest, _FLUSH_SECONDS)):
      return True
    if rest <= _FLUSH_SECONDS:
      return False
    watch()


def _is_stale(failure: BaseException, first: int) -> bool:
  """True if it failed before the id `first`, or has been raised: JAX's barrier repeats itself."""
  number = _kept.id_in(str(failure))
  return number is not None and (number < first or _kept.is_claimed(number))


# What JAX raises for a failed program: JaxRuntimeError, or ValueError where its C++ dispatch ran a
# program that had run before, and it failed at once.
_PROGRAM_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


class errors:
  """A context in which a gate's exception is raised as itself.

  ```python
  with cg.errors():
    program(x)           # raises the gate's own ValueError, not JaxRuntimeError
  ```

  When JAX's error for a gate (`jax.errors.JaxRuntimeError`, or ValueError) leaves the block, the
  block raises the original object in its place. At its end the block waits for all arrays. So it
  also raises the error of a program whose result nobody looked at; of a pure program on one device
  only if its result still exists. A thread never gets another thread's error, so this does not
  happen while other threads are in such blocks. The error of a program over several devices goes
  to the first block that ends.
  """

  def __enter__(self) -> errors:
    self._first = _kept.enter_block()
    return self

  def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
    try:
      if error is None:
        failure = wait_for_programs(None, calls=False)
        _callgate.drain_devices(failures.LONG_SECONDS)
        _callgate.flush_channels()
        failures.raise_deferred()
        self._raise_unseen(failure)
        failures.raise_consumer_errors()
      elif foreign.is_a(error, _PROGRAM_ERRORS):
        kept = _kept.find(foreign.text_of(error))
        if kept is not None and kept.exception is not error:
          foreign.raise_unchained(kept.exception)
    finally:
      error = kept = failure = None  # no cycle through this frame, see `raise_unchained`
      dispatch.forget_failed_tokens()
      _kept.blocks.remove(self._first)

  def _raise_unseen(self, failure: BaseException | None) -> None:
    if failure is not None and _is_stale(failure, self._first):
      failure = None
    kept = _kept.find(str(failure)) if failure is not None else None
    if kept is None:
      own, python_threads = threading.get_ident(), failures.threads_of_python()
      alone = len(_kept.blocks) == 1
      for k in _kept.newest_first():  # the oldest of this thread's, or of none of Python's
        mine = k.thread == own or (alone and k.thread not in python_threads)
        kept = k if mine and k.id >= self._first and not k.claimed else kept
      if kept is not None:
        _kept.claimed(kept)
    try:
      if kept is not None:
        foreign.raise_unchained(kept.exception)
      if failure is not None:
        raise failure
    finally:
      failure = kept = k = None  # as above


def wait_for_programs(
  timeout: float | None, watch: Callable[[], None] | None = None, *, calls: bool = True
) -> BaseException | None:
  """Waits until no program of any thread runs; returns what the first to fail did so with.

  `watch` is called now and then meanwhile; what it raises, a `ProcessError`, ends the wait. With
  `calls` False those count that have been dispatched, not those that another thread calls now.
  """
  deadline = _deadline(timeout)
  late = f"callgate.barrier: programs still run after {timeout} s"
  failure: BaseException | None = None
  others_return = functools.partial(_others_return, _callgate.new_number())
  if calls and not until(deadline, watch, others_return):
    raise TimeoutError(late)
  for array in list(dispatch.live_arrays()):
    try:
      while not (timeout is None and watch is None) and not array.is_ready():
        if time.monotonic() > deadline:
          raise TimeoutError(late)
        if watch is not None:
          watch()
        time.sleep(0.001)
      if not array.is_ready():
        array.block_until_ready()
    except (TimeoutError, ProcessError):
      raise
    except Exception as error:  # noqa: BLE001 - whatever the program failed with is passed on
      if not array.is_deleted():  # donated by another thread meanwhile
        failure = failure or error
  if not fence.wait(deadline, watch):
    raise TimeoutError(late)
  rest = None if timeout is None else max(0.0, deadline - time.monotonic())
  try:
    if not dispatch.wait_for_effects(rest, watch):
      raise TimeoutError(late)
    dispatch.effects_barrier_alone()
  except (TimeoutError, ProcessError):
    raise
  except Exception as error:  # noqa: BLE001 - as above
    failure = failure or error
  return failure
