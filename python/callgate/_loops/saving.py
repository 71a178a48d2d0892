# SPDX-License-Identifier: Apache-2.0
"""A `scan` whose carry is saved while it runs, and one that goes on from a later step."""

from __future__ import annotations

import dataclasses
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
from callgate._jax import loops as _loops
from callgate._jax import tracing
from callgate._loops import stopping
from callgate._loops.progress import Marked, Progress, inside, marking, options_of, wrapped


def scan_saved(
  scan: Callable[..., Any],
  save: Any,
  f: Callable[..., Any],
  init: Any,
  xs: Any,
  length: int | None,
  reverse: bool,
  *rest: Any,
  progress: Any,
  stoppable: bool,
) -> Any:
  """`scan` with `save=`; `rest` are its arguments behind `reverse`."""
  if not isinstance(save, Checkpoints):
    _options.refuse("scan", "save", "callgate.Checkpoints or None", save)
  if not callable(f):
    raise TypeError(f"scan: f: expected the loop's body, got {f!r}")
  bar = options_of(progress)
  # Traced once, for its feeds, its results' types and for the step.
  step = jax.jit(lambda carry, x: f(carry, x), inline=True)
  feeds: list[FeedGate] = []
  if save.resume and (length := _length(xs, length)):
    with inside(bar):
      init, feeds[:] = _prepared(step, init, _at(jax.tree.map(jnp.asarray, xs), 0))
  start, run, first = core(save).begin(f, init, length)
  if feeds:
    resuming.skip(feeds, core(save).counts(start, run, resuming.names(feeds)))
  body = _saving(save, run, step, feeds)
  if bar is not None and bar.at is not None:
    bar = dataclasses.replace(bar, at=wrapped(_of_counted, bar.at))
  if save.resume and length is not None:
    state: Any = (start, first)
    if stoppable:
      body, state = wrapped(stopping.stoppable, body), stopping.first_state(state, start)
      if bar is not None and bar.at is not None:
        bar = dataclasses.replace(bar, at=wrapped(_of_stoppable, bar.at))
    last, ys = _scan_from(start, body, state, xs, length, reverse, bar)
    looped = (last[2], ys, last[0]) if stoppable else (last, ys)
  else:
    options = {"progress": bar, "stoppable": stoppable}
    looped = scan(body, (start, first), xs, length, reverse, *rest, **options)
  (count, carry), *others = looped
  due = (count % save.every != 0) & (count > start)
  core(save).send(count, run, carry, resuming.counts(feeds, due), due)
  return carry, *others


def _prepared(step: Any, init: Any, x: Any) -> tuple[Any, Sequence[FeedGate]]:
  """The first carry in the types that the loop gives it, and the feeds that a step reads."""
  init = jax.tree.map(jnp.asarray, init)
  traced = step.trace(init, x)
  made = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
  if isinstance(made, tuple) and made and jax.tree.structure(made[0]) == jax.tree.structure(init):
    init = _loops.promoted(init, made[0])
  return init, resuming.feeds_in(traced.jaxpr)


def _of_counted(at: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """`Progress.at` of the carry beside the count."""
  return lambda state: at(state[1])


def _of_stoppable(at: Callable[[Any], Any]) -> Callable[[Any], Any]:
  return lambda state: at(state[2])


def _saving(save: Checkpoints, run: Any, step: Any, feeds: list[FeedGate]) -> Callable[..., Any]:
  """The body with a count of the steps that have run, from which checkpoints are sent.

  The feeds that it reads are in `feeds` when it has been traced.
  """

  def body(state: Any, x: Any) -> Any:
    count, carry = state
    feeds[:] = resuming.feeds_in(step.trace(carry, x).jaxpr)
    carry, y = step(carry, x)
    count = count + 1
    due = count % save.every == 0
    core(save).send(count, run, carry, resuming.counts(feeds, due), due)
    return (count, carry), y

  return body


def _scan_from(
  start: Any,
  f: Callable[..., Any],
  init: Any,
  xs: Any,
  length: int,
  reverse: bool,
  progress: Progress | None,
) -> tuple[Any, Any]:
  """`scan` from step `start` on; the ys of the steps before are zeros."""
  if length == 0:
    return jax.lax.scan(f, init, xs, length, reverse)
  step = jax.jit(f, inline=True)  # traced once, for its results' types and for the step
  mark = None if progress is None else Marked.of(progress, has_total=True)

  init = jax.tree.map(jnp.asarray, init)
  xs = jax.tree.map(jnp.asarray, xs)
  with inside(mark):
    _, types = tracing.result_avals(step, init, _at(xs, 0))
  ys = jax.tree.map(lambda aval: tracing.zeros_of(_loops.stacked(aval, length)), types)

  def body(index: Any, state: Any) -> Any:
    carry, ys = state
    place = length - 1 - index if reverse else index
    if mark is None:
      carry, y = step(carry, _at(xs, place))
    else:
      with marking(mark.bar, mark.operands(carry, [index], np.int32(length) - start)):
        carry, y = step(carry, _at(xs, place))
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=place, axis=0)
    return carry, jax.tree.map(lambda all_, one: put(all_, one), ys, y)

  carry, ys = jax.lax.fori_loop(start, np.int32(length), body, (init, ys))
  return carry, jax.tree.map(lambda y, aval: _loops.weakly_typed(y, aval.weak_type), ys, types)


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
