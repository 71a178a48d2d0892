"""`callgate.barrier`: where a program waits for what it has sent off, here and in other processes.

Runs on the thread that calls it. Across processes it is a meeting (`_meeting`): each first
does its own part, then says so, and all agree on how the meeting ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from callgate import _callgate, _options, _processes
from callgate._meeting import Meeting
from callgate.errors import (
  LONG_SECONDS,
  raise_consumer_errors,
  raise_deferred,
  raise_program_failure,
  wait_for_programs,
)

_at_barrier: list[Callable[[], object]] = []

_FLUSH_SECONDS = 0.1  # between two looks at the other processes


def at_barrier(settle: Callable[[], object]) -> None:
  """Has `settle` called by each barrier, when the programs have run."""
  _at_barrier.append(settle)


def barrier(timeout: float | None = None, *, all_processes: bool = False) -> None:
  """Waits until every program dispatched so far has run, and every tap's record is delivered.

  Programs of all threads count, also those whose results were dropped. Raises what a gate raised in
  one of them, else what a consumer of taps raised.

  With `all_processes` every process of `jax.distributed` has to call it, as often as the others,
  from one thread. It returns when all have done what is said above. A process that failed raises
  its own exception; the others get a `ProcessError` that names it, within a fraction of a second,
  also where it ended by an exception or without having come here. One that died without a word is
  found missing after `CALLGATE_SILENT_SECONDS` (60). The next barrier begins anew.

  Args:
    timeout: seconds to wait at most; None for no limit, as long as all processes live.
    all_processes: wait for all processes, and learn of their failures.

  Raises:
    TimeoutError: programs still ran, records still waited, or processes were not here, when the
      time was over.
    ProcessError: another process failed, ended or died.
    BaseException: the original exception of a gate whose program failed during the wait, or of a
      consumer, with those of other consumers attached (`callgate_others`).
  """
  _options.or_none(_options.seconds, "barrier", "timeout", timeout, zero=True)
  _options.boolean("barrier", "all_processes", all_processes)
  group = _processes.group() if all_processes else None
  if group is None:
    _settle(timeout, None)
    return
  deadline = None if timeout is None else time.monotonic() + timeout
  with Meeting(group) as meeting:
    _settle(timeout, meeting.watch)
    meeting.wait(deadline, timeout)


def _settle(timeout: float | None, watch: Callable[[], None] | None) -> None:
  """This process's part; `watch` is called now and then, and may end it by raising."""
  if _callgate.channels_abandoned():
    raise RuntimeError(
      "callgate.barrier: this process was forked from one that had channels, whose threads are not "
      "here; expected a process of its own (multiprocessing's 'spawn' or 'forkserver')"
    )
  deadline = None if timeout is None else time.monotonic() + timeout
  failure = wait_for_programs(timeout, watch)
  if not _until(deadline, watch, _callgate.drain_devices, LONG_SECONDS):
    raise TimeoutError(f"callgate.barrier: records still wait on a GPU after {timeout} s")
  for settle in _at_barrier:
    settle()
  if not _until(deadline, watch, _callgate.flush_channels, None):
    pending = {
      name: stats["pending"]
      for name, stats in _callgate.channel_stats().items()
      if stats["pending"]
    }
    raise TimeoutError(f"callgate.barrier: records still wait after {timeout} s: {pending}")
  raise_deferred()
  raise_program_failure(failure)
  raise_consumer_errors()


def _until(
  deadline: float | None,
  watch: Callable[[], None] | None,
  done: Callable[[Any], bool],
  unlimited: float | None,
) -> bool:
  """Whether `done`, which takes seconds to wait, said so in time; `unlimited` are those of none."""
  while True:
    rest = None if deadline is None else max(0.0, deadline - time.monotonic())
    if watch is None:
      return done(unlimited if rest is None else rest)
    if done(_FLUSH_SECONDS if rest is None else min(rest, _FLUSH_SECONDS)):
      return True
    if rest is not None and rest <= _FLUSH_SECONDS:
      return False
    watch()
