# SPDX-License-Identifier: Apache-2.0
"""Spans of callgate's own work on the host, in JAX's profiles and in `callgate.trace`.

JAX's profiles show the calls of programs as XLA's operations, as `callgate/NAME`. The run of a
gate's function is a span within its call. Work on other threads has spans of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any

from callgate import _callgate
from callgate._jax import profiling

_NOTHING = contextlib.nullcontext()


def span(kind: str, name: str) -> contextlib.AbstractContextManager[object]:
  """Returns a context manager that adds the block to the active timelines, if there are any."""
  return _Recorded(kind, name) if is_on() else _NOTHING


def is_on() -> bool:
  """Returns True while a timeline is recorded."""
  return _callgate.tracing() or profiling.is_running()


class _Recorded:
  """A span. `contextlib.contextmanager` would set an attribute of exceptions that pass through."""

  def __init__(self, kind: str, name: str) -> None:
    self._kind, self._name = kind, name
    self._span = profiling.Span(f"callgate/{kind} {name}")

  def __enter__(self) -> None:
    self._start = _callgate.now_ns()
    self._span.__enter__()

  def __exit__(self, *exception: Any) -> None:
    self._span.__exit__(*exception)
    _callgate.trace_event(self._kind, self._name, self._start)


def profiled(gate: str, gil_wait_ns: int) -> Any:
  """The runtime's hook in a gate's call: returns an entered span while a profile is taken."""
  if not profiling.is_running():
    _callgate.set_profiling(False)
    return None
  made = profiling.Span(f"callgate/{gate}", gil_wait_us=gil_wait_ns / 1e3)
  made.__enter__()
  return made


def start() -> None:
  """Sets the runtime's hook; called once by `_start.py`."""
  profiling.at_start(lambda: _callgate.set_profiling(True))
  _callgate.set_profiling(profiling.is_running())
