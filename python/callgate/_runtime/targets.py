# SPDX-License-Identifier: Apache-2.0
"""The names of callgate's targets in programs, source lines of calls, and what exports check."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.export

from callgate import _callgate

GATE_TARGET = "callgate.gate"
TAP_TARGET = "callgate.tap"
KERNEL_TARGET = "callgate.kernel"
# On CUDA, a kernel with scratch memory, which a graph's replays would not have: never captured.
KERNEL_SCRATCH_TARGET = "callgate.kernel.scratch"
# A call that XLA's partitioner is still to make one of each device has this behind its target.
PARTITIONED = ".partitioned"
GRAPH_TARGET = "callgate.gate.graph"  # on CUDA alone
OWN = (GATE_TARGET, TAP_TARGET, KERNEL_TARGET, KERNEL_SCRATCH_TARGET, GRAPH_TARGET)
TARGETS: tuple[str, ...] = (*OWN, *(target + PARTITIONED for target in OWN))
_RECORDED = 64 << 10  # bytes, as kCopiedInStream in src/xla/cuda_deferred.cc
sites: dict[str, str] = {}  # the lines of tracebacks, by what programs hold of them


def remember_site(site: tuple[str, int, str] | None) -> str:
  """A call site as programs hold it: without the directory, so that it is the same everywhere."""
  if site is None:
    return ""
  path, line, function = site
  key = f"{os.path.basename(path)}:{line} ({function})"
  sites[key] = f'File "{path}", line {line}, in {function}'
  return key


def tap_target(avals: Sequence[Any]) -> str:
  """The target of a call that sends arrays of these types.

  What XLA records into a CUDA graph is copied by the program's own stream, and a replay waits until
  the host has copied it once more. So large arrays stay out of graphs.
  """
  arrays = [x for x in avals if all(isinstance(extent, int) for extent in x.shape)]
  sent = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
  return TAP_TARGET if sent <= _RECORDED else GATE_TARGET


def name_gpus() -> None:
  """Tells the runtime the GPUs' ids, where these are not CUDA's own numbers: over processes."""
  if not jax.distributed.is_initialized():
    return
  try:
    gpus = jax.local_devices(backend="cuda")
  except RuntimeError:  # lowered for another machine
    return
  for gpu in gpus:
    _callgate.set_device_id(gpu.local_hardware_id, gpu.id)


def export_checks() -> list[Any]:
  """The safety checks to disable when exporting a program that calls gates.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np
  from jax import export

  @cg.gate(out=lambda x: x, name="export_checks.sort")
  def sort(x):
    return np.sort(x)

  exported = export.export(jax.jit(sort), disabled_checks=cg.export_checks())(jnp.ones(3))
  ```

  The exported program holds the gates' names: give `name=` to gates that are to be called in
  another process, and define them there before the program runs.
  """
  return [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
