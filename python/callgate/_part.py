# SPDX-License-Identifier: Apache-2.0
"""The interface between callgate's core and its parts, which imports neither.

A part is a feature that a program may do without: checks, feeds, started calls, checkpoints. It
joins with a `Part`, of which the core calls the methods, and listens to events that modules below
it tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

# The end of the process, in this order. In each phase the parts come in the order in which they
# joined, in "join" in the reverse.
# hurry: programs still run, and may not wait for ever.
# leave: other processes are told, while their service still runs.
# draw: effects have finished, and calls still come in.
# deliver: records and files get to where they belong, while Python still runs.
# join: calls were refused and waited for; programs have ended, and threads can.
Phase = Literal["hurry", "leave", "draw", "deliver", "join"]
Event = Literal[
  "check failed",  # (message, text of the error)
  "effects barrier",  # (): in `jax.effects_barrier()`, once its programs have ended
  "knob changed",  # (knob)
  "object dropped",  # (number): in a worker, of an object that its parent's programs hold no more
  "object made",  # (count): how many objects of the host there are now
  "program dispatched",  # (returning): True if JAX's C++ code is about to return its results
  "thread ends",  # (thread): on that `callgate.thread`
]


class Part:
  """The methods that the core calls; a part overrides those that it needs.

  Attributes:
    calls: the calls that `wait` waits for, in messages.
  """

  calls = ""

  def define(self, name: str) -> Any:
    """Returns what a program of another process names, with a `define_variant`; else None."""

  def wait(self, seconds: float) -> bool:
    """In `callgate.barrier()`, after all programs: waits for `calls`. False if the time ran out."""
    del seconds
    return True

  def settle(self) -> None:
    """In `callgate.barrier()`, before all records are delivered."""

  def end(self, phase: Phase, seconds: float) -> None:
    """At each phase of the end of the process, which may take so many seconds."""

  def forked(self) -> None:
    """In a fork's child."""


_parts: list[Part] = []
_listeners: dict[Event, list[Callable[..., object]]] = {event: [] for event in get_args(Event)}


def join(part: Part) -> None:
  """Has the core call the part's methods from now on."""
  _parts.append(part)


def parts() -> tuple[Part, ...]:
  """The parts, in the order in which they joined."""
  return tuple(_parts)


def on(event: Event, function: Callable[..., object]) -> None:
  """Calls `function` with the event's values each time. A second `on` of it changes nothing."""
  if function not in _listeners[event]:
    _listeners[event].append(function)


def off(event: Event, function: Callable[..., object]) -> None:
  """Takes a function back, if it is there."""
  _listeners[event][:] = [one for one in _listeners[event] if one != function]


def tell(event: Event, *values: Any) -> None:
  """Calls the event's listeners."""
  for function in tuple(_listeners[event]):
    function(*values)
