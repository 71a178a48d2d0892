# SPDX-License-Identifier: Apache-2.0
"""The interface between callgate's core and its parts, which imports neither.

A part is a feature that a program may do without: checks, feeds, started calls, checkpoints. It
joins with a `Part`, of which the core calls the methods, and listens to events that modules below
it tell. A part is imported at its first use, and joins then: `PARTS` has the modules. All that
waits on the host waits by `Wait`.
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

# The end of the process, in this order. In each phase the parts come in the order of `PARTS`, in
# "join" in the reverse.
# hurry: programs still run, and may not wait for ever.
# leave: other processes are told, while their service still runs.
# draw: effects have finished, and calls still come in.
# deliver: records and files get to where they belong, while Python still runs.
# join: calls were refused and waited for; programs have ended, and threads can.
Phase = Literal["hurry", "leave", "draw", "deliver", "join"]
# The parts in the order in which they settle and end. Each has the module that joins it, and the
# beginnings of the names that are its own in programs, also in those of other processes.
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
}
Event = Literal[
  "alert",  # (alert): a `callgate.Alert`, before the callbacks get it
  "channel closed",  # (name)
  "check failed",  # (message, text of the error)
  "effects barrier",  # (): in `jax.effects_barrier()`, once its programs have ended
  "object dropped",  # (number): in a worker, of an object that its parent's programs hold no more
  "part loaded",  # (): by `load`
  "channel named",  # (name): a tap is traced that sends to a channel by its name
  "program dispatched",  # (returning): True if JAX's C++ code is about to return its results
  "tap value",  # (name, value, lane): a tap's newest scalar, once a batch; the lane may be None
  "summary",  # (name, value): of the open run, has been set; a value that JSON has
  "thread ends",  # (thread): on that `callgate.thread`
]

FOREVER = 1e9  # seconds, for waits without a limit
_SLICE = 0.1  # seconds of a wait between two looks
_SERVING = 0.001  # the same on a thread that runs calls meanwhile


_Made = TypeVar("_Made")


def once(make: Callable[[], _Made]) -> Callable[[], _Made]:
  """A function that returns what `make` returned at its first call, to all threads.

  A thread that calls it meanwhile waits; `functools.cache` would make it twice. Where `make`
  raises, the next call makes it anew.
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
  """A wait for several things in turn, with one deadline and one look at what may end it early.

  Python's handlers of signals run in between, so Ctrl-C ends each wait.

  Attributes:
    seconds: the time for all of it; None without a limit.
  """

  __slots__ = ("_end", "_look", "seconds")

  def __init__(self, seconds: float | None, look: Callable[[], object] | None = None) -> None:
    """Begins now. `look` is called some times a second; what it raises ends the wait."""
    self.seconds, self._look = seconds, look
    self._end = None if seconds is None else time.monotonic() + seconds

  def looking(self, look: Callable[[], object]) -> Wait:
    """The same deadline with another look."""
    other = Wait(None, look)
    other.seconds, other._end = self.seconds, self._end
    return other

  @property
  def left(self) -> float:
    """Seconds, at least 0; `FOREVER` without a limit."""
    return FOREVER if self._end is None else max(0.0, self._end - time.monotonic())

  @property
  def is_plain(self) -> bool:
    """True without a limit and a look: one wait of the system serves as well."""
    return self._end is None and self._look is None

  def until(self, done: Callable[[float], object], most: float = FOREVER) -> bool:
    """True once `done` is; it takes the seconds to wait. False if the time ran out.

    Args:
      done: waits by itself, for as long as it is told, and at most `most` seconds at a time.
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
    """True once `holds` is, which is asked a thousand times a second. False if the time ran out."""
    while not holds():
      if self.left <= 0:
        return False
      if self._look is not None:
        self._look()
      time.sleep(0.001)
    return True

  def event(self, done: threading.Event) -> bool:
    """Waits for an event; a thread of `callgate.thread` runs meanwhile what comes for it."""
    if not _callgate.current_thread():
      return self.until(done.wait)

    def serve(seconds: float) -> bool:
      if not done.is_set():
        _callgate.serve_thread(seconds)
      return done.is_set()

    return self.until(serve, _SERVING)


class Part:
  """The methods that the core calls; a part overrides those that it needs.

  Attributes:
    name: its key in `PARTS`.
    calls: the calls that `settle` waits for, in messages.
  """

  name = ""
  calls = ""

  def define(self, name: str) -> Any:
    """Defines a name that a program of another process calls, one of the part's in `PARTS`.

    Returns the gate, kernel or tap that has the name now; None if the name is another part's.
    """

  def settle(self, wait: Wait) -> bool:
    """In `callgate.barrier()`, between the ends of all programs and the delivery of all records.

    Waits for what the part has sent off. False if the time ran out.
    """
    del wait
    return True

  def end(self, phase: Phase, wait: Wait) -> None:
    """At each phase of the end of the process."""

  def forked(self) -> None:
    """In a fork's child, which has no other thread: a lock may be held by one of the parent's."""


_Kind = TypeVar("_Kind", bound=Part)
_parts: list[Part] = []  # guarded by _joining; at most one entry for each part
# Guarded by _joining; emptied by `off`.
_listeners: dict[Event, list[Callable[..., object]]] = {event: [] for event in get_args(Event)}
_joining = threading.RLock()  # a listener's comparison, or the collector, may come back here


def joins(name: str) -> Callable[[type[_Kind]], type[_Kind]]:
  """Decorates the class of a part: one of it joins, under this name, as its module is imported."""

  def decorated(kind: type[_Kind]) -> type[_Kind]:
    kind.name = name
    join(kind())
    return kind

  return decorated


def join(part: Part) -> None:
  """Has the core call the part's methods from now on."""
  order = [*PARTS]
  with _joining:
    others = [one for one in _parts if not part.name or one.name != part.name]
    joined = [*others, part]  # once, if the first import of its module was interrupted
    joined.sort(key=lambda one: order.index(one.name) if one.name in PARTS else len(order))
    _parts[:] = joined


def parts() -> tuple[Part, ...]:
  """The parts that have joined, in the order of `PARTS`, and then in that in which they joined."""
  return tuple(_parts)


def load(name: str) -> Any:
  """The module of a part, imported at its first use: for modules below it, which import no part."""
  module = PARTS[name][0]
  if name not in _loaded:
    importlib.import_module(module)  # waits for a thread that imports it
    _loaded.add(name)
    tell("part loaded")
  return sys.modules[module]


_loaded: set[str] = set()  # under the GIL: single steps; at most one entry for each part


def load_for(name: str) -> None:
  """Loads the parts to which a name in a program belongs."""
  for part, (_, *beginnings) in PARTS.items():
    if name.startswith(tuple(beginnings)):
      load(part)


def on(event: Event, function: Callable[..., object]) -> None:
  """Calls `function` with the event's values each time. A second `on` of it changes nothing."""
  with _joining:
    if function not in _listeners[event]:
      _listeners[event].append(function)


def off(event: Event, function: Callable[..., object]) -> None:
  """Takes a function back, if it is there."""
  with _joining:
    _listeners[event][:] = [one for one in _listeners[event] if one != function]


def listeners(event: Event) -> list[Callable[..., object]]:
  """The listeners to an event, always the same list."""
  return _listeners[event]


def tell(event: Event, *values: Any) -> None:
  """Calls the event's listeners."""
  for function in tuple(_listeners[event]):
    function(*values)
