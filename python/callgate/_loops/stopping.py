# SPDX-License-Identifier: Apache-2.0
"""The body of a `scan` that `callgate.stop` ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._jax import loops, tracing
from callgate._loops.going import while_going
from callgate._steer.stop import stop_requested


def first_state(init: Any, count: Any) -> Any:
  """The loop's first state: the count of steps that have run, whether it goes on, the carry."""
  return count, np.bool_(True), init


def stoppable(f: Callable[..., Any]) -> Callable[..., Any]:
  """The body, on a state as `first_state` makes it."""
  step = jax.jit(f, inline=True)  # traced once, for its results' types and for the step

  def body(state: Any, x: Any) -> Any:
    count, going, carry = state
    count, carry = while_going(going, count, carry)
    carried, y = tracing.result_avals(step, carry, x)

    def skip() -> Any:
      return (count, np.bool_(False), _kept(carry, carried)), jax.tree.map(_zeros, y)

    def run() -> Any:
      after, made = step(carry, x)
      return (count + 1, np.bool_(True), after), made

    # The look is part of the step's branch: it comes when the step before has ended, also where
    # the loop is unrolled, and doesn't come again once the loop has been stopped. `skip` is branch
    # 0: in a loop that ends early, zeros stand for what its later steps would have kept.
    state, made = jax.lax.cond(going, lambda: jax.lax.cond(stop_requested(), skip, run), skip)
    return state, while_going(going, None, made)[1]

  return body


def _kept(carry: Any, after: Any) -> Any:
  """The carry, as a step returns it where its types are those of a step's results.

  Else zeros: JAX's scan gives a first carry of Python's numbers these types and traces the body
  again, or says what the step has returned.
  """
  if jax.tree.structure(carry) != jax.tree.structure(after):
    return jax.tree.map(_zeros, after)
  return jax.tree.map(_of_type, carry, after)


def _of_type(x: Any, aval: Any) -> Any:
  has = jax.typeof(x)
  if (has.shape, has.dtype) != (aval.shape, aval.dtype):
    return _zeros(aval)
  # JAX's scan takes a weak type for the strong one, and does not trace the body again.
  return jnp.asarray(x, aval.dtype) if has.weak_type and not aval.weak_type else x


def _zeros(aval: Any) -> Any:
  return loops.weakly_typed(tracing.zeros_of(aval), aval.weak_type)
