# SPDX-License-Identifier: Apache-2.0
"""Gates, in all their forms, and calls that are started."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import duals
import numpy as np
from arithmetic import ALL, a_float, an_operand, fitted, functions
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from program import Array, Context, Op, Part, Scope, Step, Values, Writer, drawn


def _of(kind: str, x: str, xp: str) -> str:
  return ALL[kind][0].format(np=xp, x=x)


@dataclasses.dataclass(frozen=True)
class Call(Op):
  """A function of the host on one operand, or two: `kind(x) + 0.5 * y`.

  Attributes:
    name: of the gate.
    kind: of `arithmetic.ALL`.
    effect: "pure", "io" or "ordered".
    style: "return" or "inplace".
    vmap: "each" or "whole".
    rule: how it is differentiated: "like", "jvp", "vjp" or "".
    thread: "xla", "own", or "named".
    form: "gate", "call" (`cg.call`), "start" (a started call), "install" (JAX's callbacks on
      callgate's engine).
    type: of the operands and of the result.
    two: True with a second operand.
  """

  name: str
  kind: str
  effect: str
  style: str
  vmap: str
  rule: str
  thread: str
  form: str
  type: Array
  two: bool

  @property
  def part(self) -> str:  # type: ignore[override]
    effect = "" if self.effect == "pure" else f" {self.effect}"
    two = " of two" if self.two else ""
    if self.form != "gate":
      return f"{self.form}{effect}{two}"
    more = "" if self.style == "return" else f" {self.style}"
    more += "" if self.vmap == "each" else f" {self.vmap}"
    places = {"xla": "", "own": " on its own thread", "named": " on a named thread"}
    more += places.get(self.thread, " on an executor")
    return f"gate{effect}{more}{two}"

  def _twin(self, xp: str) -> str:
    return _of(self.kind, "x", xp) + (" + 0.5 * y" if self.two else "")

  def _define(self, writer: Writer) -> None:
    parameters = "x, y" if self.two else "x"
    writer.above(f"def {self.name}_twin({parameters}):\n  return {self._twin('jnp')}\n")
    if writer.twin and self.form != "install":
      return
    note = (
      "" if self.effect == "pure" else f"  note('{self.name}', {self.type.shape}, {parameters})\n"
    )
    value = f"np.asarray({self._twin('np')}, x.dtype)"
    if self.style == "inplace":
      host = f"def {self.name}_host(out, {parameters}):\n{note}  out[...] = {value}\n"
    else:
      host = f"def {self.name}_host({parameters}):\n{note}  return {value}\n"
    writer.above(host)
    if self.form in ("call", "install"):
      return
    options = [f"effect='{self.effect}'", f"style='{self.style}'", f"vmap='{self.vmap}'"]
    options.append(f"name=NAMES + '{self.name}'")
    if self.rule == "like":
      options.append(f"like={self.name}_twin")
    else:
      options.append(f"out=lambda {parameters}: x")
    if self.thread == "own":
      options.append("thread='own'")
    elif self.thread == "named":
      options.append("run_on=cg.thread('programs')")
    elif self.thread == "executor":
      writer.above("executor = concurrent.futures.ThreadPoolExecutor(2)")
      options.append("run_on=executor")
    writer.above(f"{self.name} = cg.gate({self.name}_host, {', '.join(options)})")
    slope = ALL[self.kind][2].format(x="x")
    if self.rule == "jvp":
      unpacked = "(x, y), (dx, dy)" if self.two else "(x,), (dx,)"
      more = " + 0.5 * dy" if self.two else ""
      writer.above(
        f"@{self.name}.defjvp\ndef {self.name}_rule(primals, tangents):\n"
        f"  {unpacked} = primals, tangents\n"
        f"  return {self.name}({parameters}), dx * ({slope}){more}\n"
      )
    elif self.rule == "vjp":
      more = ", 0.5 * ct" if self.two else ","
      writer.above(
        f"{self.name}.defvjp(lambda {parameters}: ({self.name}({parameters}), x),\n"
        f"  lambda x, ct: (ct * ({slope}){more}))\n"
      )

  def write(self, writer: Writer, step: Step) -> None:
    self._define(writer)
    operands = ", ".join(var.name for var in step.operands)
    first = step.operands[0].name
    if self.form == "install":  # its twin is JAX's own
      shape = f"jax.ShapeDtypeStruct({self.type.shape}, '{self.type.dtype}')"
      if self.effect == "pure":
        how = f"callbacks.pure_callback({self.name}_host, {shape}, {operands}"
        how += ", vmap_method='sequential')"
      else:
        ordered = self.effect == "ordered"
        how = f"callbacks.io_callback({self.name}_host, {shape}, {operands}, ordered={ordered})"
      writer.above("from jax.experimental import io_callback")
      writer.above("from callgate.compat import callbacks")
      jax_own = how.replace("callbacks.pure", "jax.pure").replace("callbacks.io_", "io_")
      text = jax_own if writer.twin else how
    elif writer.twin:
      text = f"{self.name}_twin({operands})"
    elif self.form == "call":
      text = f"cg.call({self.name}_host, {first}, {operands}, effect='{self.effect}')"
    elif self.form == "start":
      text = f"{self.name}.start({operands}).result()"
    else:
      text = f"{self.name}({operands})"
    writer.assign(step, text)

  def fits(self, context: Context) -> bool:
    """True if a call may stand there."""
    return not context.order or (self.type.is_float and self.rule in rules(context))

  @each_lane
  def run(self, machine: Machine, lane: Lane, *operands: Any) -> Values:
    if self.effect != "pure":
      machine.note(lane, self.name, *operands)
    y = ALL[self.kind][1](operands[0])
    return [duals.add(y, duals.scaled(operands[1], 0.5)) if self.two else y]


def rules(context: Context) -> Sequence[str]:
  """The derivatives of a gate that may stand there."""
  if not context.order:
    return ["like", "jvp", "vjp", ""]
  return ["like", "jvp"] if context.forward else ["like", "jvp", "vjp"]


@drawn("part")
@drawn("part")
@drawn("part")
def call(scope: Scope, context: Context) -> bool:
  var = an_operand(scope)
  if context.order and not var.type.is_float:
    return False
  kind = scope.draw(st.sampled_from(list(functions(var.type))))
  two = var.type.is_float and scope.draw(st.booleans())
  operands = [var]
  if two:
    operands.append(fitted(scope, scope.pick(scope.of(lambda t: t.is_float)), var.type))
  form = scope.draw(st.sampled_from(["gate", "gate", "gate", "call", "start", "install"]))
  effect = scope.draw(st.sampled_from(["io", "pure", "ordered"]))
  if form == "start" and effect == "ordered":
    effect = "io"
  style, vmap, rule, thread = "return", "each", "", "xla"
  if form in ("call", "install"):
    if context.order:
      return False  # neither has a derivative
  else:
    rule = scope.draw(st.sampled_from(rules(context))) if var.type.is_float else ""
    vmap = "each" if two else scope.draw(st.sampled_from(["each", "whole"]))
    if form == "gate":
      style = scope.draw(st.sampled_from(["return", "inplace"]))
      threads = ["xla", "xla", "own", "named", *(["executor"] if style == "return" else [])]
      thread = scope.draw(st.sampled_from(threads))
  name = scope.name("gate")
  op = Call(name, kind, effect, style, vmap, rule, thread, form, var.type, two)
  scope.add(op, operands, var.type)
  if form in ("gate", "start"):
    scope.gates.append(op)
  return True


@dataclasses.dataclass(frozen=True)
class Statics(Op):
  """Two calls of a gate by static values that may be equal and not the same."""

  part = "static values"
  name: str
  values: tuple[Any, Any]
  type: Array

  def write(self, writer: Writer, step: Step) -> None:
    x = step.operands[0].name
    if writer.twin:
      writer.assign(step, f"{x} + {sum(map(float, self.values))!r}")
      return
    writer.above(
      f"def {self.name}_host(x, *, by):\n"
      f"  kind = np.float32([bool, int, float].index(type(by)) + (str(by) == '-0.0') / 2)\n"
      f"  note('{self.name}', {self.type.shape}, x, x * 0 + kind)\n"
      "  return np.asarray(x + np.float32(by), x.dtype)\n"
    )
    writer.above(
      f"{self.name} = cg.gate({self.name}_host, like=lambda x, *, by: x + by, effect='io',"
      f" name=NAMES + '{self.name}')"
    )
    a, b = self.values
    writer.assign(step, f"{self.name}({self.name}({x}, by={a!r}), by={b!r})")

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    for by in self.values:
      kind = [bool, int, float].index(type(by)) + (str(by) == "-0.0") / 2
      machine.note(lane, self.name, x, np.zeros_like(duals.plain(x)) + kind)
      x = duals.shifted(x, float(by))
    return [x]


@dataclasses.dataclass(frozen=True)
class Nested(Part):
  """A gate whose function runs a JAX program, with a gate in it: sin(x) + 1."""

  part = "gate that runs a program"
  name: str
  type: Array

  def definitions(self) -> Sequence[str]:
    return [
      f"{self.name}_inner = jax.jit(cg.gate(lambda x: np.sin(x), out=lambda x: x, thread='own',"
      f" name=NAMES + '{self.name}_inner'))\n"
      f"def {self.name}_host(x):\n  note('{self.name}', {self.type.shape}, x)\n"
      f"  return np.asarray({self.name}_inner(x.copy()) + 1)\n"
      f"{self.name} = cg.gate({self.name}_host, like=lambda x: jnp.sin(x) + 1, effect='io',"
      f" thread='own', name=NAMES + '{self.name}')"
    ]

  def twin(self, x: str) -> str:
    return f"jnp.sin({x}) + 1"

  def text(self, x: str) -> str:
    return f"{self.name}({x})"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, x)
    return [duals.shifted(duals.sin(x), 1.0)]


@dataclasses.dataclass(frozen=True)
class Start(Op):
  """Starts a call; the result is a ticket. The host gives -x."""

  part = "start"
  name: str
  place: str
  type: Array

  def write(self, writer: Writer, step: Step) -> None:
    x = step.operands[0].name
    if writer.twin:
      writer.assign(step, f"-{x}")
      return
    writer.above(
      f"def {self.name}_host(x):\n  note('{self.name}', {self.type.shape}, x)\n  return -x\n"
    )
    places = {"": "", "named": ", run_on=cg.thread('programs')"}
    writer.above(
      f"{self.name} = cg.gate({self.name}_host, like=lambda x: -x, effect='io',"
      f" name=NAMES + '{self.name}'{places[self.place]})"
    )
    writer.assign(step, f"{self.name}.start({x})")

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, x)
    return [duals.scaled(x, -1.0)]


class Result(Op):
  """Waits for a started call."""

  part = "result"

  def write(self, writer: Writer, step: Step) -> None:
    ticket = step.operands[0].name
    writer.assign(step, ticket if writer.twin else f"{ticket}.result()")

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    return [x]


@drawn("part")
def started(scope: Scope, context: Context) -> bool:
  if scope.tickets and scope.draw(st.booleans()):
    ticket = scope.tickets.pop()
    scope.add(Result(), [ticket], ticket.type)
    return True
  var = a_float(scope)
  op = Start(scope.name("started"), scope.draw(st.sampled_from(["", "named"])), var.type)
  scope.tickets += scope.add_hidden(op, [var], var.type)
  return True


@drawn("part")
def static_values(scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  values = st.sampled_from([1, True, 1.0, 0, False, 0.0, -0.0])
  two = scope.draw(values), scope.draw(values)
  scope.add(Statics(scope.name("gate"), two, var.type), [var], var.type)
  return True


@drawn("part")
def nested(scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  scope.add(Nested(scope.name("gate"), var.type), [var], var.type)
  return True
