# SPDX-License-Identifier: Apache-2.0
"""Derivatives of bodies, and functions that have derivatives of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
import numpy as np
from arithmetic import a_float, last_float
from bodies import (
  Envs,
  WithBody,
  names_text,
  parameters_of,
  some,
)
from grow import grow
from hypothesis import strategies as st
from oracle import Lane, Machine
from program import Array, Body, Context, Scope, Step, Values, Writer, drawn


@dataclasses.dataclass(frozen=True)
class Grad(WithBody):
  """Derivatives of the sum of a body's first result by its first operand.

  Attributes:
    how: "grad", "value_and_grad", "vjp twice", "jvp", "linearize" or "hessian".
  """

  how: str

  @property
  def transformation(self) -> str:  # type: ignore[override]
    return self.how

  def write(self, writer: Writer, step: Step) -> None:
    writer.function(f"{self.name}_body", self.body)
    parameters = names_text(self.body.parameters)
    writer.line(f"{self.name} = lambda {parameters}: jnp.sum({self.name}_body({parameters})[0])")
    x, *others = (var.name for var in step.operands)
    more = "".join(f", {name}" for name in others)
    one = f"lambda x: {self.name}(x{more})"
    results = ", ".join(var.name for var in step.results)
    texts = {
      "grad": f"jax.grad({one})({x})",
      "value_and_grad": f"jax.value_and_grad({one})({x})",
      "jvp": f"jax.jvp({one}, ({x},), (jnp.ones_like({x}),))",
      "hessian": f"jax.hessian({one})({x})",
    }
    if self.how in texts:
      writer.line(f"{results} = {texts[self.how]}")
      return
    value, first, second = (var.name for var in step.results)
    if self.how == "vjp twice":
      writer.line(f"{value}, {self.name}_back = jax.vjp({one}, {x})")
      cotangent, back = f"jnp.ones_like({value})", f"{self.name}_back"  # varying in a shard_map
      writer.line(f"({first},), ({second},) = {back}({cotangent}), {back}(2 * {cotangent})")
    else:
      writer.line(f"{value}, {self.name}_push = jax.linearize({one}, {x})")
      push = f"{self.name}_push"
      writer.line(f"{first}, {second} = {push}(jnp.ones_like({x})), {push}(2 * jnp.ones_like({x}))")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    primal = machine.run(self.body, lanes, envs, operands)
    values = [duals.linear(_total, results[0]) for results in primal]
    if self.how in ("jvp", "linearize"):
      ones = [{0: np.ones_like(duals.plain(some[0]))} for some in operands]
      found = machine.derivative(self.body, lanes, envs, operands, ones)
      slopes = [duals.linear(_total, results[0][1]) for results in found]
      if self.how == "jvp":
        return [[value, slope] for value, slope in zip(values, slopes, strict=True)]
      twice = [duals.scaled(slope, 2.0) for slope in slopes]
      return [list(three) for three in zip(values, slopes, twice, strict=True)]
    gradients = self._gradients(machine, lanes, envs, operands)
    if self.how == "grad":
      return [[gradient] for gradient in gradients]
    if self.how == "value_and_grad":
      return [list(two) for two in zip(values, gradients, strict=True)]
    if self.how == "vjp twice":
      twice = [duals.scaled(gradient, 2.0) for gradient in gradients]
      return [list(three) for three in zip(values, gradients, twice, strict=True)]
    return [[hessian] for hessian in self._hessians(machine, lanes, envs, operands)]

  def _gradients(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> Values:
    """The gradient of each lane, an element at a time."""
    shape = duals.plain(operands[0][0]).shape
    columns: list[Values] = [[] for _ in lanes]
    for basis in _bases(shape):
      found = machine.derivative(self.body, lanes, envs, operands, [{0: basis}] * len(lanes))
      for column, results in zip(columns, found, strict=True):
        column.append(duals.linear(_total, results[0][1]))
    return [_stacked(column, shape) for column in columns]

  def _hessians(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> Values:
    shape = duals.plain(operands[0][0]).shape
    quiet = [lane.quietly() for lane in lanes]
    columns: list[Values] = [[] for _ in lanes]
    for basis in _bases(shape):
      machine.levels += 1
      level = machine.levels
      moved = [[duals.Dual(level, some[0], basis), *some[1:]] for some in operands]
      for column, gradient in zip(
        columns, self._gradients(machine, quiet, envs, moved), strict=True
      ):
        column.append(duals.split(gradient, level)[1])
    return [_stacked(column, shape, shape) for column in columns]


def _total(x: np.ndarray) -> np.ndarray:
  return np.asarray(np.sum(x))


def _bases(shape: tuple[int, ...]) -> list[np.ndarray]:
  size = int(np.prod(shape, dtype=int))
  return [np.reshape(row, shape) for row in np.eye(size)]


def _stacked(column: Values, shape: tuple[int, ...], inner: tuple[int, ...] = ()) -> Any:
  if not column:
    return np.zeros((*shape, *inner))
  return duals.linear_of_all(lambda rows: np.reshape(np.stack(rows), (*shape, *inner)), column)


@drawn("transformation")
@drawn("transformation")
def grad(scope: Scope, context: Context) -> bool:
  if context.order >= 2:
    return False
  ways = ["grad", "value_and_grad", "vjp twice"]
  if not context.reverse or context.order == 0:
    ways += ["jvp", "linearize"]
  if context.order == 0:
    ways.append("hessian")
  how = scope.draw(st.sampled_from(ways))
  x = a_float(scope)
  if int(np.prod(x.type.shape, dtype=int)) > 6:
    return False
  operands = [x, *some(scope, 0, 1)]
  forward = how in ("jvp", "linearize", "hessian")
  into = context.into(
    reverse=context.reverse or how not in ("jvp", "linearize"),
    forward=context.forward or forward,
    order=context.order + (2 if how == "hessian" else 1),
    axes=(),
  )
  parameters = parameters_of(scope, operands)
  inside = scope.inner(parameters)
  grow(inside, into)
  result = last_float(inside)
  body = Body(tuple(parameters), tuple(inside.steps), (result,))
  value, slope = Array((), "float32"), x.type
  types = {
    "grad": [slope],
    "value_and_grad": [value, slope],
    "vjp twice": [value, slope, slope],
    "jvp": [value, value],
    "linearize": [value, value, value],
    "hessian": [slope.with_shape(*slope.shape, *slope.shape)],
  }
  scope.add(Grad(scope.name("f"), body, how), operands, *types[how])
  return True


@dataclasses.dataclass(frozen=True)
class Custom(WithBody):
  """A function with a derivative of its own: twice the true one.

  Attributes:
    kind: "custom_jvp" or "custom_vjp".
  """

  kind: str

  @property
  def transformation(self) -> str:  # type: ignore[override]
    return self.kind

  def write(self, writer: Writer, step: Step) -> None:
    writer.function(f"{self.name}_body", self.body)
    parameters = names_text(self.body.parameters)
    writer.line(
      f"{self.name} = jax.{self.kind}(lambda {parameters}: {self.name}_body({parameters}))"
    )
    if self.kind == "custom_jvp":
      with writer.block(f"def {self.name}_rule(primals, tangents):"):
        writer.line(f"y, t = jax.jvp({self.name}_body, primals, tangents)")
        writer.line("return y, jax.tree.map(twice, t)")
      writer.line(f"{self.name}.defjvp({self.name}_rule)")
    else:
      back = "lambda back, ct: tuple(map(twice, back(ct)))"
      writer.line(f"{self.name}.defvjp(lambda *xs: jax.vjp({self.name}_body, *xs), {back})")
    writer.above("def twice(t):\n  return t if t.dtype == jax.dtypes.float0 else 2 * t\n")
    writer.assign_all(step, f"{self.name}({names_text(step.operands)})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    found = machine.run(self.body, lanes, envs, operands)
    levels = [duals.top(*values) for values in operands]
    return [
      [_twice(x, level) for x in results] for results, level in zip(found, levels, strict=True)
    ]


def _twice(x: Any, level: int) -> Any:
  if level and isinstance(x, duals.Dual) and x.level == level:
    return duals.Dual(level, x.primal, duals.scaled(x.tangent, 2.0))
  return x


@drawn("transformation")
def custom(scope: Scope, context: Context) -> bool:
  if context.order > 1:
    return False  # JAX takes the inner derivative's value from the rule, and no rule for that
  kind = (
    "custom_jvp" if context.forward else scope.draw(st.sampled_from(["custom_jvp", "custom_vjp"]))
  )
  operands = [a_float(scope)]
  into = context.into(
    forward=context.forward or kind == "custom_jvp",
    reverse=context.reverse or kind == "custom_vjp",
    order=context.order + 1,
    axes=(),
  )
  parameters = parameters_of(scope, operands)
  inside = scope.inner(parameters, closes=False)
  grow(inside, into)
  result = last_float(inside)
  body = Body(tuple(parameters), tuple(inside.steps), (result,))
  scope.add(Custom(scope.name("f"), body, kind), operands, result.type)
  return True
