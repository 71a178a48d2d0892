# SPDX-License-Identifier: Apache-2.0
"""An interpreter in NumPy: it says what a program gives, and which of its effects happen.

It runs all lanes of `vmap`s and all devices step by step beside each other, so collectives are sums
over lanes. A lane's effects happen in its own order, each once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from duals import Dual, plain
from program import Body, Program, Values

LARGEST = 1e4  # beyond it float32's rounding is no longer small
CLOSE = 2e-3  # a predicate of values closer than this may go either way


class Ambiguous(Exception):
  """Rounding decides what the program gives."""


@dataclasses.dataclass(frozen=True)
class Lane:
  """Where a body runs.

  Attributes:
    path: the lanes, devices and iterations it is in, each with the name of its axis.
    effects: False where a derivative is taken, whose primal has had its effects.
  """

  path: tuple[tuple[str, int], ...] = ()
  effects: bool = True

  def into(self, axis: str, index: int) -> Lane:
    return dataclasses.replace(self, path=(*self.path, (axis, index)))

  def quietly(self) -> Lane:
    return dataclasses.replace(self, effects=False)

  def without_lanes(self) -> tuple[tuple[str, int], ...]:
    return tuple(one for one in self.path if not one[0].startswith("lane"))


@dataclasses.dataclass(frozen=True)
class Event:
  name: str
  values: tuple[float, ...]


@dataclasses.dataclass
class Expected:
  """How often an event happens: once on each path, or once for lanes that share all operands."""

  event: Event
  most: int
  least: int


class Machine:
  """Runs bodies; keeps the events."""

  def __init__(self) -> None:
    self.events: list[tuple[Event, Lane]] = []
    self.stopped = False  # `cg.stop` was called in this execution
    self.failing: dict[str, list[float]] = {}  # checks that fail, with what they say of each time
    self.nans: list[str] = []  # operations that can make a NaN, each time that one runs
    self.taken: dict[str, int] = {}  # how many items of each feed
    self._items: dict[tuple[str, Any], int] = {}
    self.levels = 0

  def call(self, program: Program) -> tuple[list[np.ndarray], list[tuple[Event, Lane]]]:
    """Runs the program once: its results, and its events."""
    self.events, self.stopped = [], False
    self.failing, self.taken, self._items, self.nans = {}, {}, {}, []
    (results,) = self.run(program.body, [Lane()], [{}], [list(program.inputs)])
    return [plain(x) for x in results], self.events

  def run(
    self, body: Body, lanes: list[Lane], envs: list[dict[int, Any]], operands: list[Values]
  ) -> list[Values]:
    """Runs a body in each of the lanes, of the operands of each."""
    if not lanes:
      return []
    numbers = [var.number for var in body.parameters]
    envs = [
      {**env, **dict(zip(numbers, values, strict=True))}
      for env, values in zip(envs, operands, strict=True)
    ]
    for step in body.steps:
      inputs = [[env[var.number] for var in step.operands] for env in envs]
      outputs = step.op.run(self, lanes, envs, inputs)
      for env, values in zip(envs, outputs, strict=True):
        for var, value in zip(step.results, values, strict=True):
          if step.op.gives_arrays:
            self._looks_right(var.type, plain(value), step)
          env[var.number] = value
    return [[env[var.number] for var in body.results] for env in envs]

  def _looks_right(self, type_: Any, value: np.ndarray, step: Any) -> None:
    assert value.shape == type_.shape, (value.shape, type_, step)
    if value.dtype.kind in "fc" and value.size:
      largest = np.max(np.abs(value))
      if not largest < LARGEST:
        raise Ambiguous(f"values of {largest}")

  def note(self, lane: Lane, name: str, *values: Any) -> None:
    """An event: what the host sees of the values."""
    if lane.effects:
      self.events.append((Event(name, numbers_of(*values)), lane))

  def fail(self, lane: Lane, name: str, number: float) -> None:
    """A check has failed, and says a number."""
    if lane.effects:
      self.failing.setdefault(name, []).append(number)

  def take(self, lane: Lane, name: str) -> int:
    """The number of the item that a lane takes of a feed. A derivative sees that of its primal."""
    key = name, lane.path
    if key not in self._items:
      assert lane.effects, key
      self._items[key] = self.taken.get(name, 0)
      self.taken[name] = self._items[key] + 1
    return self._items[key]

  def derivative(
    self,
    body: Body,
    lanes: list[Lane],
    envs: list[dict[int, Any]],
    operands: list[Values],
    tangents: list[dict[int, Any]],
  ) -> list[list[tuple[Any, Any]]]:
    """Each result with its tangent, by the tangents of operands, of which each lane has a dict.

    The body's effects don't happen: run it before, for its primal.
    """
    self.levels += 1  # above all levels that any value has
    level = self.levels
    duals = [
      [Dual(level, x, some[i]) if i in some else x for i, x in enumerate(values)]
      for values, some in zip(operands, tangents, strict=True)
    ]
    found = self.run(body, [lane.quietly() for lane in lanes], envs, duals)
    return [[_split(x, level) for x in results] for results in found]


def _split(x: Any, level: int) -> tuple[Any, Any]:
  if isinstance(x, Dual) and x.level == level:
    return x.primal, x.tangent
  return x, np.zeros_like(plain(x))


def numbers_of(*values: Any) -> tuple[float, ...]:
  """The numbers that stand for values in an event."""
  flat: list[float] = []
  for value in values:
    array = np.asarray(plain(value))
    if array.dtype.kind == "c":
      array = np.stack([array.real, array.imag])
    flat += array.astype(np.float64).ravel().tolist()
  return tuple(flat)


def decided(value: Any, threshold: float) -> bool:
  """True if the sum is above the threshold; `Ambiguous` where rounding would decide."""
  array = plain(value)
  total = float(np.sum(array.astype(np.float64)))
  if array.dtype.kind == "f" and abs(total - threshold) < CLOSE:
    raise Ambiguous("a predicate is close to its threshold")
  return total > threshold


def counted(events: Sequence[tuple[Event, Lane]]) -> list[Expected]:
  """How often each event is expected: lanes with the very same operands may share a call."""
  groups: dict[Event, list[Lane]] = collections.defaultdict(list)
  for event, lane in events:
    groups[event].append(lane)
  return [Expected(event, len(lanes), _least(lanes)) for event, lanes in groups.items()]


def _least(lanes: Sequence[Lane]) -> int:
  """How many calls there are where lanes share each: as many as a lane makes."""
  most: dict[Any, int] = collections.Counter()
  for lane, count in collections.Counter(lanes).items():
    most[lane.without_lanes()] = max(most[lane.without_lanes()], count)
  return sum(most.values())


def each_lane(f: Callable[..., Any]) -> Callable[..., list[Values]]:
  """`Op.run` of a function of a machine, a lane and its operands, which gives its results."""

  def run(op: Any, machine: Machine, lanes: Any, envs: Any, operands: Any) -> list[Values]:
    return [f(op, machine, lane, *values) for lane, values in zip(lanes, operands, strict=True)]

  return run
