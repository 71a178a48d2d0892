# SPDX-License-Identifier: Apache-2.0
"""Targets of a tap's records: the runtime's handles, and callgate's own channels."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

from callgate import _callgate
from callgate._core import exact, registry
from callgate._tap import delivery

DEFAULT = "default"  # the channel of taps to functions
# What takes a record that no program sends: (description, the arrays that are sent).
Eager = Callable[[str, Sequence[Any]], None]
T = TypeVar("T")


class Tap:
  """The target of a tap's records: a channel, or a function by way of the default channel."""

  def __init__(
    self, name: str, channel: str, consumer: Any = None, eager: Eager | None = None
  ) -> None:
    self.name = name
    self.eager = eager  # called in the caller's thread where no program is compiled
    self.handle = _callgate.Tap(name, channel=channel, consumer=consumer)
    # A function that is sent to again, from outside of programs, gets a program of its own.
    self.function: weakref.ref[FunctionType] | None = None

  def __repr__(self) -> str:
    return f"<tap '{self.name}'>"


_taps: weakref.WeakValueDictionary[Any, Tap] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_own: dict[str, Any] = {}  # callgate's own channels, such as that of taps to functions
_own_lock = threading.Lock()


def of_channel(name: str) -> Tap:
  """The tap to a channel, by its name; one for all who want it."""
  return shared(_taps, ("channel", name), lambda: Tap(f"channel:{name}", name))


def of_function(function: Callable[..., Any]) -> Tap:
  """The tap to a function; one for each function or bound method, so that JAX's caches hit."""
  start_channel(DEFAULT)

  def make() -> Tap:
    consume = functools.partial(delivery.call_with_rows, delivery.Attached(function))
    name = registry.unique_name(function, prefix="tap:")
    tap = Tap(name, DEFAULT, _callgate.python_consumer(consume))
    if isinstance(function, FunctionType):
      tap.function = weakref.ref(function)
    return tap

  return shared(_taps, ("function", *exact.identity(function)), make)


# Functions that got a record from outside of programs. A lambda that is made for one call takes
# itself out as it dies.
_sent_to: weakref.WeakSet[FunctionType] = weakref.WeakSet()


def is_sent_to_once(tap: Tap) -> bool:
  """True for the first record from outside of programs that goes to a plain function."""
  function = tap.function and tap.function()
  if function is None or function in _sent_to:
    return False
  _sent_to.add(function)
  return True


def of_rows(
  key: Any, consume: Callable[..., None], name: str, *, channel: str, eager: Eager | None
) -> Tap:
  """A tap whose consumer gets `consume(source, rows)`, rows as they are, for `callgate.compat`.

  The same for equal keys, see `shared`. Records go through `channel`, one of callgate's own; `eager`
  takes those that no compiled program sends.
  """
  start_channel(channel)

  def make() -> Tap:
    consumer = _callgate.python_consumer(consume)
    return Tap(registry.free_name(f"tap:{name}"), channel, consumer, eager)

  return shared(_taps, ("rows", key), make)


def shared(cache: weakref.WeakValueDictionary[Any, T], key: Any, make: Callable[[], T]) -> T:
  """The live object of a key, made where there is none.

  What the key has the identity of is to live as long as the object.
  """
  with _lock:
    found = cache.get(key)
    if found is None:
      found = cache[key] = make()
    return found


def start_channel(name: str) -> Any:
  """The runtime's handle on a channel of callgate's own, which is opened once."""
  with _own_lock:
    if name not in _own:
      _own[name] = _callgate.Channel(name, capacity=64 << 20, on_full="block", rate=100.0)
      _own[name].start()
    return _own[name]


def own_channels() -> list[tuple[str, Any]]:
  """Names and handles of callgate's own channels that are open."""
  return list(_own.items())
