# SPDX-License-Identifier: Apache-2.0
"""The interface of places: where a gate's function runs, chosen by `run_on=`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Types = Sequence[tuple[tuple[int, ...], str]]  # shapes and dtypes' names
# `run(spec, cast, operands, types, lane, interrupts)` makes the call of a lane, of NumPy's flat
# arrays, and returns the flat results. It ends once Ctrl-C has come more than `interrupts` times.
RunLane = Callable[[str, bool, Sequence[Any], Types, int, int], list[Any]]


class RemoteGate:
  """A gate whose function runs in other processes: answers the runtime about it.

  Attributes:
    most: how many started calls are to be on their way at once.
  """

  most = 1

  def prepare(self) -> None:
    """Finds out, while a call is traced, whether the place will be able to make it."""

  def runner(self, callee: Any) -> RunLane:
    """The function that makes one lane's call; `callee` is the runtime's handle on the gate."""
    raise NotImplementedError


class Place:
  """XLA's calling thread, or one of callgate's; the base of all other places.

  Attributes:
    is_here: True if functions run in this process.
    takes: the options of a gate that this place has a use for, of those that few have.
    arrays: the kinds of arrays that functions get; empty for all.
    thread: the runtime's thread that makes all calls; None where any may.
  """

  is_here = True
  takes: tuple[str, ...] = ()
  arrays: tuple[str, ...] = ()
  thread: Any = None

  def run(self, function: Callable[[], T]) -> T:
    """Calls a function in this process, where its gates run; returns or raises what it does."""
    return function()

  def bind(self, gate: Any) -> tuple[RemoteGate, Any] | None:
    """Answers about a gate that runs elsewhere, and the runtime's handle; None for one here."""
    del gate


XLA = Place()
