# SPDX-License-Identifier: Apache-2.0
"""The interface between callgate's core and its parts; imports neither.

A part is an optional feature: checks, feeds, started calls, checkpoints. It joins with a `Part`,
whose methods the core calls, and listens to events of the modules below it. A part is imported at
its first use, and then joins; `PARTS` lists the modules. All waits on the host use `Wait`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from callgate import _callgate

# The phases of the end of the process, in order. In each phase the parts run in the order of
# `PARTS`, in "join" in reverse.
# hurry: programs still run, and must not wait forever.
# leave: tell other processes, while their service still runs.
# draw: effects have finished, and calls still arrive.
# deliver: finish records and files, while Python still runs.
# join: calls are refused and have ended, programs have ended, and threads can end.
Phase = Literal["hurry", "leave", "draw", "deliver", "join"]
# The parts in the order in which they settle and end. Each has the module that joins it, and the
# prefixes of its names in programs, also in those of other processes.
PARTS: dict[str, tuple[str, *tuple[str, ...]]] = {
  "futures": ("callgate._futures.ticket",),
  "processes": ("callgate._process.group",),
  "bars": ("callgate._loops.draw",),
  "checkpoints": ("callgate._checkpoints.saver",),
  "runs": ("callgate._runs.run",),
  "channels": ("callgate._tap.channel", "channel:", "tap:"),
  "threads": ("callgate._places.threads",),
  "workers": ("callgate._places.workers",),
  "feeds": ("callgate._feed.feed",),
  "objects": ("callgate._objects.collect",),
  "uses": ("callgate._objects.use", "use:"),
  "checks": ("callgate._gate.check", "check:"),
  "breakpoints": ("callgate._breakpoint.breakpoint", "callgate.breakpoint"),
  "scopes": ("callgate._objects.scopes", "callgate.scope."),
  "stops": ("callgate._steer.stop", "callgate.stop"),
  "prints": ("callgate._tap.print", "tap:callgate.print"),
  "alerts": ("callgate._tap.alert", "tap:callgate.alert"),
  "taps": ("callgate._tap.target", "channel:", "tap:"),
  "libraries": ("callgate._kernel.library",),
  "recordings": ("callgate._replay.block",),
  "serve": ("callgate._serve.serve",),
  "verifications": ("callgate._verify.verify",),
  "turns": ("callgate._gate.turns",),
}
Event = Literal[
  "alert",  # (alert): a `callgate.Alert`, before the callbacks get it
  "channel closed",  # (name)
  "check failed",  # (message, text of the error)
  "effects barrier",  # (): in `jax.effects_barrier()`, once its programs have ended
  "object dropped",  # (number): in a worker, an object that its parent's programs no longer use
  "part loaded",  # (): by `load`
  "channel named",  # (name): a program has a tap to a named channel, traced here or elsewhere
  "program dispatched",  # (returning): True if JAX's C++ code is about to return its results
  "tap value",  # (name, value, lane): a tap's latest scalar, once a batch; the lane may be None
  "run ends",  # (): the open run ends; all its records and alerts are delivered
  "summary",  # (name, value): the open run's summary was set to a JSON value
  "thread ends",  # (thread): runs on that `callgate.thread`
]

FOREVER = 1e9  # seconds, for waits without a limit
_SLICE = 0.1  # seconds of a wait between two checks
_SERVING = 0.001  # the same on a thread that runs calls while it waits


_Made = TypeVar("_Made")


def once(make: Callable[[], _Made]) -> Callable[[], _Made]:
  """Returns a function that returns the result of the first call of `make`, on all threads.

  Another thread waits during that call; `functools.cache` would call `make` twice. If `make`
  raises, the next call tries again.
  """
  lock, made = threading.RLock(), list[_Made]()

  @functools.wraps(make)
  def the_one() -> _Made:
    if not made:
      with lock:
        if not made:
          made.append(make())
    return made[0]

  return the_one


class Wait:
  """A wait for several things in turn, with one deadline and one check for an early end.

  Python's signal handlers run in between, so Ctrl-C ends each wait.

  Attributes:
    seconds: the time for everything; None without a limit.
  """

  __slots__ = ("_end", "_look", "seconds")

  def __init__(self, seconds: float | None, look: Callable[[], object] | None = None) -> None:
    """Starts the time. `look` is called several times a second; its exception ends the wait."""
    self.seconds, self._look = seconds, look
    self._end = None if seconds is None else time.monotonic() + seconds

  def looking(self, look: Callable[[], object]) -> Wait:
    """Returns a wait with the same deadline and another check."""
    other = Wait(None, look)
    other.seconds, other._end = self.seconds, self._end
    return other

  @property
  def left(self) -> float:
    """The seconds left, at least 0; `FOREVER` without a limit."""
    return FOREVER if self._end is None else max(0.0, self._end - time.monotonic())

  @property
  def is_plain(self) -> bool:
    """True without a limit and a check, when a single system wait is enough."""
    return self._end is None and self._look is None

  def until(self, done: Callable[[float], object], most: float = FOREVER) -> bool:
    """Waits until `done` returns True; False if the time ran out.

    Args:
      done: a function that waits for as many seconds as its argument.
      most: the most seconds of one call of `done`.
    """
    most = most if self._look is None else min(most, _SLICE)
    while True:
      left = self.left
      if done(min(left, most)):
        return True
      if left <= most and self.left <= 0:
        return False
      if self._look is not None:
        self._look()

  def poll(self, holds: Callable[[], object]) -> bool:
    """Calls `holds` a thousand times a second until it returns True; False if the time ran out."""
    while not holds():
      if self.left <= 0:
        return False
      if self._look is not None:
        self._look()
      time.sleep(0.001)
    return True

  def event(self, done: threading.Event) -> bool:
    """Waits for an event; a thread of `callgate.thread` runs its calls while it waits."""
    if not _callgate.current_thread():
      return self.until(done.wait)

    def serve(seconds: float) -> bool:
      if not done.is_set():
        _callgate.serve_thread(seconds)
      return done.is_set()

    return self.until(serve, _SERVING)


class Part:
  """The methods that the core calls; a part overrides some of them.

  Attributes:
    name: its key in `PARTS`.
    calls: the name in messages of the calls that `settle` waits for.
  """

  name = ""
  calls = ""

  def define(self, name: str) -> Any:
    """Defines a name that a program of another process calls, with one of the part's prefixes.

    Returns the gate, kernel or tap that now has the name; None if the name is another part's.
    """

  def settle(self, wait: Wait) -> bool:
    """Waits for the part's pending work; False if the time ran out.

    `callgate.barrier()` calls it after all programs have ended and before it delivers the records.
    """
    del wait
    return True

  def end(self, phase: Phase, wait: Wait) -> None:
    """Runs at each phase of the end of the process."""

  def forked(self) -> None:
    """Runs in a forked child, which has no other thread: the parent's threads may hold a lock."""


_Kind = TypeVar("_Kind", bound=Part)
_parts: list[Part] = []  # guarded by _joining; at most one entry for each part
# Guarded by _joining; emptied by `off`.
_listeners: dict[Event, list[Callable[..., object]]] = {event: [] for event in get_args(Event)}
_joining = threading.RLock()  # a listener's `==`, or the collector, may reenter


def joins(name: str) -> Callable[[type[_Kind]], type[_Kind]]:
  """Decorates the class of a part; its module's import makes the part and joins it by this name."""

  def decorated(kind: type[_Kind]) -> type[_Kind]:
    kind.name = name
    join(kind())
    return kind

  return decorated


def join(part: Part) -> None:
  """Makes the core call the part's methods from now on."""
  order = [*PARTS]
  with _joining:
    others = [one for one in _parts if not part.name or one.name != part.name]
    joined = [*others, part]  # replaces a part whose import was interrupted
    joined.sort(key=lambda one: order.index(one.name) if one.name in PARTS else len(order))
    _parts[:] = joined


def parts() -> tuple[Part, ...]:
  """Returns the joined parts in the order of `PARTS`, then others in the order of joining."""
  return tuple(_parts)


def load(name: str) -> Any:
  """Imports a part's module at its first use, for modules below it, which import no part."""
  module = PARTS[name][0]
  if name not in _loaded:
    importlib.import_module(module)  # waits for another thread's import
    _loaded.add(name)
    tell("part loaded")
  return sys.modules[module]


_loaded: set[str] = set()  # atomic: single steps; at most one entry for each part


def load_for(name: str) -> None:
  """Loads the parts that a name in a program belongs to."""
  for part, (_, *beginnings) in PARTS.items():
    if name.startswith(tuple(beginnings)):
      load(part)


def on(event: Event, function: Callable[..., object]) -> None:
  """Calls `function` with the values of each event. Adding it twice has no effect."""
  with _joining:
    if function not in _listeners[event]:
      _listeners[event].append(function)


def off(event: Event, function: Callable[..., object]) -> None:
  """Removes a function, if it was added."""
  with _joining:
    _listeners[event][:] = [one for one in _listeners[event] if one != function]


def listeners(event: Event) -> list[Callable[..., object]]:
  """Returns the listeners to an event, always the same list."""
  return _listeners[event]


def tell(event: Event, *values: Any) -> None:
  """Calls the event's listeners."""
  for function in tuple(_listeners[event]):
    function(*values)


def tell_all(event: Event, *values: Any) -> None:
  """Calls the event's listeners, also where one fails; raises the first failure in the end."""
  failed: list[BaseException] = []
  for function in tuple(_listeners[event]):
    try:
      function(*values)
    except BaseException as error:  # noqa: BLE001 - raised below
      failed.append(error)
  if failed:
    raise failed[0]
