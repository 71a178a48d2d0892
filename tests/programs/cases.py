# SPDX-License-Identifier: Apache-2.0
"""Draws cases: programs, each with the way in which it is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import asked
import calls
import checks
import control_flow
import lanes
import parts
from grow import programs
from hypothesis import reject
from hypothesis import strategies as st
from oracle import Machine
from program import Body, Program, Writer
from ways import APART, AROUND, HEAD, NEEDS_ERRORS, NOT_SAVED, NOT_STOPPED, OVER_DEVICES, WAYS
from ways_further import fitting

RARELY = 32  # of so many programs one runs in a process of its own
MORE: list[str] = []  # ways that are drawn more often, each as often as it stands here


@dataclasses.dataclass(frozen=True)
class Case:
  """A program, and how it is run."""

  program: Program
  way: str
  armed: str  # the gate that raises; "" for none

  def ops(self) -> frozenset[str]:
    """The names of all parts and transformations in it, and of its way."""
    names = {name for op in self.program.body.ops() for name in (op.part, op.transformation)}
    return frozenset(names - {""} | {f"way: {self.way}"})

  def pairs(self) -> Iterator[tuple[str, str]]:
    """Its parts, each with the transformations around it and the way."""
    for op, around in self.program.body.ops_within():
      if op.part:
        yield from ((op.part, name) for name in (f"way: {self.way}", *around))

  def places(self) -> frozenset[str]:
    """Each part and transformation behind those that it is in: "vmap > cond > gate io"."""
    return frozenset(self._places(self.program.body, "")) | {f"way: {self.way}"}

  def _places(self, body: Body, around: str) -> Iterator[str]:
    for step in body.steps:
      op = step.op
      if name := f"{op.transformation} {op.part}".strip():
        yield f"{around}{name}"
        if isinstance(op, calls.Call) and op.name == self.armed:
          yield f"armed: {around}{name}"
      for inner in op.bodies():
        yield from self._places(inner, f"{around}{name} > ")

  def source(self, twin: bool, machine: Machine, ran: int = 0) -> str:
    writer = Writer(twin, machine.taken)
    writer.function("program", self.program.body)
    inputs = ", ".join(
      f"np.array({x.tolist()}, 'float32').reshape({x.shape})" for x in self.program.inputs
    )
    lines = [HEAD, writer.text(), f"inputs = ({inputs},)"]
    if self.armed:
      lines.append(f"ARMED, ARMED_RAN = {self.armed!r}, {ran}")
    if self.way in checks.WAYS:
      lines.append(f"FAILING = {machine.failing}")
    if not twin:
      lines += asked.lines(self.program, self.way, machine)
    return "\n".join([*lines, WAYS[self.way].strip("\n"), ""])


def _stops_its_own_loop(program: Program) -> bool:
  """True unless a request may come before a stoppable loop, or after it: nothing orders these."""
  loops = [op for op in program.body.ops() if op.part == "cg.scan stoppable"]
  inside = [op for loop in loops for body in loop.bodies() for op in body.ops()]
  every = [op for op in program.body.ops() if isinstance(op, parts.Stop)]
  return not loops or (len(loops) == 1 and all(op in inside for op in every))


@st.composite
def cases(draw: Any) -> Case:
  program = draw(programs())
  gates = [
    op.name
    for op in program.body.ops()
    if isinstance(op, calls.Call) and op.effect != "pure" and op.form == "gate"
  ]
  stops = any(isinstance(op, parts.Stop) for op in program.body.ops())
  if stops and not _stops_its_own_loop(program):
    reject()
  ways = [
    way for way in WAYS if (gates or way not in NEEDS_ERRORS) and not (stops and way in NOT_STOPPED)
  ]
  if stops:  # devices that don't run the gate may be a step ahead of its request
    ways = [way for way in ways if way not in OVER_DEVICES]
  ways = fitting(ways, program)
  if any(isinstance(op, calls.Nested) for op in program.body.ops()):
    # Over the devices of a program that is under way no other can run, in JAX neither.
    ways = [way for way in ways if way not in OVER_DEVICES]
    if any(isinstance(op, lanes.ShardMap) for op in program.body.ops()):
      reject()
  if any(op.part == "cg.scan stoppable" for op in program.body.ops()):
    # The request to stop may come before such a loop, or after it.
    ways = [way for way in ways if way != "resumed"]
  if any(isinstance(op, control_flow.Scan) and op.saves for op in program.body.ops()):
    ways = [way for way in ways if way not in NOT_SAVED]
  types = [var.type for var in program.body.variables()]
  if any(0 in t.shape for t in types) or any(
    isinstance(op, lanes.ShardMap) for op in program.body.ops()
  ):
    ways = [way for way in ways if way not in AROUND]
  is_apart = draw(st.integers(0, RARELY - 1)) == RARELY // 2
  ways = [way for way in ways if (way in APART) == is_apart]
  if not ways:
    reject()
  way = draw(st.sampled_from(ways + [way for way in MORE if way in ways]))
  armed = draw(st.sampled_from(gates)) if way in NEEDS_ERRORS else ""
  return Case(program, way, armed)
