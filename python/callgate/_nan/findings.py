# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a program's equations, and rows for what each of them has found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from callgate._jax import sources
from callgate._nan import lanes, reach

NONE, NAN, INF = 0, 1, 2


class Rows(NamedTuple):
  """A row for each equation that is looked at: its first finding.

  A finding that reaches no value that is still in use makes room for the equation's next one, where
  values are followed.

  Attributes:
    numbers: the integers of the properties, in their order.
    operands: least and greatest number of each operand; NaN for those that are no numbers.
  """

  numbers: Any
  operands: Any

  @property
  def kind(self) -> Any:
    """NONE, NAN or INF."""
    return self.numbers[..., 0]

  @property
  def result(self) -> Any:
    """The number of the result among the equation's."""
    return self.numbers[..., 1]

  @property
  def place(self) -> Any:
    """The flat index of the first such element."""
    return self.numbers[..., 2]

  @property
  def shard(self) -> Any:
    """The number of the device's part in a `jax.shard_map`; -1 outside of one."""
    return self.numbers[..., 3]

  @property
  def steps(self) -> Any:
    """The steps of the loops around it, outermost first; -1 where there are fewer."""
    return self.numbers[..., 4 : 4 + (self.numbers.shape[-1] - 4) // 2]

  @property
  def lanes(self) -> Any:
    """Likewise, of loops whose steps are lanes."""
    return self.numbers[..., 4 + (self.numbers.shape[-1] - 4) // 2 :]


def no_rows(count: int, depth: int, operands: int) -> Rows:
  """Rows without a finding."""
  numbers = np.full((count, 4 + 2 * depth), -1, np.int32)
  numbers[:, 0] = NONE
  return Rows(jnp.asarray(numbers), jnp.zeros((count, operands, 2), jnp.result_type(float)))


class State(NamedTuple):
  """All that is found so far.

  Attributes:
    rows: the findings.
    in_refs: the origins of what Refs hold; None if values are not followed.
    new: rows by their equations' numbers, which `rows` gets at the end of a loop's body or a
      branch: XLA compiles many small values faster than many updates of a table.
  """

  rows: Rows
  in_refs: Any
  new: dict[int, Rows]

  def settled(self) -> State:
    """The same with all rows in the table."""
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
  callee: str | None  # "gate 'score'", of a call of callgate's
  source: str
  loops: int  # around it
  lane_counts: tuple[int, ...]  # of the loops around it whose steps are lanes
  lanes: tuple[lanes.Axes, ...]  # of each result, the axes of vmap's
  operands: tuple[Any, ...]  # abstract values
  results: tuple[Any, ...]
  around: tuple[int, ...]  # the numbers of the first equations of the loops around it


@dataclasses.dataclass(frozen=True)
class EqnPlace:
  """Where an equation stands, and the indices of the loops around it."""

  path: tuple[int, ...] = ()  # ids of the equations around it
  loops: tuple[Any, ...] = ()
  lanes: tuple[Any, ...] = ()  # indices of loops whose steps are lanes
  lane_counts: tuple[int, ...] = ()
  around: tuple[int, ...] = ()  # the numbers of their first equations
  source: str = ""  # of the innermost equation around it that has one
  shard: Any = -1
  used: Any = None  # origins of what the steps before this one have left

  def inside(self, eqn: Any) -> EqnPlace:
    source = sources.source_of(eqn) or self.source
    return dataclasses.replace(self, path=(*self.path, id(eqn)), source=source)

  def after(self, state: State, origins: Sequence[Any]) -> EqnPlace:
    """The place in a step of a loop that the steps before have left values with these origins."""
    return dataclasses.replace(self, used=reach.union([self.used, state.in_refs, *origins]))
