# SPDX-License-Identifier: Apache-2.0
"""A `scan` whose carry is saved while it runs, and one that goes on from a later step."""

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
from callgate._loops import steps
from callgate._loops.progress import Mark, Progress, deeper
from callgate._loops.steps import State, Step


def scan(
  save: Any, f: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool,
  *rest: Any, bar: Progress | None, may_stop: bool,
) -> tuple[State, Any]:  # fmt: skip
  """The last state and the ys of a scan with `save=`; `rest` are its arguments behind `reverse`."""
  if not isinstance(save, Checkpoints):
    _options.refuse("scan", "save", "callgate.Checkpoints or None", save)
  # Traced once, for its feeds, its results' types and for the step.
  body = jax.jit(lambda carry, x: f(carry, x), inline=True)
  feeds: list[FeedGate] = []  # those that the body reads, when it has been traced
  if save.resume and (length := _length(xs, length)):
    with deeper(bar is not None):
      init, feeds[:] = _prepared(body, init, _at(jax.tree.map(jnp.asarray, xs), 0))
  start, run, first = core(save).begin(f, init, length)
  if feeds:
    resuming.skip(feeds, core(save).counts(start, run, resuming.names(feeds)))

  def reading(carry: Any, x: Any) -> Any:
    feeds[:] = resuming.feeds_in(body.trace(carry, x).jaxpr)
    return body(carry, x)

  def send(count: Any, carry: Any, due: Any) -> None:
    core(save).send(count, run, carry, resuming.counts(feeds, due), due)

  step = steps.counted(reading, lambda count, carry: send(count, carry, count % save.every == 0))
  step = steps.stoppable(step) if may_stop else step
  state = steps.first_state(first, start, may_stop=may_stop)
  if save.resume and length:
    mark = Mark.of(bar, np.int32(length) - start)
    last, ys = _scan_from(start, step, mark, state, xs, length, reverse)
  else:
    last, ys = jax.lax.scan(steps.marked(step, Mark.of(bar)), state, xs, length, reverse, *rest)
  count, _, carry = last
  send(count, carry, (count % save.every != 0) & (count > start))
  return last, ys


def _prepared(body: Any, init: Any, x: Any) -> tuple[Any, Sequence[FeedGate]]:
  """The first carry in the types that the loop gives it, and the feeds that a step reads."""
  init = jax.tree.map(jnp.asarray, init)
  traced = body.trace(init, x)
  made = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
  if isinstance(made, tuple) and made and jax.tree.structure(made[0]) == jax.tree.structure(init):
    init = loops.promoted(init, made[0])
  return init, resuming.feeds_in(traced.jaxpr)


def _scan_from(
  start: Any, step: Step, mark: Mark | None, init: State, xs: Any, length: int, reverse: bool
) -> tuple[State, Any]:
  """`scan` from step `start` on; the ys of the steps before are zeros."""
  step = jax.jit(step, inline=True)  # traced once, for its results' types and for the step
  init, xs = jax.tree.map(jnp.asarray, (init, xs))
  with deeper(mark is not None):
    _, types = tracing.result_avals(step, init, _at(xs, 0))
  ys = jax.tree.map(lambda aval: tracing.zeros_of(loops.stacked(aval, length)), types)

  def body(index: Any, state: Any) -> Any:
    carry, ys = state
    place = length - 1 - index if reverse else index
    carry, y = steps.marked(step, mark)(carry, _at(xs, place))
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=place, axis=0)
    return carry, jax.tree.map(lambda all_, one: put(all_, one), ys, y)

  carry, ys = jax.lax.fori_loop(start, np.int32(length), body, (init, ys))
  return carry, jax.tree.map(lambda y, aval: loops.weakly_typed(y, aval.weak_type), ys, types)


def _at(xs: Any, place: Any) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), xs)


def _length(xs: Any, length: int | None) -> int:
  """The number of steps, as `jax.lax.scan` finds it."""
  lengths = {jnp.shape(x)[0] for x in jax.tree.leaves(xs) if jnp.ndim(x)}
  lengths |= {length} if length is not None else set()
  if len(lengths) != 1:
    raise GateDefinitionError(
      f"scan: with save=, expected one number of steps from xs and length, got {sorted(lengths)}"
    )
  return lengths.pop()
