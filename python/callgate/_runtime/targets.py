# SPDX-License-Identifier: Apache-2.0
"""The names of callgate's targets in programs, source lines of calls, and what exports check."""

from __future__ import annotations

import collections
import math
import os
import threading
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
# The lines of tracebacks, by what programs hold of them, for messages. The oldest goes when there
# are too many: cells of notebooks and generated code make new ones without end. Guarded by
# _sites_lock; at most _MOST_SITES entries.
_sites: collections.OrderedDict[str, str] = collections.OrderedDict()
_MOST_SITES = 10_000
_sites_lock = threading.Lock()


def remember_site(site: tuple[str, int, str] | None) -> str:
  """A call site as programs hold it: without the directory, so that it is the same everywhere.

  If two files have one name, the second one's has the folder, too, or as many as tell them apart.
  """
  if site is None:
    return ""
  path, line, function = site
  text, parts = f'File "{path}", line {line}, in {function}', path.split(os.sep)
  tails = (os.sep.join(parts[first:]) for first in reversed(range(len(parts))))
  keys = [f"{tail}:{line} ({function})" for tail in tails]
  with _sites_lock:
    key = next((key for key in keys if _sites.get(key, text) == text), keys[-1])
    _sites[key] = text
    _sites.move_to_end(key)
    if len(_sites) > _MOST_SITES:
      _sites.popitem(last=False)
  return key


def traceback_line(site: str) -> str:
  """The line of a traceback for what a program holds of a call site; that itself, if unknown."""
  return _sites.get(site, site)


def tap_target(avals: Sequence[Any]) -> str:
  """The target of a call that sends arrays of these types.

  The program's own stream copies what XLA records into a CUDA graph, and a replay waits until
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
