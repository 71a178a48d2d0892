# SPDX-License-Identifier: Apache-2.0
"""Pieces that operations with bodies share, and `jit` and `checkpoint`, which change no value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import duals
import numpy as np
from arithmetic import Joined
from grow import body_of
from hypothesis import strategies as st
from oracle import Lane, Machine
from program import Array, Body, Context, Op, Scope, Step, Values, Var, Writer, drawn

Envs = list[dict[int, Any]]


@dataclasses.dataclass(frozen=True)
class WithBody(Op):
  name: str
  body: Body

  def bodies(self) -> Sequence[Body]:
    return (self.body,)


def names_text(variables: Sequence[Var]) -> str:
  return ", ".join(var.name for var in variables)


def parameters_of(scope: Scope, variables: Sequence[Var]) -> list[Var]:
  return [scope.new(var.type) for var in variables]


def some(scope: Scope, least: int = 1, most: int = 2) -> list[Var]:
  number = scope.draw(st.integers(least, most))
  return [scope.pick() for _ in range(number)]


def latest(scope: Scope, type_: Array) -> Var:
  return [var for var in scope.vars if var.type == type_][-1]


def following(scope: Scope, type_: Array) -> Var:
  """The latest variable of a type: one that depends on what the scope's steps have made."""
  var = latest(scope, type_)
  made = [one for step in scope.steps for one in step.results if one in scope.vars]
  floats = [one for one in made if one.type.is_float]
  if var in made or not floats or not type_.is_float:
    return var
  return scope.add(Joined(), [var, floats[-1]], type_)[0]


def taken(x: Any, index: int, axis: int) -> Any:
  return duals.linear(lambda a: np.take(a, index, axis), x)


def axes_of(var: Var, number: int) -> list[int]:
  return [i for i, size in enumerate(var.type.shape) if size == number]


def without(type_: Array, axis: int) -> Array:
  return type_.with_shape(*type_.shape[:axis], *type_.shape[axis + 1 :])


def with_axis(type_: Array, axis: int, size: int) -> Array:
  return type_.with_shape(*type_.shape[:axis], size, *type_.shape[axis:])


WRAPPED = {
  "jit": "jax.jit({})",
  "jit inline": "jax.jit({}, inline=True)",
  "remat": "jax.checkpoint({})",
  "remat with a policy": "jax.checkpoint({}, policy=jax.checkpoint_policies.everything_saveable)",
  "remat of dots": "jax.checkpoint({}, policy=jax.checkpoint_policies.dots_saveable)",
}


@dataclasses.dataclass(frozen=True)
class Wrapped(WithBody):
  """A function transformed by what changes no value, of `WRAPPED`."""

  kind: str

  @property
  def transformation(self) -> str:  # type: ignore[override]
    return self.kind

  def write(self, writer: Writer, step: Step) -> None:
    function = writer.function(self.name, self.body)
    writer.assign_all(step, f"{WRAPPED[self.kind].format(function)}({names_text(step.operands)})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    return machine.run(self.body, lanes, envs, operands)


@drawn("transformation")
def wrapped(scope: Scope, context: Context) -> bool:
  kind = scope.draw(st.sampled_from(list(WRAPPED)))
  operands = some(scope)
  body = body_of(scope, parameters_of(scope, operands), context.into(), refs=kind == "jit")
  op = Wrapped(scope.name("f"), body, kind)
  scope.add(op, operands, *(var.type for var in body.results))
  return True
