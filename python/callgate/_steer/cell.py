# SPDX-License-Identifier: Apache-2.0
"""Gates whose only result is a cell of the runtime, which programs read without the GIL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._call.site import Call, Emission
from callgate._gate.callee import GateCallee
from callgate._gate.options import GateOptions
from callgate._jax import tracing
from callgate._runtime import config


class CellGate(GateCallee):
  """Reads a cell. Its Python function does the same for JAX's own callbacks, the oracle's.

  In a program over several devices each reads by itself, and all get the same value at the same
  read (src/cells/steer.h). Processes share no memory, so process 0 reads for all.
  """

  # Knobs aren't recorded: they belong to the host, and a replay's host has its own.
  traits = GateCallee.traits.but(reads_cell=True, taped=False, knows_lanes=False)
  once = False  # True if all reads of an execution get the same value

  def __init__(self, name: str, function: Callable[..., Any], dtype: Any) -> None:
    result = jax.ShapeDtypeStruct((), dtype)
    super().__init__(function, GateOptions(out=result, name=name, effect="io"))

  def cell(self) -> Any:
    """Returns the runtime's handle on the cell that the call being lowered reads."""
    raise NotImplementedError

  def _emission(self, call: Call, *, on_cuda: bool) -> Emission:
    emission = super()._emission(call, on_cuda=on_cuda)
    devices = call.devices if self.on_each_device else 1
    held = {"devices": np.int64(devices), "once": np.int64(self.once)}
    held |= emission.attributes
    return dataclasses.replace(emission, callee=self.cell(), attributes=held)


def agreed(value: jax.Array, *, always: bool = False) -> jax.Array:
  """Returns the value that was read; on all devices of a `jax.shard_map` that of the first one.

  callgate's engine does so in the runtime, unless `always` is set. JAX's engine needs a collective.
  """
  axes = tuple(tracing.region_axes())
  if not axes or not (always or config.engine() == "jax"):
    return value
  others = jax.lax.axis_index(axes) != 0
  wide = value.astype(np.int32) if value.dtype.itemsize < 4 and value.dtype.kind in "biu" else value
  return jax.lax.psum(jnp.where(others, jnp.zeros_like(wide), wide), axes).astype(value.dtype)
