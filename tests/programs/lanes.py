# SPDX-License-Identifier: Apache-2.0
"""`vmap`, `shard_map`, and the collectives in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
import numpy as np
from arithmetic import Ramp, a_float
from bodies import (
  Envs,
  WithBody,
  axes_of,
  names_text,
  taken,
  with_axis,
  without,
)
from grow import body_of, grow
from hypothesis import strategies as st
from oracle import Lane, Machine
from program import Body, Context, Op, Scope, Step, Values, Writer, drawn, tuple_text

MOST_LANES = 4


@dataclasses.dataclass(frozen=True)
class Lanes(WithBody):
  """`vmap`, or `shard_map` over devices."""

  number: int
  axes: tuple[int | None, ...]  # of the operands
  out: int  # the axis of the results
  axis: str  # the name of the axis; "lane..." for none

  transformation = "vmap"

  def write(self, writer: Writer, step: Step) -> None:
    function = writer.function(self.name, self.body)
    named = "" if self.axis.startswith("lane") else f", axis_name='{self.axis}'"
    size = f", axis_size={self.number}"
    how = f"jax.vmap({function}, {self.axes}, {self.out}{named}{size})"
    writer.assign_all(step, f"{how}({names_text(step.operands)})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    axis = self.axis if self.axis.startswith("lane") else f"lane {self.axis}"
    n = self.number
    at = [lane.into(axis, i) for lane in lanes for i in range(n)]
    around = [env for env in envs for _ in range(n)]
    inputs = [
      [x if a is None else taken(x, i, a) for x, a in zip(values, self.axes, strict=True)]
      for values in operands
      for i in range(n)
    ]
    found = machine.run(self.body, at, around, inputs)
    stack = lambda rows: np.stack(rows, self.out)
    return [
      [
        duals.linear_of_all(stack, [*column])
        for column in zip(*found[k * n : k * n + n], strict=True)
      ]
      for k in range(len(lanes))
    ]


@drawn("transformation")
@drawn("transformation")
@drawn("transformation")
def vmap(scope: Scope, context: Context) -> bool:
  mapped = scope.of(lambda t: any(0 < n <= MOST_LANES for n in t.shape))
  if not mapped or scope.draw(st.integers(0, 3)) == 0:
    var, number = a_float(scope), scope.draw(st.integers(1, 3))
    along = scope.draw(st.integers(0, len(var.type.shape)))
    mapped = list(scope.add(Ramp(number, along), [var], with_axis(var.type, along, number)))
  first = scope.pick(mapped)
  fit = [i for i, n in enumerate(first.type.shape) if 0 < n <= MOST_LANES]
  several = [i for i in fit if first.type.shape[i] > 1]  # one lane is like none
  axis_of_first = scope.draw(st.sampled_from([*fit, *several, *several]))
  number = first.type.shape[axis_of_first]
  axes: list[int | None] = [axis_of_first]
  operands = [first]
  if scope.draw(st.booleans()):
    second = scope.pick()
    operands.append(second)
    axes.append(scope.draw(st.sampled_from([None, *axes_of(second, number)])))
  parameters = [
    scope.new(var.type if axis is None else without(var.type, axis))
    for var, axis in zip(operands, axes, strict=True)
  ]
  named = not context.branch and scope.draw(st.booleans())
  axis = scope.name("axis" if named else "lane")
  inner = context.into(lanes=True, axes=(), sizes=())
  if named and not context.order:
    axes_inside, sizes = (*context.axes, axis), (*context.sizes, number)
    inner = dataclasses.replace(inner, axes=axes_inside, sizes=sizes)
  body = body_of(scope, parameters, inner)
  least = min(len(var.type.shape) for var in body.results)
  out = scope.draw(st.integers(0, least))
  op = Lanes(scope.name("f"), body, number, tuple(axes), out, axis)
  scope.add(op, operands, *(with_axis(var.type, out, number) for var in body.results))
  return True


@dataclasses.dataclass(frozen=True)
class Psum(Op):
  """A sum over the lanes of a named axis."""

  transformation = "psum"
  axis: str

  def write(self, writer: Writer, step: Step) -> None:
    writer.assign(step, f"jax.lax.psum({step.operands[0].name}, '{self.axis}')")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    groups: dict[Any, list[int]] = {}
    for k, lane in enumerate(lanes):
      key = tuple(one for one in lane.path if one[0] not in (self.axis, f"lane {self.axis}"))
      groups.setdefault(key, []).append(k)
    results: list[Values] = [[] for _ in lanes]
    for members in groups.values():
      total = operands[members[0]][0]
      for k in members[1:]:
        total = duals.add(total, operands[k][0])
      for k in members:
        results[k] = [total]
    return results


@drawn("transformation")
def psum(scope: Scope, context: Context) -> bool:
  if not context.axes or context.branch or context.order:
    return False
  var = a_float(scope)
  scope.add(Psum(scope.draw(st.sampled_from(context.axes))), [var], var.type)
  return True


@dataclasses.dataclass(frozen=True)
class ShardMap(WithBody):
  """`shard_map` over four devices: operands are split along their first axis, or on each device.

  Attributes:
    split: for each operand, True where each device gets a part.
  """

  transformation = "shard_map"
  split: tuple[bool, ...]
  axis: str

  def write(self, writer: Writer, step: Step) -> None:
    writer.above("mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('d',))")
    writer.above("P = jax.sharding.PartitionSpec")
    function = writer.function(self.name, self.body)
    specs = tuple_text("P('d')" if split else "P()" for split in self.split)
    out = tuple_text("P('d')" for _ in step.results)
    how = f"jax.shard_map({function}, mesh=mesh, in_specs={specs}, out_specs={out})"
    writer.assign_all(step, f"{how}({names_text(step.operands)})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    at = [lane.into(self.axis, i) for lane in lanes for i in range(4)]
    inputs = [
      [_part(x, i) if split else x for x, split in zip(values, self.split, strict=True)]
      for values in operands
      for i in range(4)
    ]
    found = machine.run(self.body, at, [env for env in envs for _ in range(4)], inputs)
    return [
      [
        duals.linear_of_all(np.concatenate, [*column])
        for column in zip(*found[4 * k : 4 * k + 4], strict=True)
      ]
      for k in range(len(lanes))
    ]


def _part(x: Any, index: int) -> Any:
  return duals.linear(lambda a: np.split(a, 4)[index], x)


@drawn("transformation")
def shard_map(scope: Scope, context: Context) -> bool:
  if context.devices or context.axes or (context.branch and context.lanes):
    return False
  if any(0 in var.type.shape for var in scope.vars):
    return False  # XLA's partitioner drops calls with empty arrays, JAX's callbacks too
  whole = [var for var in scope.vars if var.type.shape and var.type.shape[0] == 4]
  if not whole:
    var = a_float(scope)
    whole = list(scope.add(Ramp(4, 0), [var], var.type.with_shape(4, *var.type.shape)))
  operands = [scope.pick(whole)]
  if scope.draw(st.booleans()):
    operands.append(scope.pick())
  split = (True, *(False for _ in operands[1:]))
  parameters = [
    scope.new(
      var.type.with_shape(var.type.shape[0] // 4, *var.type.shape[1:]) if apart else var.type
    )
    for var, apart in zip(operands, split, strict=True)
  ]
  axes, sizes = (("d",), (4,)) if not context.order else ((), ())
  inside = scope.inner(parameters, closes=False)
  grow(inside, context.into(devices=True, axes=axes, sizes=sizes))
  results = [var for var in inside.vars if var.type.shape][-1:]
  body = Body(tuple(parameters), tuple(inside.steps), tuple(results))
  op = ShardMap(scope.name("f"), body, split, "d")
  shape = results[0].type.shape
  scope.add(op, operands, results[0].type.with_shape(4 * shape[0], *shape[1:]))
  return True
