# SPDX-License-Identifier: Apache-2.0
"""The cost of a lane under vmap: an f32 scalar function over 1,000 lanes, in one compiled program.

"each" calls Python once a lane, "whole" once for all lanes; the number of Python calls of one
execution is counted and stands in the notes. Unit: microseconds per lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.peers import adapters

EACH = 'callgate in-place gate, vmap="each"'
WHOLE = 'callgate in-place gate, vmap="whole"'
WHOLE_CALLS = 'Python calls of one execution, vmap="whole"'
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)

Make = Callable[[Callable[[], None]], Callable[[jax.Array], jax.Array]]

TARGETS = (
  harness.Target("a lane of an 'each' gate, microseconds", EACH, at_most=1.3),
  harness.Target("Python calls of a 'whole' gate", WHOLE_CALLS, at_most=1.0),
)


def run(options: harness.Options) -> harness.Report:
  """Measures one execution over all lanes and counts its Python calls."""
  lanes = options.pick(1000, 100)
  counts: dict[str, int] = {}
  contestants = [
    harness.Contestant(name, functools.partial(_program, make, name, lanes, counts))
    for name, make in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(50))
  rows = [_with_count(row, counts) for row in rows]
  if WHOLE in counts:
    rows.append(harness.Row(WHOLE_CALLS, samples=(float(counts[WHOLE]),), note="a count", unit=""))
  title = f"One lane of an f32 scalar function under vmap, {lanes} lanes"
  settings = {"lanes": lanes}
  return harness.Report("vmap", title, "us", rows, EACH, TARGETS, settings, quick=options.quick)


def _with_count(row: harness.Row, counts: dict[str, int]) -> harness.Row:
  if row.name not in counts:
    return row
  return replace(row, note=f"Python calls of one execution: {counts[row.name]}")


def _program(make: Make, name: str, lanes: int, counts: dict[str, int]) -> harness.Work:
  """Counts the calls of one execution, then times a program without the counter."""
  operand = jnp.arange(lanes, dtype=jnp.float32)
  calls = 0

  def count() -> None:
    nonlocal calls
    calls += 1

  counted = jax.jit(jax.vmap(make(count)))
  harness.check(np.array_equal(counted(operand), operand), "the result is not the argument")
  counts[name] = calls
  timed = jax.jit(jax.vmap(make(lambda: None)))
  harness.check(np.array_equal(timed(operand), operand), "the result is not the argument")

  work = harness.fitted(harness.repeated(timed, operand), 20)
  return harness.Work(work.thunk, work.calls * lanes)


def _gate(style: str, vmap: str, count: Callable[[], None]) -> Callable[..., jax.Array]:
  def inplace(out: np.ndarray, x: np.ndarray) -> None:
    count()
    out[...] = x

  def returning(x: np.ndarray) -> np.ndarray:
    count()
    return x

  body = inplace if style == "inplace" else returning
  return adapters.callgate().gate(body, out=lambda x: x, style=style, vmap=vmap)


def _pure_callback(vmap_method: str, count: Callable[[], None]) -> Callable[..., jax.Array]:
  def body(x: jax.Array) -> jax.Array:
    count()
    return x

  # The lanes' results have the lanes' shape: under "expand_dims" JAX asks for the batched one.
  return lambda x: jax.pure_callback(body, SCALAR, x, vmap_method=vmap_method)


def _buffer_callback(vmap_method: str, count: Callable[[], None]) -> Callable[..., jax.Array]:
  from jax.experimental.buffer_callback import buffer_callback

  def body(ctx: object, out: object, x: object) -> None:
    count()
    np.asarray(out)[...] = np.asarray(x)

  return buffer_callback(body, SCALAR, vmap_method=vmap_method)


CONTESTANTS: tuple[tuple[str, Make], ...] = (
  (EACH, functools.partial(_gate, "inplace", "each")),
  ('callgate return gate, vmap="each"', functools.partial(_gate, "return", "each")),
  (WHOLE, functools.partial(_gate, "inplace", "whole")),
  ("jax pure_callback, sequential", functools.partial(_pure_callback, "sequential")),
  ("jax pure_callback, expand_dims", functools.partial(_pure_callback, "expand_dims")),
  ("jax buffer_callback, sequential", functools.partial(_buffer_callback, "sequential")),
  ("jax buffer_callback, expand_dims", functools.partial(_buffer_callback, "expand_dims")),
)
