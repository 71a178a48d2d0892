# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's environments, whose observation is the sum of the actions so far."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import duals
from arithmetic import a_float
from oracle import Lane, Machine, each_lane
from program import Array, Context, Op, Scope, Step, Values, Writer, drawn

_ENVS = """\
import gymnasium
class {g}_class(gymnasium.Env):
  observation_space = action_space = gymnasium.spaces.Box(-np.inf, np.inf, {shape}, np.float32)
  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.total = np.zeros({shape}, np.float32)
    return self.total.copy(), {{}}
  def step(self, action):
    note('{g}', {shape}, action)
    self.total = np.asarray(self.total + action, np.float32)
    return self.total.copy(), 0.0, False, False, {{}}
{g} = cg.envs({g}_class, n=2)
"""


@dataclasses.dataclass(frozen=True)
class Steps(Op):
  """Two steps of two environments from their reset on: three times the operand."""

  part = "envs"
  refuses = True
  counts = True  # executions beside each other would reset each other's
  name: str
  type: Array

  def write(self, writer: Writer, step: Step) -> None:
    x, y = step.operands[0].name, step.results[0].name
    if writer.twin:
      writer.line(f"{y} = 3 * {x}")
      return
    writer.above(_ENVS.format(g=self.name, shape=self.type.shape))
    writer.line(f"{self.name}.reset(0)")
    writer.line(f"{self.name}_actions = jnp.stack([{x}, {x} + 1])")
    writer.line(
      f"_, {self.name}_seen = jax.lax.scan(lambda _, n: (None,"
      f" {self.name}.step(n * {self.name}_actions)[0]), None, jnp.arange(1.0, 3))"
    )
    writer.line(f"{y} = {self.name}_seen[1, 0]")

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    for i in range(1, 3):
      for k in range(2):
        at = lane.into(self.name, i).into(f"{self.name} env", k)
        machine.note(at, self.name, duals.scaled(duals.shifted(x, float(k)), float(i)))
    return [duals.scaled(x, 3.0)]


@drawn("part")
def envs(scope: Scope, context: Context) -> bool:
  if context.lanes or context.devices or context.order:
    return False  # an environment is one, and has no derivatives
  if importlib.util.find_spec("gymnasium") is None:
    return False
  var = a_float(scope)
  scope.add(Steps(scope.name("env"), var.type), [var], var.type)
  return True
