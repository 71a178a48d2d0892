# SPDX-License-Identifier: Apache-2.0
"""`scan`, `fori_loop` and `while_loop`: JAX's loops, with bars, stops and checkpoints.

Without these they are JAX's own calls, and nothing else. With a progress bar the loop's body gets a
mark (`_loops/progress.py`); results stay those of JAX's loops, bit by bit.

The steps of loops have one form, to which each feature adds its own. A step takes the loop's state
and an x, and gives the state after it and a y. A step that is `_counted` calls the user's body; one
that is `_stoppable`, or `marked` for a bar, is made of another. A scan that is saved sends its
carry after a step, and one that is resumed begins with a later step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._checkpoints.checkpoints import Checkpoints
from callgate._core import options as _options
from callgate._core.errors import GateDefinitionError
from callgate._core.public import core
from callgate._feed import resuming
from callgate._feed.gate import FeedGate
from callgate._jax import loops, tracing
from callgate._loops.marks import while_going
from callgate._loops.progress import Mark, Progress, deeper, marked, options_of, wrapped
from callgate._steer.stop import stop_requested

_Carry = TypeVar("_Carry")
_Y = TypeVar("_Y")


class _LoopState(NamedTuple):
  """The state of a loop. The names are in JAX's messages about the carry.

  Attributes:
    count: how many steps have run.
    going: True if the loop goes on; None where nothing stops it.
    carry: the user's.
  """

  count: Any
  going: Any
  carry: Any


_Step = Callable[[_LoopState, Any], tuple[_LoopState, Any]]


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
) -> Any:
  """`jax.lax.scan`, with a progress bar, checkpoints, and for `callgate.stop` to end.

  ```python
  state, losses = cg.scan(step, state, batches, progress="training")
  state, losses, steps = cg.scan(step, state, batches, stoppable=True)
  state, losses = cg.scan(step, state, batches, save=cg.Checkpoints("runs/1", resume=True))
  ```

  Args:
    f: the body: (carry, x) to (carry, y).
    init: the first carry.
    xs: what is scanned over, along the leading axes.
    length: the number of steps, where `xs` doesn't give it.
    reverse: from the last step to the first.
    unroll: steps in one round of the loop.
    _split_transpose: as JAX has it.
    progress: True, a description, or `Progress` with all options; None or False for no bar.
    stoppable: after `callgate.stop` no further step runs. The ys of such steps are zeros.
    save: where the carry is saved while the loop runs, and taken up again.

  Returns:
    (the last carry, the stacked ys), as `jax.lax.scan` gives them; with `stoppable` (the carry that
    was reached, the ys, the number of steps that have run, an int32 of shape ()).
  """
  rest = (_split_transpose,) if _split_transpose else ()
  bar, may_stop = options_of(progress), _options.boolean("scan", "stoppable", stoppable)
  if bar is None and save is None and not may_stop:
    return jax.lax.scan(f, init, xs, length, reverse, unroll, *rest)
  _check_callable("scan: f: expected the loop's body", f)
  arguments = (xs, length, reverse, unroll, *rest)
  if save is None:
    body = wrapped(_body_of, f, Mark.of(bar), may_stop)
    first = _first_state(init, np.int32(0), may_stop=may_stop)
    last, ys = jax.lax.scan(body, first, *arguments)
  else:
    last, ys = _saved_scan(save, f, init, *arguments, bar=bar, may_stop=may_stop)
  count, _, carry = last
  return (carry, ys, count) if may_stop else (carry, ys)


def fori_loop(
  lower: Any,
  upper: Any,
  body_fun: Callable[[Any, _Carry], _Carry],
  init_val: _Carry,
  *,
  unroll: int | bool | None = None,
  progress: bool | str | Progress | None = None,
) -> _Carry:
  """`jax.lax.fori_loop`, with a progress bar.

  ```python
  import callgate as cg

  assert cg.fori_loop(0, 10, lambda i, total: total + i, 0, progress="adding") == 45
  ```

  Args:
    lower: the first index.
    upper: the index after the last.
    body_fun: the body: (index, value) to value.
    init_val: the first value.
    unroll: steps in one round of the loop, where both bounds are known when it is traced.
    progress: as for `scan`.

  Returns:
    The last value.
  """
  bar = options_of(progress)
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
  """`jax.lax.while_loop`, with a progress bar: a count, and a bar for `Progress(total=...)`.

  ```python
  import callgate as cg

  search = cg.Progress("search", total=100)
  assert cg.while_loop(lambda n: n < 100, lambda n: n + 1, 0, progress=search) == 100
  ```

  Args:
    cond_fun: whether there is another step.
    body_fun: the body: value to value.
    init_val: the first value.
    progress: as for `scan`.

  Returns:
    The last value.
  """
  bar = options_of(progress)
  if bar is None:
    return jax.lax.while_loop(cond_fun, body_fun, init_val)
  _check_callable("while_loop: cond_fun: expected a function", cond_fun)
  _check_callable("while_loop: body_fun: expected a function", body_fun)
  body, condition = wrapped(_counting, body_fun, Mark.of(bar)), wrapped(_of_value, cond_fun)
  first = _first_state(init_val, np.int32(0), may_stop=False)
  return jax.lax.while_loop(condition, body, first).carry


def _check_callable(expected: str, function: object) -> None:
  if not callable(function):
    raise TypeError(f"{expected}, got {function!r}")


def _of_index(index: Any, value: Any) -> tuple[Any, list[Any]]:
  return value, [index]


def _counting(body_fun: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
  step = _body_of(lambda value, _: (body_fun(value), None), mark, may_stop=False)
  return lambda state: step(state, None)[0]


def _of_value(cond_fun: Callable[..., Any]) -> Callable[..., Any]:
  return lambda state: cond_fun(state.carry)


# -- steps ----------------------------------------------------------------------------------------
def _first_state(init: Any, count: Any, *, may_stop: bool) -> _LoopState:
  return _LoopState(count, np.bool_(True) if may_stop else None, init)


def _body_of(f: Callable[..., Any], mark: Mark | None, may_stop: bool) -> _Step:
  """The body of a loop with a bar, or that may stop."""
  step = _counted(f)
  return marked(_stoppable(step) if may_stop else step, mark, _of_step)


def _counted(f: Callable[..., Any], after: Callable[[Any, Any], None] | None = None) -> _Step:
  """Calls the user's body, and then `after(count, carry)`."""

  # JAX takes a carry that the body leaves alone for a constant, with the mark on it: hence the
  # count, which XLA removes.
  def step(state: _LoopState, x: Any) -> tuple[_LoopState, Any]:
    count, going, carry = state
    found = f(carry, x)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
      raise TypeError(f"scan: f: expected a pair (carry, y) of the loop's body, got {found!r}")
    carry, y = found
    count = count + 1
    if after is not None:
      after(count, carry)
    return _LoopState(count, going, carry), y

  return step


def _of_step(state: _LoopState, _: Any) -> tuple[Any, list[Any]]:
  count, _, carry = state
  return carry, [count]


def _stoppable(step: _Step) -> _Step:
  """Looks before each step if the program has been asked to stop; then no further one runs."""
  step = jax.jit(step, inline=True)  # traced once, for its results' types and for the step

  def body(state: _LoopState, x: Any) -> tuple[_LoopState, Any]:
    count, going, carry = state
    count, carry = while_going(going, count, carry)
    before = _LoopState(count, None, carry)
    (_, _, carried), y = tracing.result_avals(step, before, x)

    def skip() -> tuple[_LoopState, Any]:
      return _LoopState(count, np.bool_(False), _kept(carry, carried)), jax.tree.map(_zeros, y)

    def run() -> tuple[_LoopState, Any]:
      (count, _, carry), made = step(before, x)
      return _LoopState(count, np.bool_(True), carry), made

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


# -- scans that are saved --------------------------------------------------------------------------
def _saved_scan(
  save: object, f: Callable[..., Any], init: Any, xs: Any, length: int | None, reverse: bool,
  *rest: Any, bar: Progress | None, may_stop: bool,
) -> tuple[_LoopState, Any]:  # fmt: skip
  """The last state and the ys; `rest` are arguments of `jax.lax.scan` behind `reverse`."""
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

  step = _counted(reading, lambda count, carry: send(count, carry, count % save.every == 0))
  step = _stoppable(step) if may_stop else step
  state = _first_state(first, start, may_stop=may_stop)
  if save.resume and length:
    mark = Mark.of(bar, np.int32(length) - start)
    last, ys = _scan_from(start, marked(step, mark, _of_step), state, xs, length, ys, reverse)
  else:
    last, ys = jax.lax.scan(marked(step, Mark.of(bar), _of_step), state, xs, length, reverse, *rest)
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
  start: Any, step: _Step, init: _LoopState, xs: Any, length: int, types: Any, reverse: bool
) -> tuple[_LoopState, Any]:
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
