# SPDX-License-Identifier: Apache-2.0
"""Scans whose derivatives need little memory.

A scan that may end early (`until=`) is a loop over chunks. There are as many chunks as a chunk has
steps. Reverse mode keeps the first carry of each chunk, and computes everything else again
(`jax.checkpoint`): O(sqrt n) values instead of O(n).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from callgate._loops.marks import while_going

_Step = Callable[[Any, Any], tuple[Any, Any]]


def size_of(length: int) -> int:
  """Returns the number of steps of a chunk."""
  return math.isqrt(length - 1) + 1


def of_chunk(step: _Step, size: int, reverse: bool, unroll: Any) -> _Step:
  """Returns the body of the loop over chunks: (state, the chunk's xs); see `_loops/loops.py`."""

  def body(state: Any, xs: Any) -> tuple[Any, Any]:
    count, going, carry = state
    count, carry = while_going(going, count, carry)
    run = _chunk(step, size, reverse, unroll, prevent_cse=False)  # it is a loop's body
    state, ys = run(type(state)(count, going, carry), xs)
    return state, while_going(going, None, ys)[1]

  return body


def _chunk(step: _Step, length: int, reverse: bool, unroll: Any, *, prevent_cse: bool) -> _Step:
  """Returns the steps of a chunk; derivatives keep only its first state."""

  def run(state: Any, xs: Any) -> tuple[Any, Any]:
    return jax.lax.scan(step, state, xs, length, reverse, unroll)

  return jax.checkpoint(run, prevent_cse=prevent_cse)


def scan(
  body: _Step, step: _Step, start: Any, xs: Any, length: int, reverse: bool, unroll: Any
) -> tuple[Any, Any]:
  """Returns the last state and the ys; `body` is that of `of_chunk`, which may have a mark."""
  size = size_of(length)
  count = length // size
  whole = count * size
  # The remaining steps run last.
  cut = length - whole if reverse else whole
  before, after = (jax.tree.map(part, xs) for part in (lambda x: x[:cut], lambda x: x[cut:]))
  main, rest = (after, before) if reverse else (before, after)
  main = jax.tree.map(lambda x: jnp.reshape(x, (count, size, *jnp.shape(x)[1:])), main)
  last, ys = jax.lax.scan(body, start, main, count, reverse)
  ys = jax.tree.map(lambda y: jnp.reshape(y, (whole, *y.shape[2:])), ys)
  if whole < length:
    last, more = _chunk(step, length - whole, reverse, unroll, prevent_cse=True)(last, rest)
    first, second = (more, ys) if reverse else (ys, more)
    ys = jax.tree.map(lambda *pair: jnp.concatenate(pair), first, second)
  return last, ys
