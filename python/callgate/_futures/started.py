# SPDX-License-Identifier: Apache-2.0
"""Calls that are started and run elsewhere: on workers, or on an executor.

Each is a lane of its own, and a thread here waits for it without the GIL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from callgate._call import jax_engine
from callgate._core import encoding
from callgate._core.dtypes import dtype_named
from callgate._gate.callee import GateCallee
from callgate._workers import objects
from callgate._workers.executors import OnExecutor
from callgate._workers.workers import Workers

Types = Sequence[tuple[tuple[int, ...], str]]


def most(gate: GateCallee) -> int:
  """How many started calls of a gate are to be on their way at once."""
  if isinstance(gate.run_on, Workers):
    return 2 * gate.run_on.count
  in_flight: int = gate.elsewhere.in_flight
  return in_flight


def calls_of(gate: GateCallee) -> Callable[..., Callable[[], Any]]:
  """The maker of the gate's calls: `make(here, arrays, lane, interrupts, spec, cast, types)`.

  `interrupts` says how often Ctrl-C had come when the call was started. Such a call returns the
  call's results, as the gate's function would. With `here` it is that of the function in this
  process.
  """
  function, arrays = gate.function, gate.arrays
  on, callee = gate.elsewhere, gate.callee
  run = functools.partial(_on_executor, on) if isinstance(on, OnExecutor) else _on_workers(callee)

  def make(
    here: bool,
    given: Sequence[Any],
    lane: int,
    interrupts: int,
    spec: str,
    cast: bool,
    types: Types,
  ) -> Callable[[], Any]:
    if not here:
      return lambda: _as_declared(spec, run(spec, cast, given, types, lane, interrupts))
    call = functools.partial(_in_this_process, function, arrays, spec, given)
    return functools.partial(objects.on_lane, lane, call)

  return make


def _on_workers(callee: Any) -> Callable[..., list[Any]]:
  site = functools.lru_cache(64)(callee.site)

  def run(
    spec: str, cast: bool, given: Sequence[Any], types: Types, lane: int, interrupts: int
  ) -> list[Any]:
    results = [np.empty(shape, dtype_named(name)) for shape, name in types]
    site(spec, cast).run(given, results, lane, interrupts)
    return results

  return run


def _on_executor(
  on: OnExecutor, spec: str, cast: bool, given: Sequence[Any], types: Types, lane: int,
  interrupts: int,
) -> list[Any]:  # fmt: skip
  del cast, types, lane, interrupts  # who waits checks what comes
  call: Any = _OneLane(tuple(given))
  on.run(spec, call)
  return list(call.results)


class _OneLane:
  """A call's only lane, as `OnExecutor` takes lanes."""

  def __init__(self, operands: tuple[Any, ...]) -> None:
    self._operands = operands
    self.results: tuple[Any, ...] = ()

  def __len__(self) -> int:
    return 1

  def take(self, lane: int) -> tuple[Any, ...]:
    del lane
    return tuple(array.copy() for array in self._operands)  # a retry's, too

  def give(self, lane: int, values: tuple[Any, ...]) -> None:
    del lane
    self.results = values


def _as_declared(spec: str, flat: list[Any]) -> Any:
  if spec == "":
    return flat[0]
  return tuple(flat) if spec == "*" else jax.tree.unflatten(encoding.signature(spec).out_tree, flat)


def _in_this_process(
  function: Callable[..., Any], arrays: str, spec: str, given: Sequence[Any]
) -> Any:
  converted = list(map(jax_engine.host_converter(arrays), given))
  if spec in ("", "*"):
    return function(*converted)
  args, kwargs = encoding.signature(spec).arguments(converted)
  return function(*args, **kwargs)
