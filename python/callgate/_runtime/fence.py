# SPDX-License-Identifier: Apache-2.0
"""A program over all devices of a platform that ends after all programs dispatched before it.

A pure program whose results were dropped leaves nothing to wait for. XLA starts a program over
several CPU devices only when the previous one has ended (0.10 to 0.12), and a GPU's stream runs
programs in order. So a small program that is dispatched now ends after all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from callgate._jax import dispatch
from callgate._part import Wait

# By platform: devices, program, its operand. Atomic: single steps, and making a program
# twice does no harm; at most one entry for each platform.
_made: dict[str, tuple[list[Any], Any, Any]] = {}
# The least number of devices with which a platform's programs may run after their dispatch without
# a result to wait for. On one CPU device such programs can't defer errors.
_FEWEST = {"cpu": 2, "gpu": 1, "cuda": 1}
# The newest thread; it may have ended. Atomic: one assignment.
_running: threading.Thread | None = None
# True in a forked child, where XLA has no threads, so no program runs. One thread: a forked child
# has no other.
_without_threads = False


def after_fork() -> None:
  global _running, _without_threads
  _running, _without_threads = None, dispatch.has_backend()


def pass_by(wait: Wait) -> bool:
  """Waits for all earlier programs of several CPU devices or of GPUs; False if the time ran out."""
  global _running
  found = {} if _without_threads else dispatch.local_devices()
  fenced = {p: devices for p, devices in found.items() if len(devices) >= _FEWEST.get(p, 1 << 30)}
  if not fenced:
    return True
  # On a separate thread. XLA may block the dispatch, where no signal would reach the caller. The
  # caller may also be in a trace or have set a mesh, which belong to its thread. At most one such
  # thread exists, however often a caller gives up.
  if _running is not None and not _ended(_running, wait):
    return False
  thread = threading.Thread(target=_run, args=(fenced,), name="callgate-fence", daemon=True)
  _running = thread
  try:
    thread.start()
  except RuntimeError:  # Python 3.12 starts no threads at exit
    _running = None
    return wait.poll(_started(fenced))
  return _ended(thread, wait)


def _ended(thread: threading.Thread, wait: Wait) -> bool:
  def joined(seconds: float) -> bool:
    if thread.is_alive():  # another thread may be about to start it
      thread.join(seconds)
    return not thread.is_alive()

  return wait.until(joined, 0.05)


def _run(fenced: dict[str, list[Any]]) -> None:
  has_ended = _started(fenced)
  pause = 1e-5
  while not has_ended():
    time.sleep(pause)  # in Python: an exit during a C++ wait would abort the process
    pause = min(2 * pause, 1e-3)


def _started(fenced: dict[str, list[Any]]) -> Callable[[], bool]:
  """Dispatches the programs; returns a function that returns True once they have ended."""
  for platform, devices in fenced.items():
    if platform not in _made or _made[platform][0] != devices:
      mesh = jax.sharding.Mesh(np.array(devices), ("device",))
      sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
      zeros = np.zeros(len(devices), np.int8)
      shards = [jax.device_put(zeros[i : i + 1], device) for i, device in enumerate(devices)]
      operand = jax.make_array_from_single_device_arrays(zeros.shape, sharding, shards)
      _made[platform] = devices, jax.jit(lambda x: x + x).lower(operand).compile(), operand
  results = [program(operand) for _, program, operand in map(_made.__getitem__, fenced)]
  return lambda: all(result.is_ready() for result in results)
