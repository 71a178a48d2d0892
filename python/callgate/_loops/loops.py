# SPDX-License-Identifier: Apache-2.0
"""`scan`, `fori_loop` and `while_loop`: JAX's loops, with a progress bar where one is asked for.

Without `progress` they are JAX's own calls, and nothing else. With it the loop's body gets a mark
(`_loops/progress.py`); results stay those of JAX's loops, bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._checkpoints.checkpoints import Checkpoints
from callgate._core import options as _options
from callgate._loops import saving, stopping
from callgate._loops.progress import (
  Marked,
  Progress,
  marking,
  options_of,
  with_mark_of_index,
  wrapped,
)

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
  if save is not None:
    arguments = (f, init, xs, length, reverse, unroll, _split_transpose)
    return saving.scan_saved(scan, save, *arguments, progress=progress, stoppable=stoppable)
  rest = (_split_transpose,) if _split_transpose else ()
  options = options_of(progress)
  if _options.boolean("scan", "stoppable", stoppable):
    if not callable(f):
      raise TypeError(f"scan: f: expected the loop's body, got {f!r}")
    if options is not None and options.at is not None:
      options = dataclasses.replace(options, at=wrapped(_of_state, options.at))
    first = stopping.first_state(init, np.int32(0))
    last, ys = scan(
      wrapped(stopping.stoppable, f),
      first,
      xs,
      length,
      reverse,
      unroll,
      _split_transpose,
      progress=options,
    )
    steps, _, carry = last
    return carry, ys, steps
  if options is None:
    return jax.lax.scan(f, init, xs, length, reverse, unroll, *rest)
  if not callable(f):
    raise TypeError(f"scan: f: expected the loop's body, got {f!r}")
  body = wrapped(_counted, f, Marked.of(options))
  (_, carry), ys = jax.lax.scan(body, (np.int32(0), init), xs, length, reverse, unroll, *rest)
  return carry, ys


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
  options = options_of(progress)
  if options is None:
    return jax.lax.fori_loop(lower, upper, body_fun, init_val, unroll=unroll)
  if not callable(body_fun):
    raise TypeError(f"fori_loop: body_fun: expected the loop's body, got {body_fun!r}")
  if not any(isinstance(bound, Tracer) for bound in (lower, upper)):
    body = wrapped(with_mark_of_index, body_fun, Marked.of(options))
    return jax.lax.fori_loop(lower, upper, body, init_val, unroll=unroll)
  mark = Marked.of(options, has_total=True)
  total = jnp.maximum(jnp.asarray(upper) - jnp.asarray(lower), 0).astype(np.int32)

  def body_with_total(index: Any, value: _Carry) -> _Carry:
    with marking(mark.bar, mark.operands(value, [index], total)):
      return body_fun(index, value)

  return jax.lax.fori_loop(lower, upper, body_with_total, init_val, unroll=unroll)


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
  options = options_of(progress)
  if options is None:
    return jax.lax.while_loop(cond_fun, body_fun, init_val)
  for name, function in (("cond_fun", cond_fun), ("body_fun", body_fun)):
    if not callable(function):
      raise TypeError(f"while_loop: {name}: expected a function, got {function!r}")
  body = wrapped(_counted, body_fun, Marked.of(options))
  condition = wrapped(_counted_condition, cond_fun)
  return jax.lax.while_loop(condition, body, (np.int32(0), init_val))[1]


# JAX takes a carry that the body leaves alone for a constant, with the mark on it: hence a count,
# which XLA removes.
def _counted(f: Callable[..., Any], mark: Marked) -> Callable[..., Any]:
  def body(carry: Any, *xs: Any) -> Any:
    count, inner = carry
    with marking(mark.bar, mark.operands(inner, [count])):
      after = f(inner, *xs)
    if not xs:  # of a `while_loop`
      return count + 1, after
    inner, y = after
    return (count + 1, inner), y

  return body


def _of_state(at: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """`Progress.at` of the carry of a loop that may stop."""
  return lambda state: at(state[2])


def _counted_condition(cond_fun: Callable[..., Any]) -> Callable[..., Any]:
  return lambda carry: cond_fun(carry[1])
