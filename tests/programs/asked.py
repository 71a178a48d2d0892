# SPDX-License-Identifier: Apache-2.0
"""Ways that ask callgate about a program: where a NaN comes from, and whether a gate is right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import calls
import duals
import forms
from arithmetic import a_float
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from program import Array, Context, Op, Part, Program, Scope, Values, drawn

MAKES_NAN = {  # JAX's name of the operation
  "log": "jnp.log(-1 - x * x)",
  "sqrt": "jnp.sqrt(-1 - x * x)",
  "div": "(x - x) / (x - x)",
}


@dataclasses.dataclass(frozen=True)
class MaybeNan(Part):
  """The operand; while `PLANTED` holds something, a NaN that one operation makes of it."""

  part = "find_nan"
  name: str
  kind: str

  def definitions(self) -> Sequence[str]:
    return [
      "PLANTED = []",
      f"def {self.name}(x):\n  return {MAKES_NAN[self.kind]} if PLANTED else x\n",
    ]

  def text(self, x: str) -> str:
    return f"{self.name}({x})"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    if duals.plain(x).size:
      machine.nans.append(self.name)
    return [x]


@drawn("part")
def maybe_nan(scope: Scope, context: Context) -> bool:
  if context.order:
    return False  # a derivative needs not all of its primals
  var = a_float(scope)
  kind = scope.draw(st.sampled_from(list(MAKES_NAN)))
  scope.add(MaybeNan(scope.name("nan"), kind), [var], var.type)
  return True


_FIND_NAN = """
run = jax.jit(program)
execute(1, lambda: [run(*inputs)])
with cg.config(checks=False, breakpoints=False):
  report = cg.find_nan(lambda *xs: program(*xs))(*inputs)
  assert report is None, f"nothing makes a NaN: {report}"
  PLANTED.append(True)
  report = cg.find_nan(lambda *xs: program(*xs))(*inputs)
  PLANTED.clear()
  settled()
assert (report is not None) == bool(NANS), f"expected one of {NANS}, got {report}"
if report is not None:
  assert report.kind == "nan", report
  name = report.source.rpartition("(")[2].rstrip(")")
  assert NANS.get(name) == report.primitive, f"expected one of {NANS}, got {report}"
execute(1, lambda: [run(*inputs)])
"""
_VERIFIED = """
run = jax.jit(program)
execute(1, lambda: [run(*inputs)])
report = VERIFIED.verify(*ARGUMENTS, seconds=8)
settled()
report.raise_for_failed()
execute(1, lambda: [run(*inputs)])
"""
FIND_NAN, VERIFIED = "find_nan", "verified"
WAYS = {FIND_NAN: _FIND_NAN}
APART = {VERIFIED: _VERIFIED}


def verified(program: Program) -> Op | None:
  """The first of the program's gates that `verify` can be asked about."""
  return next((op for op in program.body.ops() if _is_verified(op)), None)


def _is_verified(op: Op) -> bool:
  if isinstance(op, forms.FormCall):
    form = forms.FORMS[op.kind]
    return form.call == "{g}({x})" and "\n{g} = cg.gate(" in f"\n{form.define}"
  return isinstance(op, calls.Call) and op.form in ("gate", "start")


def lines(program: Program, way: str, machine: Machine) -> list[str]:
  """The names that a way reads, which asks callgate, as text."""
  if way == FIND_NAN:
    kinds = {op.name: op.kind for op in program.body.ops() if isinstance(op, MaybeNan)}
    reached = {name: kinds[name] for name in sorted(set(machine.nans))}
    return [f"NANS = {reached}"]
  if way == VERIFIED:
    op: Any = verified(program)
    number = 2 if isinstance(op, calls.Call) and op.two else 1
    argument = _argument(op.type)
    return [f"VERIFIED, ARGUMENTS = {op.name}, ({f'{argument}, ' * number})"]
  return []


def _argument(type_: Array) -> str:
  size = math.prod(type_.shape)
  return f"jnp.linspace(0.3, 1.7, {size}).reshape({type_.shape}).astype('{type_.dtype}')"
