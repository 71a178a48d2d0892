# SPDX-License-Identifier: Apache-2.0
"""`scan`, `fori_loop` and `while_loop`: JAX's loops, with what `_loops/steps.py` adds to a step.

Without that they are JAX's own calls, and nothing else. With a progress bar the loop's body gets a
mark (`_loops/progress.py`); results stay those of JAX's loops, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from callgate._checkpoints.checkpoints import Checkpoints
from callgate._core import options as _options
from callgate._loops import steps
from callgate._loops.progress import Mark, Progress, marked, options_of, wrapped

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
  rest = (_split_transpose,) if _split_transpose else ()
  bar, may_stop = options_of(progress), _options.boolean("scan", "stoppable", stoppable)
  if bar is None and save is None and not may_stop:
    return jax.lax.scan(f, init, xs, length, reverse, unroll, *rest)
  _check_callable("scan: f: expected the loop's body", f)
  arguments = (f, init, xs, length, reverse, unroll, *rest)
  last, ys = steps.scan(*arguments, bar=bar, may_stop=may_stop, save=save)
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
  body = wrapped(marked, body_fun, Mark.of(bar, count), _parts)
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
  body, condition = wrapped(_counted, body_fun, Mark.of(bar)), wrapped(_of_value, cond_fun)
  first = steps.first_state(init_val, np.int32(0), may_stop=False)
  return jax.lax.while_loop(condition, body, first)[2]


def _check_callable(expected: str, function: object) -> None:
  if not callable(function):
    raise TypeError(f"{expected}, got {function!r}")


def _parts(index: Any, value: Any) -> tuple[Any, list[Any]]:
  return value, [index]


def _counted(body_fun: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
  step = steps.body_of(lambda value, _: (body_fun(value), None), mark, may_stop=False)
  return lambda state: step(state, None)[0]


def _of_value(cond_fun: Callable[..., Any]) -> Callable[..., Any]:
  return lambda state: cond_fun(state[2])
