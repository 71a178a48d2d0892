# SPDX-License-Identifier: Apache-2.0
"""`callgate.thread`: threads that run the calls of gates one after the other.

The runtime has the queue (src/core/named_thread.h). A function on a thread may dispatch a program
with calls for the same thread. Then the dispatch ends with the program, and the thread runs the
program's calls meanwhile (`after_dispatch`).
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar

from callgate import _callgate, _part
from callgate._core import options
from callgate._core.errors import GateError
from callgate._core.public import Closing, Public, Uncopied, core
from callgate._jax import running
from callgate._part import Part, Phase, Wait
from callgate._places.place import Place

T = TypeVar("T")

# The open threads by name. Guarded by _lock; emptied by `Thread.end`.
_threads: dict[str, Thread] = {}
# Atomic: single steps.
_numbers: weakref.WeakValueDictionary[int, ThreadPlace] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_SECONDS = 5.0  # seconds that a thread gets to finish its call
_NAP = 0.1  # seconds between a waiter's checks for Ctrl-C
# The name of the default thread of objects.
OBJECTS = "objects"


class ThreadPlace(Uncopied, Place):
  """The core of a `Thread`: the runtime's queue, and the objects to be dropped there.

  Attributes:
    name: the thread's name in messages and programs.
    as_held: the name in objects' handles; None for the default thread.
  """

  def __init__(self, name: str) -> None:
    self.name = name
    self.as_held = None if name == OBJECTS else f"thread '{name}'"
    self.thread = _callgate.NamedThread(name)
    self._dropped: collections.deque[Any] = collections.deque()
    self._drops = threading.Event()  # set while no object waits to be dropped
    self._drops.set()
    _numbers[self.thread.number] = self

  def __repr__(self) -> str:
    return f"<callgate.thread({self.name!r})>"

  def runs_this(self) -> bool:
    """True on the thread."""
    return self.thread.is_here()

  def submit(self, job: Callable[[], object]) -> bool:
    """Queues `job()`, which must not raise, for the thread; False once the thread is closed."""
    return self.thread.submit(job)

  def refuse(self) -> NoReturn:
    raise GateError(f"{self!r}: the thread is closed; call it before close(), or make another")

  def run(self, function: Callable[[], T]) -> T:
    """Calls a function on the thread and waits for it; returns or raises its outcome."""
    if self.runs_this():
      return function()
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def job() -> None:
      try:
        results.append(function())
      except BaseException as error:  # noqa: BLE001 - raised for the waiter
        errors.append(error)
      done.set()

    if not self.submit(job):
      self.refuse()
    Wait(None, look=_nothing).until(done.wait)
    if errors:
      raise errors.pop()
    return results.pop()

  def drop(self, values: list[Any]) -> None:
    """Empties a list of values, and drops them on the thread, without a wait."""
    self._drops.clear()
    self._dropped.extend(values)
    values.clear()
    if self.runs_this() or not self.submit(self._drop):
      self._drop()

  def _drop(self) -> None:
    while self._dropped:
      self._dropped.popleft()  # the last reference
    self._drops.set()

  def has_dropped(self, wait: Wait) -> bool:
    """Waits until all values given to `drop` are dropped. False if the time ran out."""
    return self.runs_this() or wait.until(self._drops.wait)

  def end(self) -> None:
    """Makes the thread end after the jobs so far."""
    with _lock:
      known = _threads.get(self.name)
      if known is not None and core(known) is self:
        del _threads[self.name]
    if not self.thread.has_ended(0):  # the thread runs
      self.submit(self._end)
    self.thread.close()

  def _end(self) -> None:
    _part.tell("thread ends", self)

  def has_ended(self, wait: Wait) -> bool:
    """Waits for the thread's end, after `end()`. False if the time ran out."""
    return wait.until(self.thread.has_ended, _NAP)


class Thread(Public[ThreadPlace], Closing):
  """A thread on which gates run and objects live; made by `callgate.thread`.

  It starts with the first call or by `start()`, and ends with `close()`, with a `with` block, or
  with this process.
  """

  _makers = "callgate.thread"

  @property
  def name(self) -> str:
    """The name in messages and programs."""
    return self._core.name

  def __reduce__(self) -> Any:
    return thread, (self.name,)

  def __repr__(self) -> str:
    return repr(self._core)

  def start(self) -> Self:
    """Starts the thread, unless it runs already.

    Raises:
      GateError: the thread has been closed.
    """
    if not self._core.submit(_nothing):
      self._core.refuse()
    return self

  def close(self) -> None:
    """Ends the thread; the running call has 5 seconds to finish. Later calls fail.

    The thread first drops the objects that live there.

    Raises:
      GateError: the call comes from the thread itself.
    """
    if self._core.runs_this():
      raise GateError(
        f"{self!r}: a function that runs on the thread can't close it; call "
        "close() from another thread"
      )
    self._core.end()
    self._core.has_ended(Wait(_SECONDS))

  def __enter__(self) -> Self:
    return self.start()


def _nothing() -> None:
  pass


def thread(name: str) -> Thread:
  """Returns a thread on which gates run and objects live: `cg.hold(f, run_on=thread)`.

  ```python
  import sqlite3
  import callgate as cg, jax, jax.numpy as jnp

  class Database:  # a connection works only on the thread that made it
    def __init__(self):
      self.connection = sqlite3.connect(":memory:")
      self.connection.execute("create table t (x real)")

    def insert(self, x):
      self.connection.execute("insert into t values (?)", (float(x),))
      return self.connection.execute("select count(*) from t").fetchone()[0]

    def __del__(self):
      self.connection.close()

  with cg.thread("db") as thread:
    db = cg.hold(Database, run_on=thread)()
    insert = jax.jit(lambda x: cg.use(Database.insert, db, x, out=jnp.int32(0), effect="io"))
    assert [int(insert(x)) for x in (1.0, 2.0)] == [1, 2]
  ```

  The thread runs one call at a time, in the order in which the calls arrive. XLA's threads are free
  meanwhile, as with `run_on="own"`. So the functions may run JAX programs, also programs with calls
  for the same thread.

  Args:
    name: the name in messages and programs, without quotes and newlines. All open threads of one
      name are the same thread. "objects" is the default thread of host objects.

  Returns:
    A `Thread`, also a context manager.

  Raises:
    GateDefinitionError: the name is wrong.
  """
  text = options.text("thread", "name", name)
  if not text or "\n" in text or "'" in text:
    options.refuse("thread", "name", "a name without quotes and newlines", name)
  _part.on("program dispatched", after_dispatch)
  with _lock:
    if text not in _threads:
      _threads[text] = Thread(ThreadPlace(text))
    return _threads[text]


def objects() -> Thread:
  """Returns the default thread of host objects."""
  return thread(OBJECTS)


def current() -> ThreadPlace | None:
  """Returns the thread of `callgate.thread` that runs this, or None."""
  number = _callgate.current_thread()
  return _numbers.get(number) if number else None


def at_place(place: str) -> Thread | None:
  """Returns the open thread of a name in handles, or None."""
  with _lock:
    return next((one for one in _threads.values() if core(one).as_held == place), None)


def after_dispatch(returning: bool) -> None:
  """Runs the calls of a program with effects that was dispatched on a thread."""
  del returning
  if (here := current()) is None or not (programs := running.own_programs()):
    return
  done = threading.Event()

  def wait() -> None:
    running.wait_for(programs)
    done.set()
    here.submit(_nothing)  # wakes the thread

  if not _callgate.submit(wait):  # the process is ending
    return
  while not done.is_set():
    _callgate.serve_thread(_NAP)


def has_dropped(wait: Wait) -> bool:
  """Waits until no thread has objects to drop. False if the time ran out."""
  with _lock:
    all_of_them = list(_threads.values())
  return all(core(one).has_dropped(wait) for one in all_of_them)


@_part.joins("threads")
class Threads(Part):
  """Makes the threads drop their objects and end, before the process ends."""

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase != "deliver":
      return
    with _lock:
      all_of_them = list(_threads.values())
    for one in all_of_them:
      core(one).end()
    for one in all_of_them:
      core(one).has_ended(wait)
