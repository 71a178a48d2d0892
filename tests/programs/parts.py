# SPDX-License-Identifier: Apache-2.0
"""callgate's other parts as operations: how a program uses each, and what the oracle expects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import duals
import numpy as np
from arithmetic import FUNCTIONS, a_float, an_operand
from hypothesis import strategies as st
from lanes import MESHES
from oracle import Lane, Machine, decided, each_lane
from program import Array, Context, Op, Part, Scope, Step, Values, Writer, drawn


@dataclasses.dataclass(frozen=True)
class Tap(Op):
  """Sends its operand out. `where`: above this sum alone."""

  name: str
  type: Array
  ordered: bool
  dataflow: bool
  where: float | None
  channel: str  # "" for a function, or a channel's capacity

  @property
  def part(self) -> str:  # type: ignore[override]
    kind = "ordered" if self.ordered else "dataflow" if self.dataflow else ""
    more = "" if self.where is None else " where"
    return (
      f"tap {kind}".strip() + more + (f" to a channel of {self.channel}" if self.channel else "")
    )

  def write(self, writer: Writer, step: Step) -> None:
    x = step.operands[0].name
    if writer.twin:
      writer.assign(step, x)
      return
    note = "pass" if self.dataflow else f"note('{self.name}', {self.type.shape}, value)"
    head = f"def {self.name}(value, info):\n  if not info.repeated:\n"
    writer.above(f"{head}    {note}\n")
    options = [", ordered=True"] if self.ordered else []
    options += [", effect='dataflow'"] if self.dataflow else []
    options += [] if self.where is None else [f", where=jnp.sum({x}) > {self.where}"]
    to = self.name
    if self.channel:
      to = f"NAMES + '{self.name}'"
      made = f"capacity='{self.channel}', to=[{self.name}]"
      writer.above(f"{self.name}_channel = cg.channel({to}, {made})")
    writer.assign(step, f"cg.tap({x}, {to}{''.join(options)})")

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    if not self.dataflow and (self.where is None or decided(x, self.where)):
      machine.note(lane, self.name, x)
    return [x]


@drawn("part")
@drawn("part")
def tap(scope: Scope, context: Context) -> bool:
  where = scope.draw(st.sampled_from([None, None, 0.2]))
  var = a_float(scope) if where is not None else an_operand(scope)
  kind = scope.draw(st.sampled_from(["", "ordered", "dataflow"]))
  name = scope.name("tap")
  channel = scope.draw(st.sampled_from(["", "", "64MiB", "1KiB"]))
  op = Tap(name, var.type, kind == "ordered", kind == "dataflow", where, channel)
  scope.add(op, [var], var.type)
  return True


class Same(Part):
  """A part that gives its operand."""

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    return [x]


@dataclasses.dataclass(frozen=True)
class Check(Same):
  part = "check"

  def text(self, x: str) -> str:
    return f"checked({x})"

  def definitions(self) -> Sequence[str]:
    return ["def checked(x):\n  cg.check(jnp.all(x == x), 'a NaN in {x}', x=x)\n  return x\n"]


@dataclasses.dataclass(frozen=True)
class Print(Same):
  part = "print"

  def text(self, x: str) -> str:
    return f"printed({x})"

  def definitions(self) -> Sequence[str]:
    return ["def printed(x):\n  cg.print('x = {}', x)\n  return x\n"]


@dataclasses.dataclass(frozen=True)
class Breakpoint(Same):
  part = "breakpoint"

  def text(self, x: str) -> str:
    return f"cg.breakpoint(jnp.any({x} != {x}), out='x', x={x})"


@dataclasses.dataclass(frozen=True)
class Knob(Part):
  """Adds a knob, which holds 0.5."""

  part = "knob"
  name: str

  def definitions(self) -> Sequence[str]:
    return [f"{self.name} = cg.knob(NAMES + '{self.name}', 0.5)"]

  def text(self, x: str) -> str:
    return f"{x} + {self.name}.read()"

  def twin(self, x: str) -> str:
    return f"{x} + 0.5"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    return [duals.shifted(x, 0.5)]


@dataclasses.dataclass(frozen=True)
class Hold(Same):
  """Makes an object of the host of its operand; the result is a handle."""

  part = "hold"
  name: str

  def definitions(self) -> Sequence[str]:
    return [f"{self.name} = cg.hold(lambda x: x.copy())"]

  def text(self, x: str) -> str:
    return f"{self.name}({x})"


@dataclasses.dataclass(frozen=True)
class Use(Op):
  """Adds an object of the host, by its handle, to the second operand.

  Attributes:
    gives: False if a function without results gets the sum.
  """

  part = "use"
  name: str
  effect: str
  type: Array
  gives: bool

  def write(self, writer: Writer, step: Step) -> None:
    handle, x = (var.name for var in step.operands)
    if writer.twin:
      writer.assign(step, f"{x} + jnp.sum({handle})" if self.gives else x)
      return
    total, note = (
      "x + np.sum(made, dtype=made.dtype)",
      f"  note('{self.name}', {self.type.shape}, {{}})\n",
    )
    if not self.gives:
      writer.above(f"def {self.name}(made, x):\n{note.format(total)}")
      writer.line(f"cg.use({self.name}, {handle}, {x}, out=None, effect='{self.effect}')")
      writer.assign(step, x)
      return
    noted = "" if self.effect == "pure" else note.format("x")
    writer.above(f"def {self.name}(made, x):\n{noted}  return {total}\n")
    writer.assign(step, f"cg.use({self.name}, {handle}, {x}, out={x}, effect='{self.effect}')")

  @each_lane
  def run(self, machine: Machine, lane: Lane, made: Any, x: Any) -> Values:
    total = duals.linear(lambda a: np.asarray(np.sum(a)), made)
    whole = duals.add(x, duals.linear(lambda a: np.broadcast_to(a, duals.plain(x).shape), total))
    if self.effect != "pure":
      machine.note(lane, self.name, x if self.gives else whole)
    return [whole if self.gives else x]


@drawn("part")
def objects(scope: Scope, context: Context) -> bool:
  if context.order:
    return False  # they have no derivatives
  if not scope.handles or scope.draw(st.booleans()):
    var = a_float(scope)
    op = Hold(scope.name("hold"))
    scope.handles += scope.add_hidden(op, [var], var.type)
  x = a_float(scope)
  effect = scope.draw(st.sampled_from(["io", "pure", "ordered"]))
  gives = effect == "pure" or scope.draw(st.booleans())
  use = Use(scope.name("use"), effect, x.type, gives)
  scope.add(use, [scope.pick(scope.handles), x], x.type)
  return True


@dataclasses.dataclass(frozen=True)
class Feed(Same):
  """Adds the next item of a feed, whose items are all 0.

  Attributes:
    axes: those of the mesh around it, whose devices take an item each.
  """

  part = "feed"
  name: str
  axes: Sequence[str]

  def definitions(self) -> Sequence[str]:
    items = "(np.float32(0) for _ in itertools.count())"
    return [f"{self.name} = cg.feed({items}, name=NAMES + '{self.name}')"]

  def text(self, x: str) -> str:
    return f"{x} + {self.name}.next()"

  def twin(self, x: str) -> str:
    return " + ".join([x, *(f"0.0 * jax.lax.axis_index('{axis}')" for axis in self.axes)])


@dataclasses.dataclass(frozen=True)
class Root(Part):
  """The root of x - (theta * 0.5 + 0.25), found by a function of the host."""

  part = "root"

  def definitions(self) -> Sequence[str]:
    solver = "lambda theta, x0: np.asarray(theta * 0.5 + 0.25, theta.dtype)"
    return [f"root = cg.root(lambda x, theta: x - (theta * 0.5 + 0.25), solver={solver})"]

  def text(self, x: str) -> str:
    return f"root({x}, {x})"

  def twin(self, x: str) -> str:
    return f"{x} * 0.5 + 0.25"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    return [FUNCTIONS["half"][1](x)]


@dataclasses.dataclass(frozen=True)
class Stop(Same):
  """A gate that asks the stoppable loops of its program to stop."""

  part = "stop"
  name: str
  type: Array

  def definitions(self) -> Sequence[str]:
    return [
      f"def {self.name}_host(x):\n  note('{self.name}', {self.type.shape}, x)\n  cg.stop()\n"
      f"  return x\n{self.name} = cg.gate({self.name}_host, out=lambda x: x, effect='io',"
      f" name=NAMES + '{self.name}')"
    ]

  def text(self, x: str) -> str:
    return f"{self.name}({x})"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, x)
    machine.stopped = True
    return [x]


@drawn("part")
def stop(scope: Scope, context: Context) -> bool:
  if context.order or context.lanes or context.devices or not context.depth:
    return False
  var = a_float(scope)
  scope.add(Stop(scope.name("stop"), var.type), [var], var.type)
  return True


# Parts that may stand under a derivative. Each takes a float.
OTHERS: dict[str, Callable[[Scope, Context], Op]] = {
  "check": lambda scope, context: Check(),
  "print": lambda scope, context: Print(),
  "breakpoint": lambda scope, context: Breakpoint(),
  "knob": lambda scope, context: Knob(scope.name("knob")),
  "feed": lambda scope, context: Feed(
    scope.name("feed"), tuple(MESHES[scope.meshes[0]]) if context.devices else ()
  ),
  "root": lambda scope, context: Root(),
}


@drawn("part")
@drawn("part")
def other(scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  names = list(OTHERS)
  if context.order > 1:  # the lanes of `hessian` take an item each
    names.remove("feed")
  scope.add(OTHERS[scope.draw(st.sampled_from(names))](scope, context), [var], var.type)
  return True
