# SPDX-License-Identifier: Apache-2.0
"""The processes of `jax.distributed` as one of them sees them: who lives, who ended and why.

The engine is JAX's coordination service, a store of texts that every process sees. Each of several
processes has one `Group`, made when `jax.distributed.initialize` is done. Its thread counts up a
key every few seconds, so that the others know a process that died from one that takes its time. A
process that ends says so on its way out.

Keys: `callgate/alive/P` a count, `callgate/ended/P` how process P ended; `meeting.py` has more.
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
_DETAILS = 8000  # characters of a traceback that travel


class Failure(NamedTuple):
  """Describes a failure in a process; travels to the others as JSON."""

  process: int
  kind: str  # name of the exception's type; "" without one
  message: str  # the exception's text, or what is known otherwise
  details: str = ""  # the traceback's end

  @staticmethod
  def of(process: int, error: BaseException) -> Failure:
    """The failure that an exception is; one of another process stays that."""
    if foreign.is_a(error, ProcessError):
      return Failure(error.process, error.kind, error.message)
    error = original_of(error)
    text = foreign.traceback_of(error)
    return Failure(process, foreign.name_of(error), foreign.text_of(error), text[-_DETAILS:])

  @staticmethod
  def parse(text: str) -> Failure:
    return Failure(*json.loads(text))

  def error(self) -> ProcessError:
    """Returns what to raise in another process."""
    error = ProcessError(self.process, self.kind, self.message)
    if self.details:
      foreign.add_note(error, f"callgate: in process {self.process}:\n{self.details.rstrip()}")
    return error


class Group:
  """The processes, as this one sees them: the texts in the store, its own index, their count."""

  def __init__(self, store: distributed.CommonStore, index: int, count: int) -> None:
    self.store, self.index, self.count = store, index, count
    # After them a process that was heard of counts as dead.
    self.silent_seconds = max(1.0, environment.seconds("CALLGATE_SILENT_SECONDS", 60))
    # Looks at the others are rarer the more there are: all ask one coordinator.
    self.look_seconds = 0.2 + 0.002 * count
    self._heard: dict[int, tuple[str, float]] = {}  # by process: its count, and since when
    self._heard_at = 0.0
    self.meetings = 0  # the same in every process, as all take part in all
    self.one_at_a_time = threading.Lock()  # held by the thread that is in a meeting
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._live, name="callgate-alive", daemon=True)
    self._thread.start()

  def ended(self) -> dict[int, Failure]:
    found = self.store.under("callgate/ended/")
    return {int(process): Failure.parse(text) for process, text in found.items()}

  def silent(self) -> list[int]:
    """Processes whose count has stood still for `silent_seconds`."""
    now = time.monotonic()
    if now - self._heard_at >= self.silent_seconds / 8:
      self._heard_at = now
      for process, count in self.store.under("callgate/alive/").items():
        if self._heard.get(int(process), ("", 0.0))[0] != count:
          self._heard[int(process)] = count, now
    last = {process: since for process, (_, since) in self._heard.items() if process != self.index}
    return [process for process, since in last.items() if now - since > self.silent_seconds]

  def say_ended(self, error: BaseException | None) -> None:
    """Tells the others that this process ends: by an exception, or without one."""
    silent = Failure(self.index, "", "ended without coming here")
    failure = silent if error is None else Failure.of(self.index, error)
    with contextlib.suppress(ConnectionError):  # nobody is left to be told
      self.store.put(f"callgate/ended/{self.index}", json.dumps(failure))  # the first word holds

  def leave(self) -> None:
    self._over.set()
    if self._thread is not threading.current_thread():
      self._thread.join(timeout=2)

  def _live(self) -> None:
    with contextlib.suppress(ConnectionError):  # the service has ended: this process does soon
      for count in itertools.count(1):
        self.store.put(f"callgate/alive/{self.index}", str(count), overwrite=True)
        if self._over.wait(self.silent_seconds / 8):
          return


# One thread: `jax.distributed.initialize` and the end of the process are the main thread's.
_group: Group | None = None
_process = 0  # of the operating system, whose group this is: a fork's child has none


def group() -> Group | None:
  """The group of this process; None where it is alone."""
  if distributed.distributed_client() is not None:
    return _group
  if dispatch.has_backend() and (count := jax.process_count()) > 1:
    expected = "all_processes=True: expected jax.distributed to be initialized"
    got = f"{count} processes without it (see jax.distributed.initialize)"
    raise RuntimeError(f"callgate.barrier: {expected}, got {got}")
  return None


def known_index() -> int | None:
  """This process's index, if that can be told without starting JAX's devices."""
  if distributed.distributed_client() is not None:
    return distributed.distributed_place()[0]
  return jax.process_index() if dispatch.has_backend() else None


def fill_index(path: str) -> str:
  """A path with this process's index for each "{process}"; where it has one, this starts JAX."""
  if PLACEHOLDER not in path:
    return path
  known = known_index()
  return path.replace(PLACEHOLDER, str(jax.process_index() if known is None else known))


def meet() -> None:
  """Called once `jax.distributed` has started: this process is one of several from now on."""
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
  """At the end of the process, while the service still runs."""
  global _group
  uncaught: BaseException | None = getattr(sys, "last_value", None)
  _end(None if _is_interactive() else uncaught)
  if _group is not None and os.getpid() == _process:
    _group.leave()
    _group = None


@joins("processes")
class Processes(Part):
  """Tells the group's other processes of this one's end."""

  def end(self, phase: Phase, wait: Wait) -> None:
    del wait
    if phase == "leave":
      leave()


@functools.cache  # once
def _tell_of_uncaught() -> None:
  """Tells the others of an uncaught exception at once: threads may keep the process for long."""
  before = sys.excepthook

  def hook(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    if not _is_interactive():
      _end(error)
    before(kind, error, stack)

  sys.excepthook = hook


def _is_interactive() -> bool:
  """True if an uncaught exception leaves the process at its prompt."""
  return bool(sys.flags.interactive) or hasattr(sys, "ps1")
