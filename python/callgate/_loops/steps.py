# SPDX-License-Identifier: Apache-2.0
"""The steps of the loops that callgate makes: one form, to which each feature adds its own.

A step takes the loop's state and an x, and gives the state after it and a y. The state is

    (count of the steps that have run, whether the loop goes on, the user's carry)

with None for whether it goes on where nothing stops it. A step that is `counted` calls the user's
body; one that is `stoppable`, or `marked` for a bar, is made of another. A scan that is saved sends
its carry after a step, and one that is resumed begins with a later step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from callgate._checkpoints.checkpoints import Checkpoints
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._feed import resuming
from callgate._feed.gate import FeedGate
from callgate._jax import loops, tracing
from callgate._loops import progress
from callgate._loops.marks import while_going
from callgate._loops.progress import Mark, Progress, deeper, wrapped
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

  def kept(x: Any, aval: Any) -> Any:
    has = jax.typeof(x)
    if (has.shape, has.dtype) != (aval.shape, aval.dtype):
      return _zeros(aval)
    # JAX's scan takes a weak type for the strong one, and does not trace the body again.
    return jnp.asarray(x, aval.dtype) if has.weak_type and not aval.weak_type else x

  is_same = jax.tree.structure(carry) == jax.tree.structure(after)
  return jax.tree.map(kept, carry, after) if is_same else jax.tree.map(_zeros, after)


def _zeros(aval: Any) -> Any:
  return loops.weakly_typed(tracing.zeros_of(aval), aval.weak_type)


# -- scans --------------------------------------------------------------------------------------
def scan(
  f: Callable[..., Any], init: Any, *given: Any, bar: Progress | None, may_stop: bool, save: Any
) -> tuple[State, Any]:
  """The last state and the ys of a scan with bars, stops or `save=`, as `jax.lax.scan` takes it."""
  if save is None:
    body = wrapped(body_of, f, Mark.of(bar), may_stop)
    return jax.lax.scan(body, first_state(init, np.int32(0), may_stop=may_stop), *given)
  if not isinstance(save, Checkpoints):
    _options.refuse("scan", "save", "callgate.Checkpoints or None", save)
  return _saved_scan(save, f, init, *given, bar=bar, may_stop=may_stop)


def _saved_scan(
  save: Checkpoints, f: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool,
  *rest: Any, bar: Progress | None, may_stop: bool,
) -> tuple[State, Any]:  # fmt: skip
  """A scan with `save=`; `rest` are its arguments behind `reverse`."""
  body = jax.jit(lambda carry, x: f(carry, x), inline=True)  # traced once
  feeds: list[FeedGate] = []  # those that the body reads, when it has been traced
  ys: Any = None
  if save.resume and (length := _length(xs, length)):
    init, xs = jax.tree.map(jnp.asarray, (init, xs))
    with deeper(bar is not None):
      init, ys, feeds[:] = _prepared(body, init, xs, length)
  start, run, first = core(save).begin(f, init, length)
  if feeds:
    resuming.skip(feeds, core(save).counts(start, run, resuming.names(feeds)))

  def reading(carry: Any, x: Any) -> Any:
    feeds[:] = resuming.feeds_in(body.trace(carry, x).jaxpr)
    return body(carry, x)

  def send(count: Any, carry: Any, due: Any) -> None:
    core(save).send(count, run, carry, resuming.counts(feeds, due), due)

  step = counted(reading, lambda count, carry: send(count, carry, count % save.every == 0))
  step = stoppable(step) if may_stop else step
  state = first_state(first, start, may_stop=may_stop)
  if save.resume and length:
    mark = Mark.of(bar, np.int32(length) - start)
    last, ys = _scan_from(start, marked(step, mark), state, xs, length, ys, reverse)
  else:
    last, ys = jax.lax.scan(marked(step, Mark.of(bar)), state, xs, length, reverse, *rest)
  count, _, carry = last
  send(count, carry, (count % save.every != 0) & (count > start))
  return last, ys


def _prepared(body: Any, init: Any, xs: Any, length: int) -> tuple[Any, Any, Sequence[FeedGate]]:
  """The first carry in the types that the loop gives it, the ys' types, and the feeds it reads."""
  traced = jax.jit(lambda init, xs: jax.lax.scan(body, init, xs, length)).trace(init, xs)
  last, ys = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
  init = jax.tree.map(lambda x, of: x if x.dtype == of.dtype else x.astype(of.dtype), init, last)
  return init, ys, resuming.feeds_in(traced.jaxpr)


def _scan_from(
  start: Any, step: Step, init: State, xs: Any, length: int, types: Any, reverse: bool
) -> tuple[State, Any]:
  """`scan` from step `start` on, with ys of these types; those of the steps before are zeros."""

  def body(index: Any, both: Any) -> Any:
    state, ys = both
    place = length - 1 - index if reverse else index
    x = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), xs)
    state, y = step(state, x)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=place, axis=0)
    return state, jax.tree.map(lambda all_, one: put(all_, one), ys, y)

  ys = jax.tree.map(tracing.zeros_of, types)
  state, ys = jax.lax.fori_loop(start, np.int32(length), body, (init, ys))
  return state, jax.tree.map(lambda y, aval: loops.weakly_typed(y, aval.weak_type), ys, types)


def _length(xs: Any, length: int | None) -> int:
  """The number of steps, as `jax.lax.scan` finds it."""
  lengths = {jnp.shape(x)[0] for x in jax.tree.leaves(xs) if jnp.ndim(x)}
  lengths |= {length} if length is not None else set()
  if len(lengths) != 1:
    raise GateDefinitionError(
      f"scan: with save=, expected one number of steps from xs and length, got {sorted(lengths)}"
    )
  return lengths.pop()
