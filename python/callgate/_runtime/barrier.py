# SPDX-License-Identifier: Apache-2.0
"""`callgate.errors` and `callgate.barrier`: waits for programs, calls and records.

Both run on the calling thread. A barrier across processes is a meeting (`_process/meeting.py`):
each process first does its own part and reports it, and all agree on the result.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

from callgate import _callgate, _part
from callgate._arrays import escape
from callgate._core import failures, foreign, options
from callgate._core import kept as _kept
from callgate._core.errors import ProcessError
from callgate._jax import dispatch
from callgate._part import FOREVER, Wait
from callgate._process import group as _group
from callgate._process.meeting import Meeting
from callgate._runtime import fence


def barrier(timeout: float | None = None, *, all_processes: bool = False) -> None:
  """Waits for all programs dispatched so far, all started calls and all records of taps.

  ```python
  import callgate as cg, jax

  seen = []
  jax.jit(lambda x: cg.tap(x, seen.append))(2.0)
  cg.barrier()
  assert seen == [2.0]
  ```

  The barrier waits for programs of all threads, also if their results were dropped. On a single CPU
  device, though, it can't wait for programs without effects whose results were dropped.

  With `all_processes=True` each process of `jax.distributed` has to call it, equally often, from
  one thread. A process that fails raises its own exception. The others raise a `ProcessError` with
  its name within a fraction of a second, even if it ended without calling `barrier`. A process that
  dies without a message counts as dead after `CALLGATE_SILENT_SECONDS` (60).

  Args:
    timeout: the longest wait in seconds. Default: no limit, as long as all processes live.
    all_processes: True waits for all processes, and raises their failures.

  Raises:
    TimeoutError: programs still ran, records still waited, or processes had not arrived in time.
    ProcessError: another process failed, ended or died.
    BaseException: the exception of a gate whose program failed during the wait, or of a consumer;
      its attribute `callgate_others` has the exceptions of other consumers.
  """
  options.or_none(options.seconds, "barrier", "timeout", timeout, zero=True)
  options.boolean("barrier", "all_processes", all_processes)
  group = _group.group() if all_processes else None
  if group is None:
    _settle(Wait(timeout))
    return
  wait = Wait(timeout)
  with Meeting(group) as meeting:
    _settle(wait.looking(meeting.watch))
    meeting.wait(wait)


def _settle(wait: Wait) -> None:
  """Waits for the programs, calls and records of this process."""
  if _callgate.channels_abandoned():
    was = "was forked from one that had channels, whose threads are not here"
    expected = "start processes with multiprocessing's 'spawn' or 'forkserver'"
    raise RuntimeError(f"callgate.barrier: this process {was}; {expected}")
  failure = wait_for_programs(wait)
  if not wait.until(_callgate.drain_devices):
    raise TimeoutError(
      f"callgate.barrier: records still wait on a GPU after {wait.seconds} s; increase the timeout"
    )
  for part in _part.parts():
    if not part.settle(wait):
      raise TimeoutError(
        f"callgate.barrier: {part.calls} still run after {wait.seconds} s; increase the timeout"
      )
  if not wait.until(_callgate.flush_channels):
    stats = _callgate.channel_stats().items()
    pending = {name: count for name, one in stats if (count := one["pending"])}
    raise TimeoutError(
      f"callgate.barrier: records still wait after {wait.seconds} s: {pending}; "
      "increase the timeout, or find the slow consumer"
    )
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
  """Waits for other threads' calls that began before `number`, including JAX programs in them.

  A consumer's thread returns at once, because a call may wait for the consumer. So does a thread of
  the runtime.
  """
  if _callgate.delivers_here() or _is_of_runtime():
    return True
  return Wait(seconds).poll(lambda: not _callgate.others_underway(number))


def _is_of_runtime() -> bool:
  """Returns True on a thread that Python has not started."""
  return isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore


def _is_stale(failure: BaseException, first: int) -> bool:
  """Returns True if it failed before the id `first` or was raised before; JAX repeats its errors.

  The main thread already got the exception of a signal handler that ended a program.
  """
  of_main = threading.current_thread() is threading.main_thread()
  if of_main and "callgate: Ctrl-C ended the program" in str(failure):
    return True
  number = _kept.id_in(str(failure))
  return number is not None and (number < first or _kept.is_claimed(number))


# JAX raises these for a failed program: JaxRuntimeError, or ValueError from its C++ dispatch if the
# program had run before and fails at once.
_PROGRAM_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


class errors:
  """A context manager that raises a gate's original exception in place of JAX's error.

  ```python
  with cg.errors():
    program(x)           # raises the gate's own ValueError, not JaxRuntimeError
  ```

  If JAX's error for a gate (`jax.errors.JaxRuntimeError` or ValueError) leaves the block, the block
  raises the original exception instead. At its end the block waits for all arrays and raises the
  exception of a program whose result you never used. For a pure program on one device this works
  only while its result exists. A block never raises an exception that belongs to another Python
  thread. If the gate ran on a thread of XLA, its exception belongs to no Python thread, and the
  block raises it only if no other block is open. The exception of a program over several devices
  goes to the first block that ends.

  If several shards of such a program fail, the block raises the first exception, with notes about
  the others. With `all=True` it always raises an ExceptionGroup:

  ```python
  try:
    with cg.errors(all=True):
      sharded_program(x)
  except* ValueError as group:
    print(len(group.exceptions), "shards failed")
  ```

  Args:
    all: True raises an ExceptionGroup of the exceptions of all calls, in the order in which they
      failed; a BaseExceptionGroup if one is not an `Exception`.
  """

  def __init__(self, *, all: bool = False) -> None:
    options.boolean("errors", "all", all)
    self._all = all

  def __enter__(self) -> errors:
    failures.gather(self._all)
    self._first = _kept.enter_block()
    return self

  def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
    failures.gather(-self._all)
    try:
      if error is None:
        failure = wait_for_programs(calls=False)
        _callgate.drain_devices(FOREVER)
        _callgate.flush_channels()
        if self._all:
          found = failures.take_deferred()
          failures.raise_group([*found, *([] if found else self._unseen(failure))])
        failures.raise_deferred()
        for unseen in self._unseen(failure):
          foreign.raise_unchained(unseen)
        failures.raise_consumer_errors()
      elif foreign.is_a(error, _PROGRAM_ERRORS):
        kept = _kept.find(foreign.text_of(error))
        if kept is not None and self._all:
          wait_for_programs(calls=False)
          failures.raise_group([kept.exception, *failures.take_deferred()])
        if kept is not None and kept.exception is not error:
          foreign.raise_unchained(kept.exception)
    finally:
      # Breaks the reference cycle through this frame, see `raise_unchained`.
      error = kept = failure = found = unseen = None
      dispatch.forget_failed_tokens()
      _kept.blocks.remove(self._first)

  def _unseen(self, failure: BaseException | None) -> list[BaseException]:
    """Returns the exception of a program whose result was never used: a list of one, or empty."""
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
    found = failure if kept is None else kept.exception
    return [] if found is None else [found]


def _is_unfinished(array: Any) -> bool:
  try:
    return not array.is_ready()
  except RuntimeError:  # another thread deleted or donated it
    return False


def wait_for_programs(wait: Wait | None = None, *, calls: bool = True) -> BaseException | None:
  """Waits until no program of any thread runs; returns the first failed program's error.

  With calls=False it waits for dispatched programs only, not for calls of programs that have not
  returned yet on other threads.

  Raises:
    TimeoutError: the time ran out.
    ProcessError: another process failed, as `wait` found.
  """
  wait = wait or Wait(None)
  late = f"callgate.barrier: programs still run after {wait.seconds} s; increase the timeout"
  failure: BaseException | None = None
  others_return = functools.partial(_others_return, _callgate.new_number())
  if calls and not wait.until(others_return):
    raise TimeoutError(late)
  with escape.reading_frames:  # an array that a gate has for a call is ready, so it isn't kept
    unfinished = [array for array in dispatch.live_arrays() if _is_unfinished(array)]
  for array in unfinished:
    try:
      if not wait.is_plain and not wait.poll(array.is_ready):
        raise TimeoutError(late)
      array.block_until_ready()
    except (TimeoutError, ProcessError):
      raise
    except Exception as error:  # noqa: BLE001 - whatever the program failed with is passed on
      if not array.is_deleted():  # another thread may donate it
        failure = failure or error
  if not fence.pass_by(wait):
    raise TimeoutError(late)
  try:
    if not dispatch.wait_for_effects(wait):
      raise TimeoutError(late)
    dispatch.effects_barrier_alone()
  except (TimeoutError, ProcessError):
    raise
  except Exception as error:  # noqa: BLE001 - as above
    failure = failure or error
  return failure
