# SPDX-License-Identifier: Apache-2.0
"""Ordered effects in several places of a program: in jits, in loops, outside of all.

No value of one depends on another, so nothing but their order keeps the one behind the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import duals
from arithmetic import a_float
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from program import Array, Context, Part, Scope, Values, drawn

# The text of a function `{f}` on `{x}`.
_WORK = "x + 0 * jnp.sum(jnp.tanh(jnp.arange(65536.0) + jnp.sum(x)))"
PLACES = {
  "here": "{f}({x})",
  "jit": "jax.jit({f})({x})",
  "much work in a jit": f"jax.jit(lambda x: {{f}}({_WORK}))({{x}})",
  "much work": f"{{f}}((lambda x: {_WORK})({{x}}))",
  "remat": "jax.checkpoint({f})({x})",
  "scan": "jax.lax.scan(lambda x, _: ({f}(x) + 0.25, None), {x}, None, length=2)",
  "map": "jax.lax.map(lambda k: {f}({x} + k), jnp.arange(2) * 0.25)",
}
_TWICE = ("scan", "map")  # with 0.25 more at the second time
# How a function sends `x`; each is ordered among all of its own.
SENDS = {
  "tap ordered": "cg.tap(x, {g}, ordered=True)",
  "gate ordered": "{g}_gate(x)",
  "id_tap": "host_callback_2023.id_tap({g}_old, x)",
}
_DEFINED = {
  "tap ordered": (
    "def {g}(value, info):\n  if not info.repeated:\n    note('{g}', {shape}, value)\n"
  ),
  "gate ordered": (
    "def {g}_host(x):\n  note('{g}', {shape}, x)\n"
    "{g}_gate = cg.gate({g}_host, effect='ordered', name=NAMES + '{g}')\n"
  ),
  "id_tap": (
    "from callgate.compat import host_callback_2023\n"
    "def {g}_old(value, transforms):\n"
    "  for k, (_, how) in enumerate(reversed(transforms)):\n"
    "    value = np.moveaxis(value, k + how['batch_dims'][0], k)\n"
    "  note('{g}', {shape}, value)\n"
  ),
}


@dataclasses.dataclass(frozen=True)
class InOrder(Part):
  """Sends the operand plus 0, 1, ... from so many places, in this order; it gives the operand."""

  name: str
  kind: str
  places: tuple[str, ...]
  type: Array

  @property
  def part(self) -> str:  # type: ignore[override]
    return f"{self.kind} from several places"

  def definitions(self) -> Sequence[str]:
    how = {"g": self.name, "shape": self.type.shape}
    lines = [f"def {self.name}_all(x):", "  x = jax.lax.stop_gradient(x)"]
    lines.append(f"  xs = [x + k for k in range({len(self.places)})]")  # all are there before
    lines += [
      f"  {PLACES[place].format(f=f'{self.name}_one', x=f'xs[{k}]')}"
      for k, place in enumerate(self.places)
    ]
    return [
      _DEFINED[self.kind].format(**how),
      f"def {self.name}_one(x):\n  {SENDS[self.kind].format(**how)}\n  return x\n",
      "\n".join([*lines, ""]),
    ]

  def text(self, x: str) -> str:
    return f"({self.name}_all({x}), {x})[1]"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    for k, place in enumerate(self.places):
      for i in range(2 if place in _TWICE else 1):
        machine.note(lane.into(f"{self.name} {k}", i), self.name, duals.shifted(x, k + 0.25 * i))
    return [x]


@drawn("part")
def in_order(scope: Scope, context: Context) -> bool:
  kinds = list(SENDS)
  if context.order or context.branch:  # the old taps send tangents, and all lanes of a branch
    kinds.remove("id_tap")
  kind = scope.draw(st.sampled_from(kinds))
  places = scope.draw(st.lists(st.sampled_from(list(PLACES)), min_size=2, max_size=3))
  var = a_float(scope)
  op = InOrder(scope.name("sent"), kind, tuple(places), var.type)
  scope.add(op, [var], var.type)
  return True
