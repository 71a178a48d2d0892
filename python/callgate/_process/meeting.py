# SPDX-License-Identifier: Apache-2.0
"""Meetings of all processes, for `callgate.barrier(all_processes=True)`.

Each process enters meeting N by `with`, does its own part, and waits. The keys in the common store
are `callgate/barrier/N/at/P` (process P has done its part) and `callgate/barrier/N/result` (the
meeting's result; the first text written there counts). Process 0 writes "ok" when all have done
their parts. A process that fails, or finds that another did, writes the failure. All of this runs
on the thread that calls the barrier.
"""

from __future__ import annotations

import json
import time

from callgate._core import foreign
from callgate._core.errors import ProcessError
from callgate._part import Wait
from callgate._process.group import Failure, Group

_OK = "ok"


class Meeting:
  """One barrier of all processes, in this process."""

  def __init__(self, group: Group) -> None:
    self._group = group
    self._keys = ""  # the prefix of this meeting's keys
    self._next_look = 0.0

  def __enter__(self) -> Meeting:
    self._group.one_at_a_time.acquire()
    self._group.meetings += 1
    self._keys = f"callgate/barrier/{self._group.meetings}/"
    return self

  def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
    """Ends the meeting for all if this process's part raised."""
    try:
      if error is not None:
        self._conclude(json.dumps(Failure.of(self._group.index, error)))
        if not foreign.is_a(error, (ProcessError, TimeoutError)) and (other := self._missing()):
          foreign.add_note(error, f"callgate: before that, {other.error()}")  # possibly its cause
    except ConnectionError:
      pass  # this process's own error takes precedence
    finally:
      self._group.one_at_a_time.release()

  def watch(self) -> None:
    """Raises the failure of another process, if there is one; checks a few times a second."""
    if (now := time.monotonic()) < self._next_look:
      return
    self._next_look = now + self._group.look_seconds
    try:
      result = self._group.store.get(self._keys + "result")
      if result is not None and result != _OK:
        raise Failure.parse(result).error()
      missing = self._missing()
    except ConnectionError as error:
      raise Failure(0, "ConnectionError", str(error)).error() from error
    if missing is not None:
      raise missing.error()

  def wait(self, wait: Wait) -> None:
    """Reports that this process has done its part, and waits for all others."""
    group = self._group
    try:
      group.store.put(f"{self._keys}at/{group.index}", _OK)
      absent = list(range(group.count)) if group.index == 0 else []
      while (result := self._result(absent)) is None:
        self.watch()
        if wait.left <= 0:
          came = group.store.under(self._keys + "at/")
          late = [process for process in range(group.count) if str(process) not in came]
          expected = f"all {group.count} processes within {wait.seconds} s"
          message = f"callgate.barrier: expected {expected}, but {late} did not arrive"
          own = json.dumps(Failure(group.index, "TimeoutError", message))
          if (result := self._conclude(own)) == own:
            raise TimeoutError(message)
          break
    except ConnectionError as error:
      raise Failure(0, "ConnectionError", str(error)).error() from error
    if result != _OK:
      raise Failure.parse(result).error()

  def _result(self, absent: list[int]) -> str | None:
    """Waits a moment for the result; process 0 removes the processes that arrived from `absent`."""
    store, seconds = self._group.store, self._group.look_seconds
    if not absent:
      return store.get(self._keys + "result", seconds)
    while absent and store.get(f"{self._keys}at/{absent[-1]}", seconds) is not None:
      absent.pop()
    if absent:
      return store.get(self._keys + "result")
    if (result := self._conclude(_OK)) == _OK:  # all have left the previous meeting
      store.remove(f"callgate/barrier/{self._group.meetings - 1}/")
    return result

  def _missing(self) -> Failure | None:
    """Returns the failure of a process that ended or is silent, unless it had done its part."""
    group = self._group
    silence = f"has not responded for {group.silent_seconds:g} s"
    gone = {process: Failure(process, "", silence) for process in group.silent()} | group.ended()
    gone.pop(group.index, None)
    if not gone:
      return None
    came = group.store.under(self._keys + "at/")  # read last: a process may end after its part
    return next((gone[process] for process in sorted(gone) if str(process) not in came), None)

  def _conclude(self, result: str) -> str:
    """Writes the meeting's result, unless it has one; returns the result."""
    store, key = self._group.store, self._keys + "result"
    return result if store.put(key, result) else store.get(key, 1.0) or result
