# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a program's equations, and rows with the first finding of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from callgate._jax import sources, walk
from callgate._nan import lanes, reach

NONE, NAN, INF = 0, 1, 2


class Rows(NamedTuple):
  """A row for each watched equation, with its first finding.

  If values are followed, the equation's next finding replaces one that reaches no value still in
  use.

  Attributes:
    numbers: the integers of the properties, in their order.
    operands: the least and the greatest number of each operand; NaN for operands without numbers.
  """

  numbers: Any
  operands: Any

  @property
  def kind(self) -> Any:
    """The kind of finding: NONE, NAN or INF."""
    return self.numbers[..., 0]

  @property
  def result(self) -> Any:
    """The index of the result among the equation's results."""
    return self.numbers[..., 1]

  @property
  def place(self) -> Any:
    """The flat index of the first such element."""
    return self.numbers[..., 2]

  @property
  def shard(self) -> Any:
    """The number of the device's part in a `jax.shard_map`; -1 outside."""
    return self.numbers[..., 3]

  @property
  def steps(self) -> Any:
    """The steps of the loops around the equation, outermost first; -1 for missing loops."""
    return self.numbers[..., 4 : 4 + (self.numbers.shape[-1] - 4) // 2]

  @property
  def lanes(self) -> Any:
    """The steps of the loops over lanes, in the same form."""
    return self.numbers[..., 4 + (self.numbers.shape[-1] - 4) // 2 :]


def no_rows(count: int, depth: int, operands: int) -> Rows:
  """Returns rows without findings."""
  numbers = np.full((count, 4 + 2 * depth), -1, np.int32)
  numbers[:, 0] = NONE
  return Rows(jnp.asarray(numbers), jnp.zeros((count, operands, 2), jnp.result_type(float)))


class State(NamedTuple):
  """All findings so far.

  Attributes:
    rows: the findings.
    in_refs: the origins of the values in Refs; None if values are not followed.
    new: new rows by equation number. They enter `rows` at the end of a loop's body or a branch,
      because XLA compiles many small values faster than many updates of a table.
  """

  rows: Rows
  in_refs: Any
  new: dict[int, Rows]

  def settled(self) -> State:
    """Returns the state with all rows in the table."""
    if not self.new:
      return self
    places = np.array(list(self.new), np.int32)
    columns = zip(self.rows, zip(*self.new.values(), strict=True), strict=True)
    rows = Rows(
      *(table.at[places].set(jnp.stack(column), unique_indices=True) for table, column in columns)
    )
    return State(rows, self.in_refs, {})


class Equation(NamedTuple):
  """Describes an equation before the program runs."""

  number: int  # in the program's order
  primitive: str
  callee: str | None  # "gate 'score'", for callgate's calls
  source: str
  loops: int  # the number of loops around it
  lane_counts: tuple[int, ...]  # the lanes of the loops over lanes around it
  lanes: tuple[lanes.Axes, ...]  # the vmap axes of each result
  operands: tuple[Any, ...]  # abstract values
  results: tuple[Any, ...]
  around: tuple[int, ...]  # the numbers of the first equations of the loops around it


@dataclasses.dataclass(frozen=True)
class EqnPlace:
  """An equation's place, and the indices of the loops around it."""

  path: tuple[int, ...] = ()  # the ids of the equations around it
  loops: tuple[Any, ...] = ()
  lanes: tuple[Any, ...] = ()  # the indices of loops over lanes
  lane_counts: tuple[int, ...] = ()
  around: tuple[int, ...] = ()  # the numbers of their first equations
  source: str = ""  # the innermost known source around it
  shard: Any = -1
  used: Any = None  # the origins of values from earlier steps

  def inside(self, eqn: Any) -> EqnPlace:
    source = sources.source_of(eqn) or self.source
    return dataclasses.replace(self, path=(*self.path, id(eqn)), source=source)

  def after(self, state: State, origins: Sequence[Any]) -> EqnPlace:
    """Returns the place in a step of a loop, whose earlier steps left values with these origins."""
    return dataclasses.replace(self, used=reach.union([self.used, state.in_refs, *origins]))


def first_of(rows: Rows, used: Any) -> Rows:
  """Combines the rows of several devices: for each equation the first in program order.

  Rows with used findings come before others. `used` has the origins of each device's results; None
  if values are not followed.
  """
  alive = rows.kind != NONE
  if used is not None:
    these = alive & used[:, : alive.shape[1]]
    alive = jnp.where(these.sum(0, dtype=np.int32) > 0, these, alive)
  for level in range(rows.steps.shape[-1]):
    step = rows.steps[..., level]
    alive &= step == jnp.where(alive, step, np.iinfo(np.int32).max).min(0)
  first = jnp.arange(alive.shape[0])[:, None] == jnp.argmax(alive, 0)

  def of_first(x: Any) -> Any:  # by a sum, which explicitly sharded values allow
    chosen = first.reshape(*first.shape, *(1,) * (x.ndim - 2))
    return jnp.where(chosen, x, 0).sum(0, dtype=x.dtype)

  return jax.tree.map(of_first, rows)


def extents(jaxpr: Any) -> tuple[int, int, int]:
  """Returns the number of equations, of nested loops, and of operands (at most 8)."""
  paths = list(walk.paths(jaxpr))
  depths = [sum(eqn.primitive.name in ("scan", "while") for eqn in path) for path in paths]
  operands = [min(len(path[-1].invars), 8) for path in paths]
  return max(len(paths), 1), max(depths, default=0), max([1, *operands])
