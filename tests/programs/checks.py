# SPDX-License-Identifier: Apache-2.0
"""Checks that fail, where the program's values make them: the error names the value.

A program with one is run with its checks off, and judged as any other. With its checks on it has to
raise, for one of the values by which the oracle says that a check fails.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import duals
import numpy as np
from arithmetic import a_float
from hypothesis import strategies as st
from oracle import Lane, Machine, decided, each_lane
from program import Context, Op, Scope, Step, Values, Writer, drawn


@dataclasses.dataclass(frozen=True)
class Decided(Op):
  """A check that the operand's sum is at most so much."""

  part = "check that decides"
  name: str
  most: float

  def write(self, writer: Writer, step: Step) -> None:
    x = step.operands[0].name
    if not writer.twin:
      total = f"jnp.sum({x})"
      said = f"'{self.name} of {{total}}', total={total}"
      writer.line(f"cg.check({total} <= {self.most}, {said})")
    writer.assign(step, x)

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    if decided(x, self.most):
      machine.fail(lane, self.name, float(np.sum(duals.plain(x))))
    return [x]


@drawn("part")
def check(scope: Scope, context: Context) -> bool:
  var = a_float(scope)
  most = scope.draw(st.sampled_from([-0.3, 0.2, 1.5]))
  scope.add(Decided(scope.name("check"), most), [var], var.type)
  return True


_RUN = """
with cg.config(checks=False):
  execute(1, lambda: [run(*inputs)])
whole = collections.Counter(calls[-1][1])
for _ in range(2):
  raised, begin = None, len(events)
  try:
    with cg.errors():
      jax.block_until_ready(run(*inputs))
  except cg.CheckError as error:
    raised = error
  try:
    settled()
  except cg.CheckError:  # of another device, which came after the block had ended
    assert raised is not None and "P" in globals()
  assert (raised is not None) == bool(FAILING), f"expected one of {FAILING} and {raised!r} came"
  if raised is not None:
    name, total = raised.message.split()[0], float(raised.values["total"])
    assert any(np.isclose(total, x, 2e-3, 2e-3) for x in FAILING.get(name, [])), (
      f"expected one of {FAILING} and {raised!r} came")
    assert raised.message == f"{name} of {raised.values['total']}", raised.message
  more = collections.Counter(events[begin:]) - whole
  assert not more, f"{more} happened in a program with a check that fails, and not without"
with cg.config(checks=False):
  execute(1, lambda: [run(*inputs)])
"""

WAYS = {
  "checks": "import collections\nrun = jax.jit(program)" + _RUN,
  "checks without jit": "import collections\nrun = program" + _RUN,
}
