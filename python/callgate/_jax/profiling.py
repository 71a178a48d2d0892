# SPDX-License-Identifier: Apache-2.0
"""JAX's profiler: spans on the host, and a test that a profile is taken (0.10 to 0.12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.lib import _profiler  # pyright: ignore[reportAttributeAccessIssue]

# True while a profile is taken. The public `jax.profiler.TraceAnnotation` only inherits it.
is_running: Callable[[], bool] = _profiler.TraceMe.is_enabled
# A context manager: (name, **metadata).
Span: Callable[..., Any] = _profiler.TraceMe


def at_start(begun: Callable[[], object]) -> None:
  """Calls `begun()` when this process begins to take a profile.

  JAX's functions make a session, which this function watches. A profile that another process
  requests makes none.
  """
  make = _profiler.ProfilerSession

  def session(*args: Any) -> Any:
    made = make(*args)
    begun()
    return made

  _profiler.ProfilerSession = session
