# SPDX-License-Identifier: Apache-2.0
"""The body of a `scan` that `callgate.stop` ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from callgate._jax import tracing
from callgate._steer.stop import stop_requested


def stoppable(f: Callable[..., Any]) -> Callable[..., Any]:
  """The body with a count of the steps that have run, and whether it was asked to stop."""
  step = jax.jit(f, inline=True)  # traced once, for its results' types and for the step

  def body(state: Any, x: Any) -> Any:
    count, stopped, carry = state
    stopped = stopped | stop_requested()
    _, y = tracing.result_avals(step, carry, x)

    def skip() -> Any:
      return carry, jax.tree.map(tracing.zeros_of, y)

    carry, y = jax.lax.cond(stopped, skip, lambda: step(carry, x))
    return (count + ~stopped, stopped, carry), y

  return body
