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
CHECKPOINTS = "checkpoints: "  # the prefix of the names of channels that save carries
# Takes a record that Python sends: (description, arrays).
Eager = Callable[[str, Sequence[Any]], None]
T = TypeVar("T")


class Tap:
  """The target of a tap's records: a channel, or a function by way of the default channel."""

  def __init__(
    self, name: str, channel: str, consumer: Any = None, eager: Eager | None = None,
    why_not: str = "",
  ) -> None:  # fmt: skip
    self.name = name
    self.why_not = why_not  # the reason why programs for other processes can't send to it, or ""
    self.eager = eager  # called in the caller's thread, outside compiled programs
    self.handle = _callgate.Tap(name, channel=channel, consumer=consumer)
    # The second record from outside of programs makes a program for the function.
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
  """Returns the tap to a channel, by its name; all callers get the same."""
  return shared(_taps, ("channel", name), lambda: Tap(f"channel:{name}", name))


def channel_names() -> list[str]:
  """Returns the names of the channels to which taps of live programs send."""
  with _lock:
    named = [key[1] for key in list(_taps.keys()) if key[0] == "channel"]
  return list(dict.fromkeys([*named, *list(_found)]))


# Taps to channels that programs of other processes name. Atomic: single steps; never
# emptied: one entry for each such channel, since no event reports the end of a loaded program.
_found: dict[str, Tap] = {}


def of_function(function: Callable[..., Any]) -> Tap:
  """Returns the tap to a function; equal functions and methods share it, for JAX's caches."""
  start_channel(DEFAULT)

  def make() -> Tap:
    consume = functools.partial(delivery.call_with_rows, delivery.Attached(function))
    consumer = _callgate.python_consumer(consume, one_by_one=True)
    if exact.reference(function) is None:
      name = registry.unique_name(function, prefix="tap:")
      tap = Tap(name, DEFAULT, consumer, why_not=_why_not(function))
    else:
      base = f"tap:{registry.name_of(function)}"  # programs of other processes find it by this name
      with registry.name_while_alive(base) as name:
        tap = Tap(name, DEFAULT, consumer)
    if isinstance(function, FunctionType):
      tap.function = weakref.ref(function)
    return tap

  return shared(_taps, ("function", *exact.identity(function)), make)


def own(name: str, label: str, function: Callable[..., Any]) -> Callable[[], Tap]:
  """Returns a function that returns callgate's own tap of a name; messages call it `label`."""

  def make() -> Tap:
    function.__name__ = function.__qualname__ = label
    consume = functools.partial(delivery.call_with_rows, delivery.Attached(function))
    start_channel(DEFAULT)
    return Tap(name, DEFAULT, _callgate.python_consumer(consume))

  return _part.once(make)


def _why_not(function: Any) -> str:
  return (
    f"other processes don't have its function, {foreign.qualified_name(function)}. Tap to a "
    "channel's name, as cg.tap(x, 'loss'), and open cg.channel('loss', to=...) in the process "
    "that calls the program; or tap to a function of a module, and trace such a tap there, too"
  )


# Functions that got a record from outside of programs. A lambda that is made for one call leaves
# the set when it dies.
_sent_to: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # atomic: single steps


def is_sent_to_once(tap: Tap) -> bool:
  """True for the first record from outside of programs to a plain function."""
  function = tap.function and tap.function()
  if function is None or function in _sent_to:
    return False
  _sent_to.add(function)
  return True


def of_rows(
  key: Any, function: Any, consume: Callable[..., None], name: str, *, channel: str,
  eager: Eager | None,
) -> Tap:  # fmt: skip
  """Returns a tap whose consumer gets `consume(source, rows)`, unconverted, for `callgate.compat`.

  Equal keys get the same tap, see `shared`. Records go through `channel`, one of callgate's own;
  `eager` takes the records that no compiled program sends.
  """
  start_channel(channel)

  def make() -> Tap:
    consumer = _callgate.python_consumer(consume, one_by_one=True)
    return Tap(registry.free_name(f"tap:{name}"), channel, consumer, eager, _why_not(function))

  return shared(_taps, ("rows", key), make)


def shared(cache: weakref.WeakValueDictionary[Any, T], key: Any, make: Callable[[], T]) -> T:
  """Returns the live object of a key, or makes it.

  If the key contains an object's identity, that object must live as long as the result.
  """
  with _lock:
    found = cache.get(key)
    if found is None:
      found = cache[key] = make()
    return found


def start_channel(name: str) -> Any:
  """Returns the runtime's handle on one of callgate's own channels; opens it at first."""
  _part.load("channels")  # delivers the records at the end of the process
  with _own_lock:
    if name not in _own:
      _own[name] = _callgate.Channel(name, capacity=64 << 20, on_full="block", rate=100.0)
      _own[name].start()
    return _own[name]


def own_channels() -> list[tuple[str, Any]]:
  """Returns the names and handles of callgate's own open channels."""
  return list(_own.items())


@joins("taps")
class Taps(Part):
  """Defines the taps of programs of other processes."""

  def define(self, name: str) -> Any:
    """Raises GateDefinitionError for a tap to a function, which this process doesn't have."""
    kind, _, rest = name.partition(":")
    if kind == "channel":
      _part.tell("channel named", rest)
      return _found.setdefault(rest, of_channel(rest))
    if kind == "tap":
      raise errors.GateDefinitionError(
        f"a program from another process taps to the function '{rest}', but no tap of this "
        "process does. Trace a tap to the same function here first, or export a program that "
        "taps to a channel's name, as cg.tap(x, 'loss')"
      )
    return None
