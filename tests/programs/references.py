# SPDX-License-Identifier: Apache-2.0
"""References of JAX's (`jax.new_ref`), which bodies change."""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
from arithmetic import a_float
from bodies import (
  Envs,
)
from oracle import Lane, Machine
from program import Context, Op, Scope, Step, Values, Writer, drawn


@dataclasses.dataclass(frozen=True)
class NewRef(Op):
  """A reference of JAX's, which holds the operand at first."""

  transformation = "ref"
  gives_arrays = False

  def write(self, writer: Writer, step: Step) -> None:
    writer.assign(step, f"jax.new_ref({step.operands[0].name})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    return [[Cell(values[0])] for values in operands]


class Cell:
  """Holds the value of a reference of JAX's."""

  def __init__(self, value: Any) -> None:
    self.value = value


@dataclasses.dataclass(frozen=True)
class AddToRef(Op):
  """Adds the second operand to a reference, halved; gives what the reference then holds."""

  transformation = "ref"

  def write(self, writer: Writer, step: Step) -> None:
    ref, x = (var.name for var in step.operands)
    writer.line(f"{ref}[...] = 0.5 * ({ref}[...] + {x})")
    writer.assign(step, f"{ref}[...]")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    for cell, x in operands:
      cell.value = duals.scaled(duals.add(cell.value, x), 0.5)
    return [[cell.value] for cell, _ in operands]


@drawn("transformation")
def ref(scope: Scope, context: Context) -> bool:
  if context.order or context.lanes:
    return False
  if not scope.refs:
    var = a_float(scope)
    scope.refs += scope.add_hidden(NewRef(), [var], var.type)
  cell = scope.pick(scope.refs)
  same = [var for var in scope.vars if var.type == cell.type]
  if not same:
    return False
  scope.add(AddToRef(), [cell, scope.pick(same)], cell.type)
  return True
