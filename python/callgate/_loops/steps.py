# SPDX-License-Identifier: Apache-2.0
"""The steps of the loops that callgate makes: one form, to which each feature adds its own.

A step takes the loop's state and an x, and gives the state after it and a y. The state is

    (count of the steps that have run, whether the loop goes on, the user's carry)

with None for whether it goes on where nothing stops it. A step that is `counted` calls the user's
body; one that is `stoppable`, or `marked` for a bar, is made of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._jax import loops, tracing
from callgate._loops import progress
from callgate._loops.marks import while_going
from callgate._loops.progress import Mark
from callgate._steer.stop import stop_requested

State = tuple[Any, Any, Any]
Step = Callable[[State, Any], tuple[State, Any]]


def first_state(init: Any, count: Any, *, may_stop: bool) -> State:
  return count, np.bool_(True) if may_stop else None, init


def body_of(f: Callable[..., Any], mark: Mark | None, may_stop: bool) -> Step:
  """The body of a loop with a bar, or that may stop."""
  step = counted(f)
  return marked(stoppable(step) if may_stop else step, mark)


def counted(f: Callable[..., Any], after: Callable[[Any, Any], None] | None = None) -> Step:
  """Calls the user's body, and then `after(count, carry)`."""

  # JAX takes a carry that the body leaves alone for a constant, with the mark on it: hence the
  # count, which XLA removes.
  def step(state: State, x: Any) -> tuple[State, Any]:
    count, going, carry = state
    carry, y = f(carry, x)
    count = count + 1
    if after is not None:
      after(count, carry)
    return (count, going, carry), y

  return step


def marked(step: Step, mark: Mark | None) -> Step:
  """Marks the step for a bar, if there is one."""
  return progress.marked(step, mark, _parts)


def _parts(state: State, _: Any) -> tuple[Any, list[Any]]:
  count, _, carry = state
  return carry, [count]


def stoppable(step: Step) -> Step:
  """Looks before each step if the program has been asked to stop; then no further one runs."""
  step = jax.jit(step, inline=True)  # traced once, for its results' types and for the step

  def body(state: State, x: Any) -> tuple[State, Any]:
    count, going, carry = state
    count, carry = while_going(going, count, carry)
    before = count, None, carry
    (_, _, carried), y = tracing.result_avals(step, before, x)

    def skip() -> tuple[State, Any]:
      return (count, np.bool_(False), _kept(carry, carried)), jax.tree.map(_zeros, y)

    def run() -> tuple[State, Any]:
      (count, _, carry), made = step(before, x)
      return (count, np.bool_(True), carry), made

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
