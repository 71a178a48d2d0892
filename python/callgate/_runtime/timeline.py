# SPDX-License-Identifier: Apache-2.0
"""Spans of callgate's own work on the host: in JAX's profiles, and in `callgate.trace`.

The calls of programs are in JAX's profiles as XLA's operations, under `callgate/NAME`. What a
gate's function takes of its call is a span within it, and so is what runs on other threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from callgate import _callgate
from callgate._jax import profiling

_NOTHING = contextlib.nullcontext()


def span(kind: str, name: str) -> contextlib.AbstractContextManager[object]:
  """A block on the timelines that are being recorded; nothing where none is."""
  return _recorded(kind, name) if is_on() else _NOTHING


def is_on() -> bool:
  """True while a timeline is being recorded."""
  return _callgate.tracing() or profiling.is_running()


@contextlib.contextmanager
def _recorded(kind: str, name: str) -> Generator[None]:
  start = _callgate.now_ns()
  try:
    with profiling.Span(f"callgate/{kind} {name}"):
      yield
  finally:
    _callgate.trace_event(kind, name, start)


def profiled(gate: str, gil_wait_ns: int) -> Any:
  """The runtime's hook in a gate's call: an entered span, where a profile is being taken."""
  if not profiling.is_running():
    _callgate.set_profiling(False)
    return None
  made = profiling.Span(f"callgate/{gate}", gil_wait_us=gil_wait_ns / 1e3)
  made.__enter__()
  return made


def start() -> None:
  """Called once by `import callgate`."""
  profiling.at_start(lambda: _callgate.set_profiling(True))
  _callgate.set_profiling(profiling.is_running())
