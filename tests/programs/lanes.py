# SPDX-License-Identifier: Apache-2.0
"""`vmap` and `shard_map`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
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
from program import Array, Body, Context, Scope, Step, Values, Writer, drawn, tuple_text

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


# Axes of a mesh of four devices; an operand's `spec` names them for each of its own axes.
MESHES = ({"d": 4}, {"d": 2, "e": 2})
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardMap(WithBody):
  """`shard_map` over four devices. The parts of results are along their first axis.

  Attributes:
    mesh: the number of `MESHES`.
    specs: for each operand, the axes of the mesh along which each of its axes is split.
  """

  transformation = "shard_map"
  mesh: int
  specs: tuple[Spec, ...]

  def write(self, writer: Writer, step: Step) -> None:
    axes = MESHES[self.mesh]
    devices = f"np.array(jax.devices()[:4]).reshape({tuple(axes.values())})"
    writer.above(f"mesh{self.mesh} = jax.sharding.Mesh({devices}, {tuple(axes)})")
    writer.above("P = jax.sharding.PartitionSpec")
    function = writer.function(self.name, self.body)
    specs = tuple_text(f"P{tuple(one or None for one in spec)}" for spec in self.specs)
    out = tuple_text(f"P({tuple(axes)})" for _ in step.results)
    how = f"jax.shard_map({function}, mesh=mesh{self.mesh}, in_specs={specs}, out_specs={out})"
    writer.assign_all(step, f"{how}({names_text(step.operands)})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    axes = MESHES[self.mesh]
    places = [
      dict(zip(axes, at, strict=True))
      for at in itertools.product(*(range(size) for size in axes.values()))
    ]
    at = [functools.reduce(_into, place.items(), lane) for lane in lanes for place in places]
    inputs = [
      [_part(x, spec, axes, place) for x, spec in zip(values, self.specs, strict=True)]
      for values in operands
      for place in places
    ]
    found = machine.run(self.body, at, [env for env in envs for _ in range(4)], inputs)
    return [
      [
        duals.linear_of_all(np.concatenate, [*column])
        for column in zip(*found[4 * k : 4 * k + 4], strict=True)
      ]
      for k in range(len(lanes))
    ]


def _into(lane: Lane, place: tuple[str, int]) -> Lane:
  return lane.into(*place)


def _part(x: Any, spec: Spec, axes: dict[str, int], place: dict[str, int]) -> Any:
  """A device's part of an operand."""
  for axis, names in enumerate(spec):
    index, number = 0, 1
    for name in names:
      index, number = index * axes[name] + place[name], number * axes[name]
    x = duals.linear(lambda a, i=index, n=number, axis=axis: np.split(a, n, axis)[i], x)
  return x


def _specs(type_: Array, axes: dict[str, int]) -> list[Spec]:
  """The ways to split an array over the devices, the one over none first."""
  names = list(axes)
  ways: list[Spec] = [(), (tuple(names),), *(((name,),) for name in names)]
  ways += [((a,), (b,)) for a, b in itertools.permutations(names, 2)]
  return [spec for spec in dict.fromkeys(ways) if _shape(type_, spec, axes)]


def _shape(type_: Array, spec: Spec, axes: dict[str, int]) -> Array | None:
  """The type of a device's part; None where it can't be split so."""
  shape = list(type_.shape)
  if len(spec) > len(shape):
    return None
  for axis, names in enumerate(spec):
    number = math.prod(axes[name] for name in names)
    if shape[axis] % number:
      return None
    shape[axis] //= number
  return type_.with_shape(*shape)


@drawn("transformation")
def shard_map(scope: Scope, context: Context) -> bool:
  if context.devices or context.axes or (context.branch and context.lanes):
    return False
  if any(0 in var.type.shape for var in scope.vars):
    return False  # XLA's partitioner drops calls with empty arrays, JAX's callbacks too
  if not scope.meshes:  # of several JAX takes one for the other
    scope.meshes.append(scope.draw(st.integers(0, len(MESHES) - 1)))
  mesh = scope.meshes[0]
  axes = MESHES[mesh]
  whole = [var for var in scope.vars if len(_specs(var.type, axes)) > 1]
  if not whole:
    var = a_float(scope)
    whole = list(scope.add(Ramp(4, 0), [var], var.type.with_shape(4, *var.type.shape)))
  operands = [scope.pick(whole)]
  specs = [scope.draw(st.sampled_from(_specs(operands[0].type, axes)[1:]))]
  if scope.draw(st.booleans()):
    operands.append(scope.pick())
    specs.append(scope.draw(st.sampled_from(_specs(operands[1].type, axes))))
  parts = [_shape(var.type, spec, axes) for var, spec in zip(operands, specs, strict=True)]
  parameters = [scope.new(part) for part in parts if part is not None]
  names, sizes = (tuple(axes), tuple(axes.values())) if not context.order else ((), ())
  inside = scope.inner(parameters, closes=False)
  grow(inside, context.into(devices=True, axes=names, sizes=sizes))
  results = [var for var in inside.vars if var.type.shape][-1:]
  body = Body(tuple(parameters), tuple(inside.steps), tuple(results))
  op = ShardMap(scope.name("f"), body, mesh, tuple(specs))
  shape = results[0].type.shape
  scope.add(op, operands, results[0].type.with_shape(4 * shape[0], *shape[1:]))
  return True
