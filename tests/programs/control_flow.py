# SPDX-License-Identifier: Apache-2.0
"""Loops and branches: JAX's, and callgate's `cg.scan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import duals
import numpy as np
from arithmetic import Stopped, a_float, numpy_dtype
from bodies import (
  Envs,
  WithBody,
  following,
  names_text,
  parameters_of,
  some,
  taken,
  with_axis,
  without,
)
from grow import body_of, grow
from hypothesis import strategies as st
from oracle import Lane, Machine, decided
from program import Array, Body, Context, Op, Scope, Step, Values, Writer, drawn, tuple_text

MANY = 30  # steps of a long loop: more than calls may be within each other
FORI = ("fori", "cg.fori_loop")
LOOPS = (
  *("jax.lax.scan", "cg.scan", "cg.scan stoppable", "cg.scan with a bar", "cg.scan saving"),
  *("cg.scan until", *FORI),
)


@dataclasses.dataclass(frozen=True)
class Scan(WithBody):
  """A loop of a known number of steps. The body's parameters: the carry, then an `x` if `xs`."""

  length: int
  carries: int
  xs: bool
  reverse: bool
  loop: str  # of `LOOPS`
  until: float = 0.0  # the first carry's sum, above which "cg.scan until" ends

  @property
  def transformation(self) -> str:  # type: ignore[override]
    many = " of many steps" if self.length == MANY else ""
    return ("scan from the end" if self.reverse else "scan") + many

  @property
  def part(self) -> str:  # type: ignore[override]
    return self.loop if self.loop.startswith("cg") else ""

  @property
  def saves(self) -> bool:
    return self.loop == "cg.scan saving"

  def write(self, writer: Writer, step: Step) -> None:
    body, n = self.body, self.carries
    state = tuple_text(var.name for var in body.parameters[:n])
    carry = tuple_text(var.name for var in step.operands[:n])
    results = tuple_text(var.name for var in step.results)
    if self.loop in FORI:
      with writer.block(f"def {self.name}(i, carry):"):
        writer.line(f"{state} = carry")
        writer.function(f"{self.name}_body", body, "_=None")
        writer.line(f"return {self.name}_body()")
      loop, more = "jax.lax.fori_loop", ""
      if self.loop == "cg.fori_loop" and not writer.twin:
        loop, more = self.loop, _bar(writer)
      writer.line(f"{results} = {loop}(0, {self.length}, {self.name}, {carry}{more})")
      return
    with writer.block(f"def {self.name}(carry, x):"):
      writer.line(f"{state} = carry")
      if self.xs:
        writer.line(f"{body.parameters[-1].name} = x")
      next_ = tuple_text(var.name for var in body.results[:n])
      ys = tuple_text(var.name for var in body.results[n:])
      writer.function(f"{self.name}_body", body, "_=None", f"{next_}, {ys}")
      writer.line(f"return {self.name}_body()")
    xs = step.operands[-1].name if self.xs else "None"
    scan = "jax.lax.scan" if writer.twin else self.loop.split()[0]
    options = f", length={self.length}, reverse={self.reverse}"
    more = ""
    if self.loop == "cg.scan stoppable" and not writer.twin:
      options, more = f"{options}, stoppable=True", ", _"
    if self.loop == "cg.scan until" and not writer.twin:
      options += f", until=lambda carry: jnp.sum(carry[0]) > {self.until}"
      more = ", _"
    if self.loop == "cg.scan with a bar" and not writer.twin:
      options += _bar(writer)
    if self.loop == "cg.scan saving" and not writer.twin:
      writer.above("import tempfile")
      options += ", save=cg.Checkpoints(tempfile.mkdtemp(), every=2)"
    ys = tuple_text(var.name for var in step.results[n:])
    carried = tuple_text(var.name for var in step.results[:n])
    writer.line(f"{carried}, {ys}{more} = {scan}({self.name}, {carry}, {xs}{options})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    n = self.carries
    carries = [values[:n] for values in operands]
    ys: list[list[Values]] = [[] for _ in lanes]
    going = list(range(len(lanes)))
    for i in reversed(range(self.length)) if self.reverse else range(self.length):
      if self.loop == "cg.scan stoppable" and machine.stopped:
        going = []
      for rows in ys:
        rows.append([_zeros(var.type) for var in self.body.results[n:]])
      at = [lanes[k].into(self.name, i) for k in going]
      inputs = [
        [*carries[k], duals.linear(lambda x, i=i: x[i], operands[k][-1])] if self.xs else carries[k]
        for k in going
      ]
      found = machine.run(self.body, at, [envs[k] for k in going], inputs) if going else []
      for k, results in zip(going, found, strict=True):
        carries[k], ys[k][-1] = results[:n], results[n:]
      if self.loop == "cg.scan until":
        going = [k for k in going if not decided(carries[k][0], self.until)]
    if self.reverse:
      ys = [rows[::-1] for rows in ys]
    stacked = [
      [duals.linear_of_all(np.stack, [*column]) for column in zip(*rows, strict=True)]
      for rows in ys
    ]
    return [[*carry, *more] for carry, more in zip(carries, stacked, strict=True)]


def _bar(writer: Writer) -> str:
  writer.above("import io")
  return ", progress=cg.Progress('bar', file=io.StringIO())"


def _zeros(type_: Array) -> np.ndarray:
  kind = np.dtype(np.float64) if type_.is_float else numpy_dtype(type_.dtype)
  return np.zeros(type_.shape, kind)


@drawn("transformation")
@drawn("transformation")
def scan(scope: Scope, context: Context) -> bool:
  loops = list(LOOPS)
  if context.depth or any(isinstance(step.op, Scan) and step.op.saves for step in scope.steps):
    loops.remove("cg.scan saving")  # it saves outside of lanes and other loops
  if context.axes:
    loops.remove("cg.scan until")  # lanes end apart
  loop = scope.draw(st.sampled_from(loops))
  ends = loop == "cg.scan until"
  carry = [a_float(scope), *some(scope, 0, 1)] if ends else some(scope)
  xs = [var for var in scope.vars if var.type.shape and 0 < var.type.shape[0] <= 3]
  with_xs = bool(xs) and loop not in FORI and scope.draw(st.booleans())
  x = [scope.draw(st.sampled_from(xs))] if with_xs else []
  many = () if context.depth else (MANY,)
  length = x[0].type.shape[0] if with_xs else scope.draw(st.sampled_from((1, 2, 3, 2, 3, *many)))
  parameters = parameters_of(scope, carry)
  slices = [scope.new(x[0].type.with_shape(*x[0].type.shape[1:]))] if with_xs else []
  inside = scope.inner([*parameters, *slices], refs=True)
  grow(inside, context.into(branch=context.branch or ends))
  results = [following(inside, var.type) for var in carry]
  ys = [] if loop in FORI else [inside.vars[-1]]
  body = Body((*parameters, *slices), tuple(inside.steps), (*results, *ys))
  reverse = loop not in FORI and scope.draw(st.booleans())
  until = scope.draw(st.sampled_from((-0.3, 0.2, 0.7))) if ends else 0.0
  op = Scan(scope.name("loop"), body, length, len(carry), with_xs, reverse, loop, until)
  types = [var.type for var in results] + [
    var.type.with_shape(length, *var.type.shape) for var in ys
  ]
  scope.add(op, [*carry, *x], *types)
  return True


@dataclasses.dataclass(frozen=True)
class While(WithBody):
  """A loop of one step, or of three where the first operand's sum is above a threshold."""

  transformation = "while"
  threshold: float
  bar: bool

  @property
  def part(self) -> str:  # type: ignore[override]
    return "cg.while_loop" if self.bar else ""

  def write(self, writer: Writer, step: Step) -> None:
    state = tuple_text(var.name for var in self.body.parameters)
    carry = tuple_text(var.name for var in step.operands)
    with writer.block(f"def {self.name}(state):"):
      writer.line(f"i, n, {state} = state")
      writer.function(f"{self.name}_body", self.body, "_=None")
      writer.line(f"return i + 1, n, {self.name}_body()")
    number = f"jnp.where(jnp.sum({step.operands[0].name}) > {self.threshold}, 3, 1)"
    results = tuple_text(var.name for var in step.results)
    first = f"(0, {number}, {carry})"
    bar = self.bar and not writer.twin
    loop, more = ("cg.while_loop", _bar(writer)) if bar else ("jax.lax.while_loop", "")
    loop = f"{loop}(lambda s: s[0] < s[1], {self.name}, {first}{more})"
    writer.line(f"_, _, {results} = {loop}")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    numbers = [3 if decided(values[0], self.threshold) else 1 for values in operands]
    carries = list(operands)
    for i in range(max(numbers, default=0)):
      active = [k for k, n in enumerate(numbers) if i < n]
      at = [lanes[k].into(self.name, i) for k in active]
      found = machine.run(self.body, at, [envs[k] for k in active], [carries[k] for k in active])
      for k, results in zip(active, found, strict=True):
        carries[k] = results
    return carries


@drawn("transformation")
def while_loop(scope: Scope, context: Context) -> bool:
  if context.axes:
    return False
  first = a_float(scope)
  carry = [first, *some(scope, 0, 1)]
  if context.reverse:  # which loops have of what isn't differentiated alone
    carry = [scope.add(Stopped(), [var], var.type)[0] for var in carry]
  parameters = parameters_of(scope, carry)
  inside = scope.inner(parameters, closes=not context.reverse)
  grow(inside, context.into(branch=True))
  results = [following(inside, var.type) for var in carry]
  body = Body(tuple(parameters), tuple(inside.steps), tuple(results))
  threshold = scope.draw(st.sampled_from([-0.3, 0.2, 0.7]))
  op = While(scope.name("loop"), body, threshold, scope.draw(st.booleans()))
  scope.add(op, carry, *(var.type for var in results))
  return True


@dataclasses.dataclass(frozen=True)
class Cond(Op):
  """A branch by the sum of the first operand; the others are the branches' operands.

  Attributes:
    thresholds: one of `cond`, two of `switch` with three branches.
  """

  name: str
  branches: tuple[Body, ...]
  thresholds: tuple[float, ...]

  @property
  def transformation(self) -> str:  # type: ignore[override]
    return "cond" if len(self.branches) == 2 else "switch"

  def bodies(self) -> Sequence[Body]:
    return self.branches

  def write(self, writer: Writer, step: Step) -> None:
    names = [writer.function(f"{self.name}_{i}", body) for i, body in enumerate(self.branches)]
    tests = [f"(jnp.sum({step.operands[0].name}) > {t})" for t in self.thresholds]
    operands = names_text(step.operands[1:])
    results = tuple_text(var.name for var in step.results)
    if len(self.branches) == 2:
      writer.line(f"{results} = jax.lax.cond({tests[0]}, {names[1]}, {names[0]}, {operands})")
    else:
      index = " + ".join(f"{test}.astype(int)" for test in tests)
      writer.line(f"{results} = jax.lax.switch({index}, [{', '.join(names)}], {operands})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    chosen = [sum(decided(values[0], t) for t in self.thresholds) for values in operands]
    results: list[Values] = [[] for _ in lanes]
    for i, body in enumerate(self.branches):
      taken = [k for k, index in enumerate(chosen) if index == i]
      found = machine.run(
        body, [lanes[k] for k in taken], [envs[k] for k in taken], [operands[k][1:] for k in taken]
      )
      for k, values in zip(taken, found, strict=True):
        results[k] = values
    return results


@drawn("transformation")
@drawn("transformation")
def cond(scope: Scope, context: Context) -> bool:
  if context.axes:
    return False
  by = a_float(scope)
  operands = some(scope)
  number = scope.draw(st.sampled_from([2, 2, 3]))
  into = context.into(branch=True)
  scopes, parameters = [], []
  for _ in range(number):
    parameters.append(parameters_of(scope, operands))
    inside = scope.inner(parameters[-1], refs=True)
    grow(inside, into)
    scopes.append(inside)
  type_ = scopes[0].vars[-1].type
  if not all(any(var.type == type_ for var in inside.vars) for inside in scopes):
    type_ = operands[0].type
  results = [following(inside, type_) for inside in scopes]
  branches = tuple(
    Body(tuple(names), tuple(inside.steps), (result,))
    for names, inside, result in zip(parameters, scopes, results, strict=True)
  )
  thresholds = (0.2,) if number == 2 else (-0.3, 0.6)
  scope.add(Cond(scope.name("branch"), branches, thresholds), [by, *operands], type_)
  return True


@dataclasses.dataclass(frozen=True)
class Map(WithBody):
  """`jax.lax.map` over the operand's first axis, in chunks of lanes where `chunk` is not 0."""

  transformation = "map"
  chunk: int

  def write(self, writer: Writer, step: Step) -> None:
    function = writer.function(self.name, self.body)
    size = f", batch_size={self.chunk}" if self.chunk else ""
    writer.assign_all(step, f"jax.lax.map({function}, {step.operands[0].name}{size})")

  def run(
    self, machine: Machine, lanes: list[Lane], envs: Envs, operands: list[Values]
  ) -> list[Values]:
    axis = f"lane {self.name}" if self.chunk else self.name
    rows: list[list[Values]] = [[] for _ in lanes]
    for i in range(duals.plain(operands[0][0]).shape[0] if lanes else 0):
      at = [lane.into(axis, i) for lane in lanes]
      inputs = [[taken(values[0], i, 0)] for values in operands]
      for row, results in zip(rows, machine.run(self.body, at, envs, inputs), strict=True):
        row.append(results)
    return [
      [duals.linear_of_all(np.stack, [*column]) for column in zip(*row, strict=True)]
      for row in rows
    ]


@drawn("transformation")
def map_(scope: Scope, context: Context) -> bool:
  mapped = scope.of(lambda t: bool(t.shape) and 0 < t.shape[0] <= 4)
  if not mapped or context.axes:
    return False
  var = scope.pick(mapped)
  chunk = 0 if 0 in var.type.shape else scope.draw(st.sampled_from([0, 0, 2]))
  lanes = context.lanes or chunk > 0
  into = context.into(lanes=lanes, branch=context.branch or chunk > 0)  # of chunks, lanes by row
  body = body_of(scope, [scope.new(without(var.type, 0))], into)
  (result,) = body.results
  op = Map(scope.name("f"), body, chunk)
  scope.add(op, [var], with_axis(result.type, 0, var.type.shape[0]))
  return True
