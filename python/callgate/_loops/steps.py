# SPDX-License-Identifier: Apache-2.0
"""The steps of loops, in one form that each feature extends.

A step takes the loop's state and an x, and returns the next state and a y. `counted` makes a step
that calls the user's body. `ending` makes a step that may be the last one, and a mark adds a bar;
both wrap another step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from callgate._jax import loops, tracing
from callgate._loops import chunks
from callgate._loops.marks import while_going
from callgate._loops.progress import Mark, marked
from callgate._steer.stop import stop_requested


class LoopState(NamedTuple):
  """The state of a loop. JAX's messages about the carry show these names.

  Attributes:
    count: the number of steps that have run.
    going: True if the loop continues; None if it can't end early.
    carry: the user's carry.
  """

  count: Any
  going: Any
  carry: Any


Step = Callable[[LoopState, Any], tuple[LoopState, Any]]
_NONE = np.int32(0)  # zero steps


class Ends(NamedTuple):
  """The reasons for which a loop may end early.

  Attributes:
    may_stop, until: the options of `scan`.
    axes: the mesh axes along which devices may end at different steps.
  """

  may_stop: bool = False
  until: Callable[[Any], Any] | None = None
  axes: frozenset[Any] = frozenset()

  def __bool__(self) -> bool:
    return self.may_stop or self.until is not None

  def first_state(self, init: Any, count: Any = _NONE) -> LoopState:
    """Returns the state of a loop that begins with step `count`. An ended loop stays ended."""
    if not self:
      return LoopState(count, None, init)
    is_new = self.until is None or isinstance(count, np.generic)
    going = np.bool_(True) if is_new else (count == 0) | self.goes_on(init)
    return _vary_over(self.axes, LoopState(count, going, init))

  def goes_on(self, carry: Any) -> Any:
    if self.until is None:
      return np.bool_(True)
    found = self.until(carry)
    if jnp.shape(found) != () or jnp.result_type(found) != np.bool_:
      got = f"{jnp.result_type(found)}{list(jnp.shape(found))}"
      raise TypeError(f"scan: until: expected a bool of shape (), got {got}")
    return jnp.logical_not(found)


def axes_of(until: Any, f: Callable[..., Any], init: Any, xs: Any) -> frozenset[Any]:
  """Returns the mesh axes of a `jax.shard_map` that `until` varies over, by tracing it."""
  if not tracing.manual_axes():
    return frozenset()
  x = jax.tree.map(lambda x: x[0], xs)
  return tracing.varying_axes([tracing.result_avals(lambda c, x: until(f(c, x)[0]), init, x)])


def body_of(f: Callable[..., Any], mark: Mark | None, ends: Ends) -> Step:
  """Returns the body of a loop with a bar, or that may end early."""
  step = counted(f)
  return marked(ending(step, ends) if ends else step, mark, of_step)


def chunks_of(f: Callable[..., Any], mark: Mark | None, ends: Ends, *options: Any) -> Any:
  """Returns the bodies of a loop over chunks, and of the loop in a chunk."""
  step = body_of(f, None, ends)
  return marked(chunks.of_chunk(step, *options), mark, of_step), step


def counted(f: Callable[..., Any], after: Callable[[Any, Any], None] | None = None) -> Step:
  """Makes a step that calls the user's body, and then `after(count, carry)`."""

  # JAX treats an unchanged carry as a constant, and hoists it with the mark. The count prevents
  # that; XLA removes it.
  def step(state: LoopState, x: Any) -> tuple[LoopState, Any]:
    count, going, carry = state
    found = f(carry, x)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
      raise TypeError(
        f"scan: f: expected the loop's body to return a pair (carry, y), got {found!r}"
      )
    carry, y = found
    count = count + 1
    if after is not None:
      after(count, carry)
    return LoopState(count, going, carry), y

  return step


def of_step(state: LoopState, _: Any) -> tuple[Any, list[Any]]:
  count, _, carry = state
  return carry, [count]


def ending(step: Step, ends: Ends) -> Step:
  """Makes a step that first checks if the loop has ended or must stop, and then does nothing."""
  step = loops.traced_once(step)  # for its results' types, and for the step

  def body(state: LoopState, x: Any) -> tuple[LoopState, Any]:
    count, going, carry = state
    count, carry = while_going(going, count, carry)
    before = LoopState(count, None, carry)
    (_, _, carried), y = tracing.result_avals(step, before, x)

    vary = functools.partial(_vary_over, tracing.varying_axes([going]))

    def skip() -> tuple[LoopState, Any]:
      state = LoopState(count, np.bool_(False), _kept(carry, carried))
      return vary((state, jax.tree.map(_zeros, y)))

    def run() -> tuple[LoopState, Any]:
      (count, _, carry), made = step(before, x)
      return vary((LoopState(count, ends.goes_on(carry), carry), made))

    def run_unless_stopped() -> tuple[LoopState, Any]:
      return jax.lax.cond(stop_requested(), skip, run) if ends.may_stop else run()

    # The check is part of the step's branch. So it runs after the step before, even in an unrolled
    # loop, and it doesn't run after the loop has stopped. `skip` is branch 0: when a loop ends
    # early, zeros replace the residuals of its later steps.
    state, made = jax.lax.cond(going, run_unless_stopped, skip)
    return state, while_going(going, None, made)[1]

  return body


def _kept(carry: Any, after: Any) -> Any:
  """Returns the carry in the types of a step's results, if these differ only in that.

  Otherwise it returns zeros: for a first carry of Python numbers, JAX's scan then traces the body
  again with the right types, or it reports the step's types.
  """

  def kept(x: Any, aval: Any) -> Any:
    has = jax.typeof(x)
    if (has.shape, has.dtype) != (aval.shape, aval.dtype):
      return _zeros(aval)
    # JAX's scan accepts a weak type for the strong one, and doesn't trace the body again.
    return jnp.asarray(x, aval.dtype) if has.weak_type and not aval.weak_type else x

  is_same = jax.tree.structure(carry) == jax.tree.structure(after)
  return jax.tree.map(kept, carry, after) if is_same else jax.tree.map(_zeros, after)


def _vary_over(axes: frozenset[Any], tree: Any) -> Any:
  return jax.tree.map(functools.partial(tracing.vary_over, axes), tree) if axes else tree


def _zeros(aval: Any) -> Any:
  return loops.weakly_typed(tracing.zeros_of(aval), aval.weak_type)
