# SPDX-License-Identifier: Apache-2.0
"""Parts that see how often, or in which lane, they run: feeds, taps with `every=`, lanes' numbers.

A feed's items and a tap's records go round: each execution of the program gets the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import duals
import numpy as np
from arithmetic import a_float
from bodies import without
from hypothesis import strategies as st
from loops import rows_of, stacked, with_rows
from oracle import Lane, Machine, decided, each_lane
from program import Array, Context, Op, Part, Scope, Step, Values, Writer, drawn

ITEM = 0.125  # times its number is an item


@dataclasses.dataclass(frozen=True)
class CountedFeed(Op):
  """Adds the next item of a feed, whose items differ within an execution."""

  part = "feed of numbers"
  counts = True
  name: str

  def write(self, writer: Writer, step: Step) -> None:
    x = step.operands[0].name
    if writer.twin:
      writer.assign(step, x)
      return
    number = writer.taken.get(self.name, 1)
    items = f"(np.float32({ITEM} * (k % {number})) for k in itertools.count())"
    writer.above(f"{self.name} = cg.feed({items}, name=NAMES + '{self.name}')")
    writer.assign(step, f"{x} + {self.name}.next()")

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    return [duals.shifted(x, ITEM * machine.take(lane, self.name))]


@drawn("part")
def counted_feed(scope: Scope, context: Context) -> bool:
  if context.devices or (context.lanes and context.branch):
    return False  # items have no order there
  if context.order > 1:
    return False  # the lanes of `hessian` take an item each
  var = a_float(scope)
  scope.add(CountedFeed(scope.name("feed")), [var], var.type)
  return True


@dataclasses.dataclass(frozen=True)
class EveryTap(Part):
  """A tap of each row in a scan, which sends the first of them alone.

  Attributes:
    together: the axes of devices over which each step is done at the same time.
  """

  part = "tap every"
  counts = True
  name: str
  row: Array
  together: tuple[str, ...]

  def definitions(self) -> Sequence[str]:
    return [
      f"def {self.name}(value, info):\n  if not info.repeated:\n"
      f"    note('{self.name}', {self.row.shape}, value)\n"
    ]

  def text(self, x: str) -> str:
    total = "jnp.sum(x)"
    for axis in self.together:
      total = f"jax.lax.psum({total}, '{axis}')"
    sent = f"x + 0 * {total}" if self.together else "x"
    tap = f"cg.tap({sent}, {self.name}, every={x}.shape[0])"
    return f"jax.lax.scan(lambda _, x: (None, {tap}), None, {x})[1]"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, rows_of(x)[0])
    return [x]


@drawn("part")
def every_tap(scope: Scope, context: Context) -> bool:
  var = with_rows(scope, context)
  devices = [axis for axis in context.axes if axis in ("d", "e")]
  together = () if context.branch else tuple(devices)
  op = EveryTap(scope.name("tap"), without(var.type, 0), together)
  scope.add(op, [var], var.type)
  return True


# A function of an array with two axes of lanes, 2 by 3, in front: what it taps.
LANES = {
  "two vmaps": "jax.vmap(jax.vmap({tap}))",
  "a branch in two vmaps": (
    "jax.vmap(jax.vmap(lambda x: jax.lax.cond(jnp.sum(x) > 2.7, {tap}, lambda x: x, x)))"
  ),
  "a vmap in a branch": (
    "jax.vmap(lambda x: jax.lax.cond(jnp.sum(x) > 2.7, jax.vmap({tap}), lambda x: x, x))"
  ),
  "a branch in a vmap in a branch": (
    "jax.vmap(lambda x: jax.lax.cond(jnp.sum(x) > 2.7, jax.vmap(lambda x: jax.lax.cond("
    "jnp.sum(x) > 2.7, {tap}, lambda x: x, x)), lambda x: x, x))"
  ),
  "a while in two vmaps": (
    "jax.vmap(jax.vmap(lambda x: jax.lax.while_loop(lambda s: s[0] < (jnp.sum(x) > 2.7),"
    " lambda s: (s[0] + 1, {tap}(s[1])), (0, x))[1]))"
  ),
  # A collective needs all lanes: those that don't take the branch run it, too.
  "a branch with a collective in two vmaps": (
    "jax.vmap(jax.vmap(lambda x: jax.lax.cond(jnp.sum(x) > 2.7,"
    " lambda x: {tap}(x) + 0 * jax.lax.psum(x, '{name}'), lambda x: x, x), axis_name='{name}'))"
  ),
  "a loop from the end in a branch in two vmaps": (
    "jax.vmap(jax.vmap(lambda x: jax.lax.cond(jnp.sum(x) > 2.7, lambda x: x + 0 * jax.lax.scan("
    "lambda c, k: (0.5 * {tap}(c) + k, None), x, jnp.arange(3.0), reverse=True)[0],"
    " lambda x: x, x)))"
  ),
}


@dataclasses.dataclass(frozen=True)
class LaneTap(Part):
  """A tap in two `vmap`s of its own, which tells in which of their lanes each value is.

  The lanes are the operand plus 0, 1, ... 5; the result is the operand.
  `where`: above this sum alone.
  """

  name: str
  kind: str
  type: Array
  where: float | None = None

  @property
  def part(self) -> str:  # type: ignore[override]
    return "tap of lanes" + ("" if self.where is None else " where")

  def definitions(self) -> Sequence[str]:
    return [
      f"def {self.name}(value, info):\n  if not info.repeated:\n"
      "    i, j = info.lane[-2:]\n"
      f"    note('{self.name}', {self.type.shape}, value, value * 0 + 10 * i + j)\n"
    ]

  def text(self, x: str) -> str:
    where = "" if self.where is None else f", where=jnp.sum(x) > {self.where}"
    return self._in_lanes(x, f"(lambda x: cg.tap(x, {self.name}{where}))")

  def twin(self, x: str) -> str:
    return self._in_lanes(x, "(lambda x: x)")

  def _in_lanes(self, x: str, tap: str) -> str:
    lanes = f"jnp.stack([jnp.stack([{x} + 3 * i + j for j in range(3)]) for i in range(2)])"
    return f"{LANES[self.kind].format(tap=tap, name=self.name)}({lanes})[0, 0]"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    for i in range(2):
      row = [duals.shifted(x, 3.0 * i + j) for j in range(3)]
      if self.kind.endswith("in a branch") and not decided(stacked(row), 2.7):
        continue
      for j, value in enumerate(row):
        if self.kind.startswith(("a branch", "a while", "a loop")) and not decided(value, 2.7):
          continue
        at = lane.into(f"lane {self.name} outer", i).into(f"lane {self.name}", j)
        for one in self._tapped(value):
          if self.where is None or decided(one, self.where):
            machine.note(at, self.name, one, np.zeros(self.type.shape) + 10 * i + j)
    return [x]

  def _tapped(self, x: Any) -> list[Any]:
    """The values that a lane taps, one after another."""
    tapped = [x]
    for k in (2.0, 1.0) if self.kind.startswith("a loop from the end") else ():
      tapped.append(duals.shifted(duals.scaled(tapped[-1], 0.5), k))
    return tapped


@drawn("part")
def lane_tap(scope: Scope, context: Context) -> bool:
  kinds = list(LANES)
  if context.order:
    kinds.remove("a while in two vmaps")
  kind = "two vmaps" if context.axes else scope.draw(st.sampled_from(kinds))
  where = scope.draw(st.sampled_from([None, 1.3, 3.3]))  # of more lanes than the branch, of fewer
  var = a_float(scope)
  scope.add(LaneTap(scope.name("tap"), kind, var.type, where), [var], var.type)
  return True
