# SPDX-License-Identifier: Apache-2.0
"""`scan`, `fori_loop` and `while_loop`: JAX's loops, with bars, stops and checkpoints.

Without these features they call JAX's loops and do nothing else. With a progress bar, the loop's
body gets a mark (`_loops/progress.py`); the results stay those of JAX's loops, bit by bit.

A scan with `save` sends its carry after a step. A resumed scan begins with a later step.
`_loops/steps.py` has the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._checkpoints.checkpoints import Checkpoints
from callgate._core import options as _options
from callgate._core.encoding import is_open
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._core.where import where
from callgate._feed import resuming
from callgate._feed.gate import FeedGate
from callgate._jax import loops, tracing
from callgate._loops import automatic, chunks, resumed
from callgate._loops.progress import (
  Mark,
  Progress,
  deeper,
  marked,
  options_of,
  undecorated,
  with_total,
  wrapped,
)
from callgate._loops.steps import (
  Ends,
  LoopState,
  Step,
  axes_of,
  body_of,
  chunks_of,
  counted,
  ending,
  of_step,
)
from callgate._objects import before

_Carry = TypeVar("_Carry")
_Y = TypeVar("_Y")


def scan(
  f: Callable[[_Carry, Any], tuple[_Carry, _Y]],
  init: _Carry,
  xs: Any = None,
  length: int | None = None,
  reverse: bool = False,
  unroll: int | bool = 1,
  _split_transpose: bool = False,
  *,
  progress: bool | str | Progress | None = None,
  stoppable: bool = False,
  save: Checkpoints | None = None,
  until: Callable[[_Carry], Any] | None = None,
  checkpoint: bool = True,
) -> Any:
  """`jax.lax.scan` with a progress bar, checkpoints and early stopping.

  ```python
  state, losses = cg.scan(step, state, batches, progress="training")
  state, losses, steps = cg.scan(step, state, batches, stoppable=True)
  state, losses, steps = cg.scan(step, state, batches, until=lambda state: state.error < 1e-6)
  state, losses = cg.scan(step, state, batches, save=cg.Checkpoints("runs/1", resume=True))
  ```

  Args:
    f: the body: (carry, x) to (carry, y).
    init: the first carry.
    xs: the pytree of arrays to scan over, along their leading axes.
    length: the number of steps, if `xs` has no arrays.
    reverse: runs from the last step to the first.
    unroll: the number of steps in one iteration of the compiled loop.
    _split_transpose: as for `jax.lax.scan`.
    progress: True, a description, or a `Progress` with all options; None or False for no bar.
    stoppable: after `callgate.stop` no further step runs.
    save: `Checkpoints`, which save the carry while the loop runs, and resume from it.
    until: a function of the carry after a step that returns a bool of shape (). The loop ends after
      the first step for which it is True, so at least one step runs. Under `jax.vmap` each lane
      ends by itself, and the loop ends with the last lane.
    checkpoint: with `until`, runs the n steps in chunks of sqrt(n). Reverse mode keeps the carry of
      each chunk and computes each step once more; a bar moves once for each chunk. False keeps the
      residuals of each step. With `save` the loop behaves as with False.

  Returns:
    (the last carry, the stacked ys), as `jax.lax.scan` does. With `stoppable` or `until` it is (the
    last carry, the ys, the number of steps that ran, an int32 of shape ()). The ys of steps that
    didn't run are zeros.

  Raises:
    TypeError: `f` or `until` isn't a function, or returns a wrong type.
  """
  rest = (_split_transpose,) if _split_transpose else ()
  given = {"xs": xs, "length": length}
  bar = automatic.bar_of("scan", given) if progress is None else options_of(progress)
  may_stop = _options.boolean("scan", "stoppable", stoppable)
  in_chunks = _options.boolean("scan", "checkpoint", checkpoint) and until is not None
  if bar is None and save is None and until is None and not may_stop:
    return jax.lax.scan(f, init, xs, length, reverse, unroll, *rest)
  _check_callable("scan: f: expected the loop's body", f)
  if (may_stop or until is not None) and progress is None and (own := undecorated(f)) is not None:
    f, bar = own  # its steps are in a branch, where a bar has no loop
  if until is not None:
    _check_callable("scan: until: expected a function of the carry", until)
  if (may_stop or until is not None) and (make := _sharing(f, init, xs, length)) is not None:
    # A loop outside of programs becomes one, whose objects are its own: JAX's caches keep values
    # that such a loop closes over.
    if not tracing.is_staged():
      options: dict[str, Any] = {
        "length": length, "reverse": reverse, "unroll": unroll, "progress": bar or False,
        "stoppable": stoppable, "save": save, "until": until, "checkpoint": checkpoint,
        "_split_transpose": _split_transpose,
      }  # fmt: skip
      return wrapped(_program, f, *options.items())(init, xs)
    f = make()
  ends = Ends(may_stop, until, axes_of(until, f, init, xs) if until else frozenset())
  arguments = (xs, length, reverse, unroll, *rest)
  if save is not None:
    last, ys = _saved_scan(save, f, init, *arguments, bar=bar, ends=ends)
  elif in_chunks and (steps := _length(xs, length)):
    size, mark = chunks.size_of(steps), Mark.of(bar and with_total(bar, steps))
    body, step = wrapped(chunks_of, f, mark, ends, size, reverse, unroll)
    last, ys = chunks.scan(body, step, ends.first_state(init), xs, steps, reverse, unroll)
  else:
    body = wrapped(body_of, f, Mark.of(bar), ends)
    last, ys = jax.lax.scan(body, ends.first_state(init), *arguments)
  count, _, carry = last
  return (carry, ys, count) if ends else (carry, ys)


def _sharing(f: Any, init: Any, xs: Any, length: int | None) -> Any:
  """Returns a function that makes what a scan's steps share; None if they share nothing."""
  if not before.may_share() or not all(map(jnp.ndim, jax.tree.leaves(xs))):
    return None
  steps = automatic.lengths(xs, length)
  if len(steps) != 1 or is_open(n := steps.pop()) or n < 1:
    return None
  return before.with_shared(f, wrapped(before.traced, f), init, xs)


def _program(f: Any, *options: tuple[str, Any]) -> Any:
  """Returns a jitted `scan` of (init, xs)."""
  return jax.jit(lambda init, xs: scan(f, init, xs, **dict(options)))


def fori_loop(
  lower: Any,
  upper: Any,
  body_fun: Callable[[Any, _Carry], _Carry],
  init_val: _Carry,
  *,
  unroll: int | bool | None = None,
  progress: bool | str | Progress | None = None,
) -> _Carry:
  """`jax.lax.fori_loop` with a progress bar.

  ```python
  import callgate as cg

  assert cg.fori_loop(0, 10, lambda i, total: total + i, 0, progress="adding") == 45
  ```

  Args:
    lower: the first index.
    upper: the index after the last.
    body_fun: the body: (index, value) to value.
    init_val: the first value.
    unroll: the number of steps in one iteration of the compiled loop, if both bounds are known
      while tracing.
    progress: as for `scan`.

  Returns:
    The last value.
  """
  given = {"lower": lower, "upper": upper}
  bar = automatic.bar_of("fori_loop", given) if progress is None else options_of(progress)
  if bar is None:
    return jax.lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll)
  _check_callable("fori_loop: body_fun: expected the loop's body", body_fun)
  count = None
  if isinstance(lower, Tracer) or isinstance(upper, Tracer):
    count = jnp.maximum(jnp.asarray(upper) - jnp.asarray(lower), 0).astype(np.int32)
  body = wrapped(marked, body_fun, Mark.of(bar, count), _of_index)
  return jax.lax.fori_loop(lower, upper, body, init_val, unroll=unroll)


def while_loop(
  cond_fun: Callable[[_Carry], Any],
  body_fun: Callable[[_Carry], _Carry],
  init_val: _Carry,
  *,
  progress: bool | str | Progress | None = None,
) -> _Carry:
  """`jax.lax.while_loop` with a progress bar: a count, or a bar for `Progress(total=...)`.

  ```python
  import callgate as cg

  search = cg.Progress("search", total=100)
  assert cg.while_loop(lambda n: n < 100, lambda n: n + 1, 0, progress=search) == 100
  ```

  Args:
    cond_fun: the condition: value to bool; the loop continues while it is True.
    body_fun: the body: value to value.
    init_val: the first value.
    progress: as for `scan`.

  Returns:
    The last value.
  """
  bar = automatic.bar_of("while_loop", {}) if progress is None else options_of(progress)
  if bar is None:
    return jax.lax.while_loop(cond_fun, body_fun, init_val)
  _check_callable("while_loop: cond_fun: expected a function", cond_fun)
  _check_callable("while_loop: body_fun: expected a function", body_fun)
  body, condition = wrapped(_counting, body_fun, Mark.of(bar)), wrapped(_of_value, cond_fun)
  return jax.lax.while_loop(condition, body, Ends().first_state(init_val)).carry


def _check_callable(expected: str, function: object) -> None:
  if not callable(function):
    raise TypeError(f"{expected}, got {function!r}")


def _of_index(index: Any, value: Any) -> tuple[Any, list[Any]]:
  return value, [index]


def _counting(body_fun: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
  step = body_of(lambda value, _: (body_fun(value), None), mark, Ends())
  return lambda state: step(state, None)[0]


def _of_value(cond_fun: Callable[..., Any]) -> Callable[..., Any]:
  return lambda state: cond_fun(state.carry)


# -- scans with save= ------------------------------------------------------------------------------
def _saved_scan(
  save: object, f: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool,
  *rest: Any, bar: Progress | None, ends: Ends,
) -> tuple[LoopState, Any]:  # fmt: skip
  """Returns the last state and the ys; `rest` are arguments of `jax.lax.scan`, from `unroll` on."""
  if not isinstance(save, Checkpoints):
    _options.refuse("scan", "save", "callgate.Checkpoints or None", save)
  body = loops.traced_once(lambda carry, x: f(carry, x))
  feeds: list[FeedGate] = []  # the feeds that the body reads, once it has been traced
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
  step = ending(step, ends) if ends else step
  state = ends.first_state(first, start)
  if save.resume and length:
    mark = Mark.of(bar, np.int32(length) - start)
    results = _scan_from(start, marked(step, mark, of_step), state, xs, length, ys, reverse)
    last, ys = resumed.without_transpose(results, str(save.folder), str(where()))
  else:
    last, ys = jax.lax.scan(marked(step, Mark.of(bar), of_step), state, xs, length, reverse, *rest)
  count, _, carry = last
  send(count, carry, (count % save.every != 0) & (count > start))
  return last, ys


def _prepared(body: Any, init: Any, xs: Any, length: int) -> tuple[Any, Any, Sequence[FeedGate]]:
  """Returns the first carry in the loop's types, the types of the ys, and the feeds of the body."""
  traced = jax.jit(lambda init, xs: jax.lax.scan(body, init, xs, length)).trace(init, xs)
  last, ys = jax.tree.unflatten(jax.tree.structure(traced.out_info), traced.jaxpr.out_avals)
  init = jax.tree.map(lambda x, of: x if x.dtype == of.dtype else x.astype(of.dtype), init, last)
  return init, ys, resuming.feeds_in(traced.jaxpr)


def _scan_from(
  start: Any, step: Step, init: LoopState, xs: Any, length: int, types: Any, reverse: bool
) -> tuple[LoopState, Any]:
  """Scans from step `start` on; the ys, of these types, are zeros for the earlier steps."""

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
  """Returns the number of steps, as `jax.lax.scan` does."""
  lengths = automatic.lengths(xs, length)
  if len(lengths) != 1:
    raise GateDefinitionError(
      f"scan: expected one number of steps from xs and length, got {sorted(lengths)}"
    )
  return lengths.pop()
