# SPDX-License-Identifier: Apache-2.0
"""Measures the costs of gates: counters for each gate, and traces of calls."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from callgate import _callgate
from callgate._core import options, registry
from callgate._gate.callee import GateCallee


def stats() -> dict[str, dict[str, float]]:
  """Returns the counters of all live gates, by name.

  ```python
  import callgate as cg, jax, numpy as np

  sort = cg.gate(np.sort, out=lambda x: x, name="stats.sort")
  jax.jit(sort)(np.ones(3, np.float32)).block_until_ready()
  assert cg.stats()["stats.sort"]["calls"] == 1
  ```

  Returns:
    A dict for each name, with `calls` (each lane counts), `errors`, `bytes` (operands and results),
    `python_seconds` (with the GIL held, including the callable) and `gil_wait_seconds`. The two
    times grow only while `callgate.config(timing=True)` or a `callgate.trace` is on. Counting is
    always on and costs nanoseconds.
  """
  counted: dict[str, dict[str, float]] = {}
  for name, gate in sorted(registry.operations()):
    if isinstance(gate, GateCallee):
      found = gate.callee.stats()
      seconds = {f"{what}_seconds": found[f"{what}_ns"] * 1e-9 for what in ("python", "gil_wait")}
      counted[name] = {what: found[what] for what in ("calls", "errors", "bytes")} | seconds
  return counted


class trace(contextlib.ContextDecorator):
  """Writes a trace of the calls in a block, by thread, for Perfetto or chrome://tracing.

  ```python
  with cg.trace("calls.json"):
    program(x)
  ```

  The events are calls of gates ("gate", or "workers" if they run there), kernels ("kernel", on the
  CPU only), taps ("tap") and feeds ("feed"). Other threads show consumers of records ("deliver")
  and the iterators of feeds ("produce"). `jax.profiler` shows the same spans as `callgate/NAME`,
  beside XLA's.

  Args:
    path: the JSON file. It is written at the end of the block, also after an exception.

  Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
  """

  def __init__(self, path: str | os.PathLike[str]) -> None:
    options.path("trace", "path", path)
    self._path = path
    self._open: list[int] = []  # a decorated function may call itself

  def __enter__(self) -> None:
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(self._path))):
      raise FileNotFoundError(
        f"trace: path: expected a file in an existing folder, got the missing folder {folder!r}"
      )
    self._open.append(_callgate.start_trace())

  def __exit__(self, *exception: object) -> None:
    events: list[dict[str, Any]] = []
    for kind, name, thread, start, wait, duration in _callgate.stop_trace(self._open.pop()):
      common = {"pid": os.getpid(), "tid": thread, "ph": "X", "ts": start / 1e3}
      call = {"name": name, "cat": kind, "dur": duration / 1e3}
      events.append({**common, **call, "args": {"gil_wait_us": wait / 1e3}})
      if wait > 1000:
        events.append({**common, "name": "wait for the GIL", "cat": "gil", "dur": wait / 1e3})
    with open(self._path, "w", encoding="utf-8") as file:
      json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)
