# SPDX-License-Identifier: Apache-2.0
"""JAX's higher-order functions with a pure gate in what they are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
import numpy as np
from arithmetic import FUNCTIONS, a_float
from bodies import Envs, WithBody, latest, parameters_of
from grow import grow
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from program import Body, Context, Op, Scope, Step, Values, Writer, drawn

_HALF = """\
half = cg.gate(lambda x: np.asarray(0.5 * x, x.dtype), out=lambda x: x, linear=True,
  vmap="whole", name=NAMES + "half")
@half.deftranspose
def half_back(ct, x):
  return half(ct)
"""
_ADDED = """\
added = cg.gate(lambda x, y: np.asarray(x + y, x.dtype), like=lambda x, y: x + y,
  name=NAMES + "added")
"""


def _summed(x: Any) -> Any:
  return duals.linear(lambda a: np.cumsum(a, 0, dtype=a.dtype), x)


def _half(x: Any) -> Any:
  return duals.scaled(x, 0.5)


def _matrix(x: Any) -> Any:
  """The diagonal of the systems' matrix."""
  return duals.shifted(duals.tanh(x), 2.0)


def _divided(x: Any, by: Any) -> Any:
  return duals.mul(x, duals.inverse(by))


# The text on `x`, the same without callgate, and what it gives; `half` is 0.5 * x.
SOLVED = {
  "associative_scan": ("jax.lax.associative_scan(added, {x})", "jnp.cumsum({x}, 0)", _summed),
  "associative_scan from the end": (
    "jax.lax.associative_scan(added, {x}, reverse=True)",
    "jnp.cumsum({x}[::-1], 0)[::-1]",
    lambda x: duals.linear(lambda a: np.cumsum(a[::-1], 0, dtype=a.dtype)[::-1], x),
  ),
  "custom_linear_solve": (
    "jax.lax.custom_linear_solve(lambda x: 2 * x, {x}, lambda _, b: half(b), symmetric=True)",
    "0.5 * {x}",
    _half,
  ),
  "custom_root": (
    "jax.lax.custom_root(lambda y: 2 * y - {x}, jnp.zeros_like({x}), lambda f, y: half(-f(y)),"
    " lambda g, b: half(b))",
    "0.5 * {x}",
    _half,
  ),
  "linear_transpose": ("jax.linear_transpose(half, {x})({x})[0]", "0.5 * {x}", _half),
  "linear_solver": (
    "solver(2 + jnp.tanh({x}), {x})",
    "{x} / (2 + jnp.tanh({x}))",
    lambda x: _divided(x, _matrix(x)),
  ),
  "linear_solver, factored once": (
    "with_factor({x}, lambda a, x, f: solver(a, x, factor=f))",
    "{x} / (2 + jnp.tanh({x}))",
    lambda x: _divided(x, _matrix(x)),
  ),
  "linear_solver, factored for a loop": (
    "with_factor({x}, lambda a, x, f: jax.lax.fori_loop(0, 2,"
    " lambda _, b: solver(a, b, factor=f), x))",
    "{x} / (2 + jnp.tanh({x})) ** 2",
    lambda x: _divided(_divided(x, _matrix(x)), _matrix(x)),
  ),
  "root of a gate": ("root_of(half({x}), half({x}))", "0.25 * {x} + 0.25", None),
}
_SOLVER = """\
solver = cg.linear_solver(factor=lambda a: a.copy(), solve=lambda f, b: b / f,
  solve_transposed=lambda f, b: b / f, matvec=lambda a, x: a * x)
def with_factor(x, use):
  a = 2 + jnp.tanh(x)
  return use(a, x, solver.factor(a))
"""
_ROOT = """\
root_of = cg.root(lambda x, theta: x - (theta * 0.5 + 0.25),
  solver=lambda theta, x0: np.asarray(theta * 0.5 + 0.25, theta.dtype))
"""


@dataclasses.dataclass(frozen=True)
class Solved(Op):
  """One of `SOLVED`."""

  kind: str

  @property
  def part(self) -> str:  # type: ignore[override]
    return self.kind if self.kind.startswith(("linear_solver", "root")) else ""

  @property
  def transformation(self) -> str:  # type: ignore[override]
    return "" if self.part else self.kind

  def write(self, writer: Writer, step: Step) -> None:
    text, twin, _ = SOLVED[self.kind]
    if not writer.twin:
      for definition in (_HALF, _ADDED, _SOLVER, _ROOT):
        writer.above(definition)
    writer.assign(step, (twin if writer.twin else text).format(x=step.operands[0].name))

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    if self.kind == "root of a gate":
      return [FUNCTIONS["half"][1](_half(x))]
    return [SOLVED[self.kind][2](x)]


@drawn("transformation")
def solved(scope: Scope, context: Context) -> bool:
  kind = scope.draw(st.sampled_from(list(SOLVED)))
  var = a_float(scope)
  if kind.startswith("associative") and (not var.type.shape or 0 in var.type.shape):
    return False
  scope.add(Solved(kind), [var], var.type)
  return True


@dataclasses.dataclass(frozen=True)
class CustomVmap(WithBody):
  """A function with a rule of its own for `vmap`, which maps it as `vmap` does."""

  transformation = "custom_vmap"

  def write(self, writer: Writer, step: Step) -> None:
    writer.above("from jax.custom_batching import custom_vmap")
    writer.function(f"{self.name}_body", self.body, results=self.body.results[0].name)
    parameter = self.body.parameters[0].name
    writer.line(f"{self.name} = custom_vmap(lambda {parameter}: {self.name}_body({parameter}))")
    with writer.block(f"def {self.name}_lanes(size, batched, x):"):
      writer.line(f"return jax.vmap({self.name}_body)(x), True")
    writer.line(f"{self.name}.def_vmap({self.name}_lanes)")
    writer.assign(step, f"{self.name}({step.operands[0].name})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    return machine.run(self.body, lanes, envs, operands)


@drawn("transformation")
def custom_vmap(scope: Scope, context: Context) -> bool:
  if context.order or context.branch:
    return False  # JAX has no reverse mode of it; in branches its rule is asked for all lanes
  var = a_float(scope)
  parameters = parameters_of(scope, [var])
  inside = scope.inner(parameters, closes=False)
  # Lanes that share the operand share its call: as where lanes are apart, nothing counts them.
  grow(inside, context.into(axes=(), sizes=(), branch=context.lanes))
  body = Body(tuple(parameters), tuple(inside.steps), (latest(inside, inside.vars[-1].type),))
  scope.add(CustomVmap(scope.name("f"), body), [var], body.results[0].type)
  return True
