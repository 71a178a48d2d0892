# SPDX-License-Identifier: Apache-2.0
"""JAX's profiler: spans of the host, and whether one runs (0.10 to 0.12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.lib import _profiler  # pyright: ignore[reportAttributeAccessIssue]

# True while a profile is taken. `jax.profiler.TraceAnnotation` has it, too, but not as its own.
is_running: Callable[[], bool] = _profiler.TraceMe.is_enabled
# A context manager: (name, **metadata).
Span: Callable[..., Any] = _profiler.TraceMe


def at_start(begun: Callable[[], object]) -> None:
  """Has `begun()` called when this process begins to take a profile.

  All of JAX's ways make a session; those of a profile that is asked for from elsewhere do not.
  """
  make = _profiler.ProfilerSession

  def session(*args: Any) -> Any:
    made = make(*args)
    begun()
    return made

  _profiler.ProfilerSession = session
