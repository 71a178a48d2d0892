# SPDX-License-Identifier: Apache-2.0
"""Loops and lanes that carry tickets of started calls and handles of the host's objects."""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
import numpy as np
from arithmetic import Ramp, a_float
from bodies import without
from hypothesis import strategies as st
from oracle import Lane, Machine, decided, each_lane
from program import Array, Context, Op, Scope, Step, Values, Writer, drawn


def rows_of(x: Any) -> list[Any]:
  return [duals.linear(lambda a, i=i: a[i], x) for i in range(duals.plain(x).shape[0])]


def stacked(rows: list[Any]) -> Any:
  return duals.linear_of_all(np.stack, rows)


TICKETS = {
  "scan": """\
def {g}_step(ticket, x):
  following = {g}.start(x)
  return following, ticket.result()
{g}_last, {g}_ys = jax.lax.scan({g}_step, {g}.start({x}[0]), {x}[1:])
{y} = jnp.concatenate([{g}_ys, {g}_last.result()[None]])""",
  "vmap": "{y} = jax.vmap({g}.start)({x}).result()",
  "vmap of both": "{y} = jax.vmap(lambda x: {g}.start(x).result())({x})",
  "one for all lanes": """\
{g}_tickets = jax.vmap(lambda _: {g}.start({x}[0]))({x})
{y} = jax.vmap({g}.result)({g}_tickets) - {x} + {x}[:1]""",
  "two vmaps": "{y} = jax.vmap({g}.result)(jax.vmap({g}.start)({x}))",
  "cond": """\
{g}_ticket = jax.lax.cond(jnp.sum({x}) > 0.2, lambda x: {g}.start(x), lambda x: {g}.start(2 * x),
  {x}[0])
{y} = jnp.concatenate([{g}_ticket.result()[None], -{x}[1:]])""",
  "jit": """\
{g}_ticket = jax.jit(lambda x: {g}.start(x[0]))({x})
{y} = jnp.concatenate([jax.jit(lambda ticket: ticket.result()[None])({g}_ticket), -{x}[1:]])""",
  "stacked by scan": """\
_, {g}_tickets = jax.lax.scan(lambda _, x: (None, {g}.start(x)), None, {x})
{y} = jax.lax.map(lambda ticket: ticket.result(), {g}_tickets)""",
  "dropped": "{g}.start({x}[0])\n{y} = -{x}",
  "while": """\
_, {g}_last = jax.lax.while_loop(lambda s: s[0] < 2,
  lambda s: (s[0] + 1, {g}.start(s[1].result())), (0, {g}.start({x}[0])))
{y} = jnp.concatenate([{g}_last.result()[None], -{x}[1:]])""",
}


@dataclasses.dataclass(frozen=True)
class Tickets(Op):
  """Starts of -row for the operand's rows, whose tickets go through what `kind` says.

  A ticket is a value of the program: a loop's carry, what a vmap or a branch gives.
  """

  name: str
  kind: str
  row: Array
  is_named: bool  # True for calls on a named thread, which makes them in the order of their starts

  @property
  def part(self) -> str:  # type: ignore[override]
    return "tickets on a named thread" if self.is_named else "tickets"

  def write(self, writer: Writer, step: Step) -> None:
    x, y = step.operands[0].name, step.results[0].name
    if writer.twin:
      writer.line(f"{y} = -{x}")
      return
    place = ", run_on=cg.thread('programs')" if self.is_named else ""
    writer.above(
      f"def {self.name}_host(x):\n  note('{self.name}', {self.row.shape}, x)\n  return -x\n"
      f"{self.name} = cg.gate({self.name}_host, like=lambda x: -x, effect='io',"
      f" name=NAMES + '{self.name}'{place})"
    )
    for line in TICKETS[self.kind].format(g=self.name, x=x, y=y).splitlines():
      writer.line(line)

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    rows = rows_of(x)
    first = rows[0]
    if self.kind == "cond" and not decided(x, 0.2):
      first = duals.scaled(first, 2.0)
    results = [duals.scaled(row, -1.0) for row in (first, *rows[1:])]
    called = rows if self.kind in ("scan", "stacked by scan") or "vmap" in self.kind else [first]
    axis = self.name if "vmap" not in self.kind else f"lane {self.name}"
    for i, row in enumerate(called):
      machine.note(lane.into(axis, i), self.name, row)
    if self.kind == "while":
      for i in range(2):
        machine.note(lane.into(axis, i + 1), self.name, results[0])
        results[0] = duals.scaled(results[0], -1.0)
    return [stacked(results)]


@drawn("part")
def tickets(scope: Scope, context: Context) -> bool:
  kinds = list(TICKETS)
  if context.order:
    kinds.remove("while")  # loops that carry a tangent are refused, or have no reverse mode
  kind = scope.draw(st.sampled_from(kinds))
  var = with_rows(scope, context)
  row, is_named = without(var.type, 0), scope.draw(st.booleans())
  op = Tickets(scope.name("started"), kind, row, is_named)
  scope.add(op, [var], var.type)
  return True


def with_rows(scope: Scope, context: Context) -> Any:
  least = 2 if context.devices else 1  # XLA has no empty arrays there, and some forms have x[1:]
  floats = scope.of(lambda t: t.is_float and bool(t.shape) and least <= t.shape[0] <= 4)
  if floats:
    return scope.pick(floats)
  var = a_float(scope)
  (made,) = scope.add(Ramp(2, 0), [var], var.type.with_shape(2, *var.type.shape))
  return made


HANDLES = {
  "carried": """\
def {g}_step(box, x):
  y = cg.use({g}_value, box, x, out=x, effect='io')
  return {g}(x), y
{g}_last, {g}_ys = jax.lax.scan({g}_step, {g}({x}[0]), jnp.concatenate([{x}[1:], {x}[:1]]))
{y} = {g}_ys""",
  "stacked by vmap": """\
{g}_boxes = jax.vmap({g})({x})
{y} = jax.vmap(lambda box, x: cg.use({g}_value, box, x, out=x, effect='io'))({g}_boxes, {x})""",
  "stacked by scan": """\
_, {g}_boxes = jax.lax.scan(lambda _, x: (None, {g}(x)), None, {x})
{y} = jax.lax.map(lambda two: cg.use({g}_value, two[0], two[1], out=two[1], effect='io'),
  ({g}_boxes, {x}))""",
  "of a branch": """\
{g}_boxes = [jax.lax.cond(jnp.sum({x}) > 0.2, {g}, lambda x: {g}(x), {x}[i])
  for i in range({x}.shape[0])]
{y} = jnp.stack([cg.use({g}_value, box, {x}[i], out={x}[i], effect='io')
  for i, box in enumerate({g}_boxes)])""",
  "of a while": """\
def {g}_step(state):
  i, box, y = state
  return i + 1, {g}(cg.use({g}_value, box, y, out=y, effect='io')), y
_, {g}_box, _ = jax.lax.while_loop(lambda s: s[0] < 2, {g}_step, (0, {g}({x}[0]), {x}[0]))
{y} = jnp.concatenate([cg.use({g}_value, {g}_box, {x}[0], out={x}[0], effect='io')[None] - 2,
  {x}[1:] + 1])""",
  "all at once": """\
{y} = jax.vmap(lambda box, x: cg.use({g}_values, box, x, out=x, effect='io', vmap='whole'))(
  jax.vmap({g})({x}), {x})""",
  "given out": """\
{g}_box, _ = jax.lax.scan(lambda box, x: ({g}(x), None), {g}({x}[0]), {x})
{g}_y = cg.use({g}_value, {g}_box, {x}[0], out={x}[0], effect='io')
{y} = jnp.concatenate([{x}[:-1] + 1, {g}_y[None]])""",
  "changed": """\
{g}_boxes = [{g}({x}[0]), {g}({x}[0])]
{g}_y = cg.use({g}_change, {g}_boxes[0], {x}[0], out={x}[0], effect='io')
{g}_y = cg.use({g}_value, {g}_boxes[1], {g}_y, out={x}[0], effect='io')
{y} = jnp.concatenate([{g}_y[None], {x}[1:] + 1])""",
}


@dataclasses.dataclass(frozen=True)
class Handles(Op):
  """Objects made of the operand's rows, whose handles go through what `kind` says: row + 1."""

  part = "handles"
  name: str
  kind: str
  row: Array

  def write(self, writer: Writer, step: Step) -> None:
    x, y = step.operands[0].name, step.results[0].name
    if writer.twin:
      writer.line(f"{y} = {x} + 1")
      return
    writer.above(
      f"{self.name} = cg.hold(lambda x: x.copy())\n"
      f"def {self.name}_value(made, x):\n  note('{self.name}', {self.row.shape}, made)\n"
      "  return np.asarray(made + 1, x.dtype)\n"
    )
    if self.kind == "all at once":
      writer.above(
        f"def {self.name}_values(made, x):\n  made = np.array(made).reshape(x.shape)\n"
        f"  return {self.name}_value(made, x)\n"
      )
    if self.kind == "changed":
      writer.above(f"def {self.name}_change(made, x):\n  made += 7\n  return x.copy()\n")
    for line in HANDLES[self.kind].format(g=self.name, x=x, y=y).splitlines():
      writer.line(line)

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    rows = rows_of(x)
    if self.kind == "of a while":
      for i in range(3):
        machine.note(lane.into(self.name, i), self.name, duals.shifted(rows[0], float(i)))
    else:
      axis = f"lane {self.name}" if "at once" in self.kind or "vmap" in self.kind else self.name
      used = {"given out": rows[-1:], "changed": rows[:1]}.get(self.kind, rows)
      for i, row in enumerate(used):
        machine.note(lane.into(axis, i), self.name, row)
    return [duals.shifted(x, 1.0)]


@drawn("part")
def handles(scope: Scope, context: Context) -> bool:
  if context.order:
    return False  # they have no derivatives
  var = with_rows(scope, context)
  kind = scope.draw(st.sampled_from(list(HANDLES)))
  scope.add(Handles(scope.name("hold"), kind, without(var.type, 0)), [var], var.type)
  return True
