# SPDX-License-Identifier: Apache-2.0
"""Targets of a tap's records: the runtime's handles, and callgate's own channels."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

from callgate import _callgate, _part
from callgate._core import errors, exact, foreign, registry
from callgate._part import Part, joins
from callgate._tap import delivery

DEFAULT = "default"  # the channel of taps to functions
CHECKPOINTS = "checkpoints: "  # so begin the names of channels that save carries
# Takes a record that no program sends: (description, the arrays that are sent).
Eager = Callable[[str, Sequence[Any]], None]
T = TypeVar("T")


class Tap:
  """The target of a tap's records: a channel, or a function by way of the default channel."""

  def __init__(
    self, name: str, channel: str, consumer: Any = None, eager: Eager | None = None,
    why_not: str = "",
  ) -> None:  # fmt: skip
    self.name = name
    self.why_not = why_not  # programs for other processes can't send to it; "" where they can
    self.eager = eager  # called in the caller's thread where no program is compiled
    self.handle = _callgate.Tap(name, channel=channel, consumer=consumer)
    # A function that is sent to again, from outside of programs, gets a program of its own.
    self.function: weakref.ref[FunctionType] | None = None

  def __repr__(self) -> str:
    return f"<tap '{self.name}'>"


_taps: weakref.WeakValueDictionary[Any, Tap] = weakref.WeakValueDictionary()  # guarded by _lock
_lock = threading.Lock()
# Callgate's own channels, such as that of taps to functions. Guarded by _own_lock; never emptied:
# one entry for each module that has such a channel.
_own: dict[str, Any] = {}
_own_lock = threading.Lock()


def of_channel(name: str) -> Tap:
  """The tap to a channel, by its name; one for all who want it."""
  return shared(_taps, ("channel", name), lambda: Tap(f"channel:{name}", name))


def channel_names() -> list[str]:
  """The names of channels to which taps of live programs send."""
  with _lock:
    named = [key[1] for key in list(_taps.keys()) if key[0] == "channel"]
  return list(dict.fromkeys([*named, *list(_found)]))


# By channels that programs of other processes name. Under the GIL: single steps; never emptied: one
# entry for each channel that a loaded program names, whose end nothing tells.
_found: dict[str, Tap] = {}


def of_function(function: Callable[..., Any]) -> Tap:
  """The tap to a function; one for each function or bound method, so that JAX's caches hit."""
  start_channel(DEFAULT)

  def make() -> Tap:
    consume = functools.partial(delivery.call_with_rows, delivery.Attached(function))
    consumer = _callgate.python_consumer(consume, one_by_one=True)
    if exact.reference(function) is None:
      name = registry.unique_name(function, prefix="tap:")
      tap = Tap(name, DEFAULT, consumer, why_not=_why_not(function))
    else:
      base = f"tap:{registry.name_of(function)}"  # programs elsewhere find it by that
      with registry.name_while_alive(base) as name:
        tap = Tap(name, DEFAULT, consumer)
    if isinstance(function, FunctionType):
      tap.function = weakref.ref(function)
    return tap

  return shared(_taps, ("function", *exact.identity(function)), make)


def own(name: str, label: str, function: Callable[..., Any]) -> Callable[[], Tap]:
  """A function that gives callgate's own tap of a name, made once; messages name it `label`."""

  def make() -> Tap:
    function.__name__ = function.__qualname__ = label
    consume = functools.partial(delivery.call_with_rows, delivery.Attached(function))
    start_channel(DEFAULT)
    return Tap(name, DEFAULT, _callgate.python_consumer(consume))

  return _part.once(make)


def _why_not(function: Any) -> str:
  return (
    f"other processes don't have its function, {foreign.qualified_name(function)}. "
    "Expected a channel's name, as cg.tap(x, 'loss'), with cg.channel('loss', to=...) where the "
    "program is called; or a function that a module holds by its name, which is tapped there, too"
  )


# Functions that got a record from outside of programs. A lambda that is made for one call takes
# itself out as it dies.
_sent_to: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # under the GIL: single steps


def is_sent_to_once(tap: Tap) -> bool:
  """True for the first record from outside of programs that goes to a plain function."""
  function = tap.function and tap.function()
  if function is None or function in _sent_to:
    return False
  _sent_to.add(function)
  return True


def of_rows(
  key: Any, function: Any, consume: Callable[..., None], name: str, *, channel: str,
  eager: Eager | None,
) -> Tap:  # fmt: skip
  """A tap whose consumer gets `consume(source, rows)`, rows as they are, for `callgate.compat`.

  The same for equal keys, see `shared`. Records go through `channel`, one of callgate's own;
  `eager` takes those that no compiled program sends.
  """
  start_channel(channel)

  def make() -> Tap:
    consumer = _callgate.python_consumer(consume, one_by_one=True)
    return Tap(registry.free_name(f"tap:{name}"), channel, consumer, eager, _why_not(function))

  return shared(_taps, ("rows", key), make)


def shared(cache: weakref.WeakValueDictionary[Any, T], key: Any, make: Callable[[], T]) -> T:
  """The live object of a key, made where there is none.

  An object whose identity is in the key has to live as long as the key's object.
  """
  with _lock:
    found = cache.get(key)
    if found is None:
      found = cache[key] = make()
    return found


def start_channel(name: str) -> Any:
  """The runtime's handle on a channel of callgate's own, which is opened once."""
  _part.load("channels")  # the end of the process delivers its records
  with _own_lock:
    if name not in _own:
      _own[name] = _callgate.Channel(name, capacity=64 << 20, on_full="block", rate=100.0)
      _own[name].start()
    return _own[name]


def own_channels() -> list[tuple[str, Any]]:
  """Names and handles of callgate's own channels that are open."""
  return list(_own.items())


@joins("taps")
class Taps(Part):
  """Defines the taps of programs of other processes."""

  def define(self, name: str) -> Any:
    """Raises GateDefinitionError for a tap to a function, which this process doesn't have."""
    kind, _, rest = name.partition(":")
    if kind == "channel":
      return _found.setdefault(rest, of_channel(rest))
    if kind == "tap":
      raise errors.GateDefinitionError(
        f"a program that was loaded from elsewhere sends to the function '{rest}', to which "
        "nothing of this process does. Expected code that taps to the same function, traced here "
        "first; or a program that sends to a channel's name, as cg.tap(x, 'loss')"
      )
    return None
