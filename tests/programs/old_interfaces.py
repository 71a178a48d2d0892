# SPDX-License-Identifier: Apache-2.0
"""The old interfaces of `callgate.compat`, as operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import duals
from arithmetic import a_float
from hypothesis import strategies as st
from oracle import Lane, Machine, each_lane
from parts import Same
from program import Array, Context, Op, Part, Scope, Values, drawn


@dataclasses.dataclass(frozen=True)
class BufferCallback(Part):
  """`buffer_callback` of the old interface, with an effect: -x."""

  part = "buffer_callback"
  name: str
  type: Array

  def definitions(self) -> Sequence[str]:
    return [
      "from callgate.compat import buffer_callback",
      f"def {self.name}_host(context, out, x):\n  x = np.asarray(x)\n"
      f"  note('{self.name}', {self.type.shape}, x)\n  np.asarray(out)[...] = -x\n",
    ]

  def twin(self, x: str) -> str:
    return f"-{x}"

  def text(self, x: str) -> str:
    shape = f"jax.ShapeDtypeStruct({self.type.shape}, 'float32')"
    options = "has_side_effect=True, vmap_method='sequential'"
    return f"buffer_callback.buffer_callback({self.name}_host, {shape}, {options})({x})"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, x)
    return [duals.scaled(x, -1.0)]


@dataclasses.dataclass(frozen=True)
class IdTap(Same):
  """`id_tap` of the old interface, of 2023."""

  part = "id_tap"
  name: str
  type: Array

  def definitions(self) -> Sequence[str]:
    return [
      "from callgate.compat import host_callback_2023",
      f"def {self.name}(value, transforms):\n"  # the lanes' axes are where vmap found them
      "  for k, (_, how) in enumerate(reversed(transforms)):\n"
      "    value = np.moveaxis(value, k + how['batch_dims'][0], k)\n"
      f"  note('{self.name}', {self.type.shape}, value)\n",
    ]

  def text(self, x: str) -> str:
    return f"host_callback_2023.id_tap({self.name}, {x})"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, x)
    return [x]


@dataclasses.dataclass(frozen=True)
class OldestTap(Same):
  """`id_tap` of the old interface, of 2020: in the flow of data, so nothing counts its calls.

  Its function gets the arrays of all lanes, and says in which axes they are.
  """

  part = "id_tap of 2020"
  name: str
  type: Array

  def definitions(self) -> Sequence[str]:
    return [
      "from callgate.compat import host_callback\n"
      "if not hasattr(host_callback, 'of_programs'):  # one for all programs of the process\n"
      "  host_callback.of_programs = host_callback.outfeed_receiver()\n"
      "  host_callback.of_programs.__enter__()\n",
      f"def {self.name}(value, transforms=(), batch_dims=None, **more):\n"
      f"  lanes = value.ndim - {len(self.type.shape)}\n"
      "  assert lanes == transforms.count('batch'), (transforms, value.shape)\n",
    ]

  def text(self, x: str) -> str:
    return f"host_callback.id_tap({self.name}, {x})"


@dataclasses.dataclass(frozen=True)
class OldCall(Part):
  """`call` of the old interface, of 2023: -x."""

  part = "call of 2023"
  refuses = True
  name: str
  type: Array

  def definitions(self) -> Sequence[str]:
    return [
      "from callgate.compat import host_callback_2023",
      f"def {self.name}(x):\n  note('{self.name}', {self.type.shape}, x)\n  return -x\n",
    ]

  def twin(self, x: str) -> str:
    return f"-{x}"

  def text(self, x: str) -> str:
    return f"host_callback_2023.call({self.name}, {x}, result_shape={x})"

  @each_lane
  def run(self, machine: Machine, lane: Lane, x: Any) -> Values:
    machine.note(lane, self.name, x)
    return [duals.scaled(x, -1.0)]


# Each is made of a name, for a float's type.
OLD: dict[str, Callable[[str, Array], Op]] = {
  "buffer_callback": BufferCallback,
  "id_tap": IdTap,
  "id_tap of 2020": OldestTap,
  "call": OldCall,
}


@drawn("part")
def old_interface(scope: Scope, context: Context) -> bool:
  names = list(OLD)
  if context.branch:  # where `vmap` has JAX run all branches, the old calls run for all lanes
    names = ["id_tap of 2020", "call"]
  if context.lanes or context.devices:
    names.remove("call")
  if context.order:
    names = ["id_tap of 2020"]  # the others have no derivatives
  var = a_float(scope)
  op = OLD[scope.draw(st.sampled_from(names))](scope.name("old"), var.type)
  scope.add(op, [var], var.type)
  return True
