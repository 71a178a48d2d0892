# SPDX-License-Identifier: Apache-2.0
"""The names of callgate's targets in programs, source lines of calls, and export checks."""

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
# On CUDA, for kernels with scratch memory. Such calls are never captured, because replays of a
# graph would not have the memory.
KERNEL_SCRATCH_TARGET = "callgate.kernel.scratch"
# The suffix of a target before XLA's partitioner makes one call for each device.
PARTITIONED = ".partitioned"
GRAPH_TARGET = "callgate.gate.graph"  # on CUDA only
OWN = (GATE_TARGET, TAP_TARGET, KERNEL_TARGET, KERNEL_SCRATCH_TARGET, GRAPH_TARGET)
TARGETS: tuple[str, ...] = (*OWN, *(target + PARTITIONED for target in OWN))
_RECORDED = 64 << 10  # bytes, as kCopiedInStream in src/xla/cuda_deferred.cc
# Traceback lines for messages, by the text that programs hold. The oldest entry is removed at the
# limit, because notebook cells and generated code make new ones without end. Guarded by
# _sites_lock; at most _MOST_SITES entries.
_sites: collections.OrderedDict[str, str] = collections.OrderedDict()
_MOST_SITES = 10_000
_sites_lock = threading.Lock()


def remember_site(site: tuple[str, int, str] | None) -> str:
  """Returns a call site as programs hold it: without its directory, to be the same everywhere.

  If two files have one name, the second one's text has as many folders as distinguish them.
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
  """Returns the traceback line for a program's text of a call site; the text itself if unknown."""
  return _sites.get(site, site)


def tap_target(avals: Sequence[Any]) -> str:
  """Returns the target of a call that sends arrays of these types.

  If XLA records a call into a CUDA graph, the program's own stream makes the copy, and a replay
  waits until the host has copied the data again. So large arrays stay out of graphs.
  """
  arrays = [x for x in avals if all(isinstance(extent, int) for extent in x.shape)]
  sent = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
  return TAP_TARGET if sent <= _RECORDED else GATE_TARGET


def name_gpus() -> None:
  """Reports the GPUs' ids to the runtime if they are not CUDA's numbers (several processes)."""
  if not jax.distributed.is_initialized():
    return
  try:
    gpus = jax.local_devices(backend="cuda")
  except RuntimeError:  # the program is for another machine
    return
  for gpu in gpus:
    _callgate.set_device_id(gpu.local_hardware_id, gpu.id)


def export_checks() -> list[Any]:
  """Returns the safety checks that `jax.export` must disable for programs with gates.

  ```python
  import callgate as cg, jax, jax.numpy as jnp, numpy as np
  from jax import export

  @cg.gate(out=lambda x: x, name="export_checks.sort")
  def sort(x):
    return np.sort(x)

  exported = export.export(jax.jit(sort), disabled_checks=cg.export_checks())(jnp.ones(3))
  ```

  An exported program refers to gates by name. Give `name=` to its gates, and define them in the
  other process before the program runs.
  """
  return [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]
