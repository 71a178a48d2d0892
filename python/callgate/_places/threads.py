# SPDX-License-Identifier: Apache-2.0
"""`callgate.thread`: threads that gates run on, one call after the other.

The queue is the runtime's (src/core/named_thread.h). A function that runs on a thread may dispatch
a program whose calls are for the same thread. The dispatch then ends with the program, and the
thread runs what the program calls meanwhile (`after_dispatch`).
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

# By name; those that are open. Guarded by _lock; emptied by `Thread.end`.
_threads: dict[str, Thread] = {}
# Under the GIL: single steps.
_numbers: weakref.WeakValueDictionary[int, ThreadPlace] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_SECONDS = 5.0  # that a thread may take to end what it runs
_NAP = 0.1  # seconds, after which who waits looks for Ctrl-C
# The name of the thread on which objects live that no other place was chosen for.
OBJECTS = "objects"


class ThreadPlace(Uncopied, Place):
  """The core of a `Thread`: the runtime's queue, and what waits to be dropped there.

  Attributes:
    name: what messages and programs call the thread.
    as_held: the same, as handles of objects hold it; None for the thread that is the default.
  """

  def __init__(self, name: str) -> None:
    self.name = name
    self.as_held = None if name == OBJECTS else f"thread '{name}'"
    self.thread = _callgate.NamedThread(name)
    self._dropped: collections.deque[Any] = collections.deque()
    self._drops = threading.Event()  # set while nothing waits to be dropped
    self._drops.set()
    _numbers[self.thread.number] = self

  def __repr__(self) -> str:
    return f"<callgate.thread({self.name!r})>"

  def runs_this(self) -> bool:
    """True on the thread."""
    return self.thread.is_here()

  def submit(self, job: Callable[[], object]) -> bool:
    """Has the thread call `job()`, which raises nothing, in its turn; False once it is closed."""
    return self.thread.submit(job)

  def refuse(self) -> NoReturn:
    raise GateError(f"{self!r}: the thread has been closed")

  def run(self, function: Callable[[], T]) -> T:
    """Calls a function on the thread and waits for it; returns or raises what it does."""
    if self.runs_this():
      return function()
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def job() -> None:
      try:
        results.append(function())
      except BaseException as error:  # noqa: BLE001 - for who waits
        errors.append(error)
      done.set()

    if not self.submit(job):
      self.refuse()
    Wait(None, look=_nothing).until(done.wait)
    if errors:
      raise errors.pop()
    return results.pop()

  def drop(self, values: list[Any]) -> None:
    """Takes values out of a list, and drops them on the thread, which need not be waited for."""
    self._drops.clear()
    self._dropped.extend(values)
    values.clear()
    if self.runs_this() or not self.submit(self._drop):
      self._drop()

  def _drop(self) -> None:
    while self._dropped:
      self._dropped.popleft()  # no name refers to it
    self._drops.set()

  def has_dropped(self, wait: Wait) -> bool:
    """Waits until all that was given to `drop` is gone. False if the time ran out."""
    return self.runs_this() or wait.until(self._drops.wait)

  def end(self) -> None:
    """Has the thread end with what it has been given so far."""
    with _lock:
      known = _threads.get(self.name)
      if known is not None and core(known) is self:
        del _threads[self.name]
    if not self.thread.has_ended(0):  # it runs
      self.submit(self._end)
    self.thread.close()

  def _end(self) -> None:
    _part.tell("thread ends", self)

  def has_ended(self, wait: Wait) -> bool:
    """After `end()`: waits for its end. False if the time ran out."""
    return wait.until(self.thread.has_ended, _NAP)


class Thread(Public[ThreadPlace], Closing):
  """A thread that gates run on, and that objects belong to; made by `callgate.thread`.

  It starts with the first call, or by `start()`, and ends with `close()`, at the end of a `with`
  block, or with this process.
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
    """Starts the thread, where it doesn't run yet.

    Raises:
      GateError: it has been closed.
    """
    if not self._core.submit(_nothing):
      self._core.refuse()
    return self

  def close(self) -> None:
    """Ends the thread; what it runs has 5 seconds to end by itself. Calls fail from then on.

    The objects that live there end with it, on it.

    Raises:
      GateError: it is called on the thread.
    """
    if self._core.runs_this():
      raise GateError(f"{self!r}: a function that runs on the thread can't close it")
    self._core.end()
    self._core.has_ended(Wait(_SECONDS))

  def __enter__(self) -> Self:
    return self.start()


def _nothing() -> None:
  pass


def thread(name: str) -> Thread:
  """A thread for gates to run on, and for objects to live on: `cg.hold(f, run_on=thread)`.

  ```python
  import sqlite3
  import callgate as cg, jax, jax.numpy as jnp

  class Database:  # a connection is for the thread that made it
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

  Its calls run one after the other, in the order in which programs come to them. XLA's threads are
  free meanwhile, as with `run_on="own"`, so the functions may run JAX programs, also such with
  calls for the same thread.

  Args:
    name: calls of one name give the same thread, until it is closed. "objects" is the thread of
      objects for which no other place was chosen.

  Returns:
    A `Thread`, also a context manager.

  Raises:
    GateDefinitionError: the name is none.
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
  """The thread of objects for which no other place was chosen."""
  return thread(OBJECTS)


def current() -> ThreadPlace | None:
  """The thread that runs this, if it is one of `callgate.thread`."""
  number = _callgate.current_thread()
  return _numbers.get(number) if number else None


def at_place(place: str) -> Thread | None:
  """The open thread that handles call so."""
  with _lock:
    return next((one for one in _threads.values() if core(one).as_held == place), None)


def after_dispatch(returning: bool) -> None:
  """After the dispatch of a program with effects, on a thread: runs what the program calls."""
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
  """Waits until no thread has anything to drop. False if the time ran out."""
  with _lock:
    all_of_them = list(_threads.values())
  return all(core(one).has_dropped(wait) for one in all_of_them)


@_part.joins("threads")
class Threads(Part):
  """Has threads drop what lives on them, and end, before the process does."""

  def end(self, phase: Phase, wait: Wait) -> None:
    if phase != "deliver":
      return
    with _lock:
      all_of_them = list(_threads.values())
    for one in all_of_them:
      core(one).end()
    for one in all_of_them:
      core(one).has_ended(wait)
