# SPDX-License-Identifier: Apache-2.0
"""The interface of places: where a gate's function runs, chosen by `run_on=`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Types = Sequence[tuple[tuple[int, ...], str]]  # shapes and names of dtypes
# `run(spec, cast, operands, types, lane, interrupts)` makes the call of a lane with flat NumPy
# arrays, and returns the flat results. It ends when Ctrl-C has come more than `interrupts` times.
RunLane = Callable[[str, bool, Sequence[Any], Types, int, int], list[Any]]


class RemoteGate:
  """A gate whose function runs in other processes, as the runtime sees it.

  Attributes:
    most: the most started calls that run at a time.
  """

  most = 1

  def prepare(self) -> None:
    """Checks, while a call is traced, that the place can make it."""

  def runner(self, callee: Any) -> RunLane:
    """Returns the function that makes one lane's call; `callee` is the runtime's handle on it."""
    raise NotImplementedError


class Place:
  """XLA's calling thread, or callgate's threads; the base of all other places.

  Attributes:
    is_here: True if functions run in this process.
    takes: the place's names of gate options that only some places support.
    arrays: the kinds of arrays that functions may get; empty for all.
    thread: the runtime's thread that makes all calls; None if any thread may.
  """

  is_here = True
  takes: tuple[str, ...] = ()
  arrays: tuple[str, ...] = ()
  thread: Any = None

  def run(self, function: Callable[[], T]) -> T:
    """Calls a function in this process, where its gates run; returns or raises its outcome."""
    return function()

  def bind(self, gate: Any) -> tuple[RemoteGate, Any] | None:
    """Returns the interface to a gate that runs elsewhere, and the runtime's handle; else None."""
    del gate


XLA = Place()
