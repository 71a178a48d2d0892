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

  step = steps.counted(reading, lambda count, carry: send(count, carry, count % save.every == 0))
  step = steps.stoppable(step) if may_stop else step
  state = steps.first_state(first, start, may_stop=may_stop)
  if save.resume and length:
    mark = Mark.of(bar, np.int32(length) - start)
    last, ys = _scan_from(start, steps.marked(step, mark), state, xs, length, ys, reverse)
  else:
    last, ys = jax.lax.scan(steps.marked(step, Mark.of(bar)), state, xs, length, reverse, *rest)
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
