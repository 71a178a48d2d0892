# SPDX-License-Identifier: Apache-2.0
"""The body of a `scan` that `callgate.stop` ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from callgate._jax import tracing
from callgate._steer.stop import stop_requested


def stoppable(f: Callable[..., Any]) -> Callable[..., Any]:
  """The body with a count of the steps that have run, and whether it was asked to stop."""
  step = jax.jit(f, inline=True)  # traced once, for its results' types and for the step

  def body(state: Any, x: Any) -> Any:
    count, stopped, carry = state
    carried, y = tracing.result_avals(step, carry, x)

    def skip() -> Any:
      return (count, np.bool_(True), _kept(carry, carried)), jax.tree.map(tracing.zeros_of, y)

    def run() -> Any:
      after, made = step(carry, x)
      return (count + 1, np.bool_(False), after), made

    # The look is part of the step's branch: it comes when the step before has ended, also where
    # the loop is unrolled, and doesn't come again once the loop has been stopped.
    return jax.lax.cond(stopped, skip, lambda: jax.lax.cond(stop_requested(), skip, run))

  return body


def _kept(carry: Any, after: Any) -> Any:
  """The carry, where a step gives one of its types; else something of the step's types.

  JAX's scan then gives the first carry these types, where it is of Python's numbers, and traces
  the body again; or it says what the step has returned.
  """
  if jax.tree.structure(carry) != jax.tree.structure(after):
    return jax.tree.map(tracing.zeros_of, after)
  return jax.tree.map(lambda x, aval: x if _fits(x, aval) else tracing.zeros_of(aval), carry, after)


def _fits(x: Any, aval: Any) -> bool:
  has = jax.typeof(x)
  return (has.shape, has.dtype) == (aval.shape, aval.dtype) and has.weak_type <= aval.weak_type
