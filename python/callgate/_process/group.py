# SPDX-License-Identifier: Apache-2.0
"""The processes of `jax.distributed`: which live, which ended and why.

It uses JAX's coordination service, a store of texts that all processes share. Each process makes
one `Group` after `jax.distributed.initialize`. The group's thread increments a key every few
seconds, so that the others can distinguish a dead process from a slow one. A process that ends
writes a message first.

Keys: `callgate/alive/P` is a count, `callgate/ended/P` is how process P ended; `meeting.py` has
more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
from types import TracebackType
from typing import NamedTuple

import jax

from callgate._core import environment, foreign
from callgate._core.errors import ProcessError
from callgate._core.failures import original_of
from callgate._jax import dispatch, distributed
from callgate._part import Part, Phase, Wait, joins

PLACEHOLDER = "{process}"
_DETAILS = 8000  # the most characters of a traceback to send


class Failure(NamedTuple):
  """A failure in a process; sent to the others as JSON."""

  process: int
  kind: str  # the name of the exception's type; "" without an exception
  message: str  # the exception's text, or a description
  details: str = ""  # the traceback's end

  @staticmethod
  def of(process: int, error: BaseException) -> Failure:
    """Returns the failure of an exception; keeps the failure of another process."""
    if foreign.is_a(error, ProcessError):
      return Failure(error.process, error.kind, error.message)
    error = original_of(error)
    text = foreign.traceback_of(error)
    return Failure(process, foreign.name_of(error), foreign.text_of(error), text[-_DETAILS:])

  @staticmethod
  def parse(text: str) -> Failure:
    return Failure(*json.loads(text))

  def error(self) -> ProcessError:
    """Returns the exception to raise in another process."""
    error = ProcessError(self.process, self.kind, self.message)
    if self.details:
      foreign.add_note(error, f"callgate: in process {self.process}:\n{self.details.rstrip()}")
    return error


class Group:
  """The processes: the store of texts, this process's index, their number."""

  def __init__(self, store: distributed.CommonStore, index: int, count: int) -> None:
    self.store, self.index, self.count = store, index, count
    # A process counts as dead this long after its last sign of life.
    self.silent_seconds = max(1.0, environment.seconds("CALLGATE_SILENT_SECONDS", 60))
    # Checks are rarer with more processes, because all ask one coordinator.
    self.look_seconds = 0.2 + 0.002 * count
    self._heard: dict[
      int, tuple[str, float]
    ] = {}  # by process: its count, and the time of that count
    self._heard_at = 0.0
    self.meetings = 0  # the same in every process, because all take part in all
    self.one_at_a_time = threading.Lock()  # held during a meeting
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._live, name="callgate-alive", daemon=True)
    self._thread.start()

  def ended(self) -> dict[int, Failure]:
    found = self.store.under("callgate/ended/")
    return {int(process): Failure.parse(text) for process, text in found.items()}

  def silent(self) -> list[int]:
    """Returns the processes whose count has not changed for `silent_seconds`."""
    now = time.monotonic()
    if now - self._heard_at >= self.silent_seconds / 8:
      self._heard_at = now
      for process, count in self.store.under("callgate/alive/").items():
        if self._heard.get(int(process), ("", 0.0))[0] != count:
          self._heard[int(process)] = count, now
    last = {process: since for process, (_, since) in self._heard.items() if process != self.index}
    return [process for process, since in last.items() if now - since > self.silent_seconds]

  def say_ended(self, error: BaseException | None) -> None:
    """Reports to the others that this process ends, by an exception or without one."""
    silent = Failure(self.index, "", "ended without reaching this point")
    failure = silent if error is None else Failure.of(self.index, error)
    with contextlib.suppress(ConnectionError):  # the others have ended
      self.store.put(f"callgate/ended/{self.index}", json.dumps(failure))  # the first text stays

  def leave(self) -> None:
    self._over.set()
    if self._thread is not threading.current_thread():
      self._thread.join(timeout=2)

  def _live(self) -> None:
    with contextlib.suppress(ConnectionError):  # the service has ended, and this process will
      for count in itertools.count(1):
        self.store.put(f"callgate/alive/{self.index}", str(count), overwrite=True)
        if self._over.wait(self.silent_seconds / 8):
          return


# One thread: the main thread calls `jax.distributed.initialize` and ends the process.
_group: Group | None = None
_process = 0  # the process id of the group's process: a forked child has no group


def group() -> Group | None:
  """Returns the group of this process; None for a single process."""
  if distributed.distributed_client() is not None:
    return _group
  if dispatch.has_backend() and (count := jax.process_count()) > 1:
    expected = "all_processes=True: expected jax.distributed to be initialized"
    got = f"{count} processes without it; see jax.distributed.initialize"
    raise RuntimeError(f"callgate.barrier: {expected}, got {got}")
  return None


def known_index() -> int | None:
  """Returns this process's index, if it is known without starting JAX's devices."""
  if distributed.distributed_client() is not None:
    return distributed.distributed_place()[0]
  return jax.process_index() if dispatch.has_backend() else None


def fill_index(path: str) -> str:
  """Replaces each "{process}" in a path by this process's index, which starts JAX."""
  if PLACEHOLDER not in path:
    return path
  known = known_index()
  return path.replace(PLACEHOLDER, str(jax.process_index() if known is None else known))


def meet() -> None:
  """Makes the group; called once `jax.distributed` has started."""
  global _group, _process
  if _group is not None:
    _group.leave()
  _tell_of_uncaught()
  _process = os.getpid()
  place, count = distributed.distributed_place()
  _group = Group(distributed.CommonStore(distributed.distributed_client()), place, count)


def _end(error: BaseException | None) -> None:
  own = _group if os.getpid() == _process else None
  if own is not None and distributed.distributed_client() is not None:
    own.say_ended(error)


def leave() -> None:
  """Ends the group at the end of the process, while the service still runs."""
  global _group
  uncaught: BaseException | None = getattr(sys, "last_value", None)
  _end(None if _is_interactive() else uncaught)
  if _group is not None and os.getpid() == _process:
    _group.leave()
    _group = None


@joins("processes")
class Processes(Part):
  """Reports this process's end to the group's other processes."""

  def end(self, phase: Phase, wait: Wait) -> None:
    del wait
    if phase == "leave":
      leave()


@functools.cache  # runs once
def _tell_of_uncaught() -> None:
  """Reports an uncaught exception to the others at once, because threads may delay the exit."""
  before = sys.excepthook

  def hook(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    if not _is_interactive():
      _end(error)
    before(kind, error, stack)

  sys.excepthook = hook


def _is_interactive() -> bool:
  """Returns True if an uncaught exception leaves the process at its prompt."""
  return bool(sys.flags.interactive) or hasattr(sys, "ps1")
