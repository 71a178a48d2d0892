# SPDX-License-Identifier: Apache-2.0
"""What an item of a host iterator costs in a compiled scan: a feed, and JAX's io_callback.

"cheap" items are there at once: the price of handing one over. "work" items take about as long to
make, in NumPy code that frees the interpreter's lock, as the program's step takes: a feed makes the
next one meanwhile, if there is a second core. Unit: microseconds per item.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from benchmarks import harness
from benchmarks.peers import adapters

ITEM = jax.ShapeDtypeStruct((1024,), jnp.float32)
SIDE = 384  # of the matrices that an item's making and a step multiply
FEED, FEED_WORK = "callgate feed, cheap items", "callgate feed, work items"
JAX, JAX_WORK = "jax ordered io_callback, cheap items", "jax ordered io_callback, work items"
STEP = "the step alone"

Item = np.ndarray
Read = Callable[[], jax.Array]


TARGETS = (
  harness.Target("a feed overlaps, as a share of io_callback", FEED_WORK, JAX_WORK, at_most=0.9),
)


def run(options: harness.Options) -> harness.Report:
  """Measures reading within a scan that is as long as a sample allows."""
  contestants = [
    harness.Contestant(name, functools.partial(_program, make, cheap))
    for name, make, cheap in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(30))
  title = f"One f32[{ITEM.shape[0]}] item of a host iterator in a scan"
  references = {JAX_WORK: FEED_WORK, STEP: FEED_WORK}
  return harness.Report(
    "feed", title, "us", rows, FEED, TARGETS, quick=options.quick, references=references
  )


def _cheap() -> Iterator[Item]:
  item = np.ones(ITEM.shape, np.float32)
  return (item for _ in itertools.count())


def _work() -> Iterator[Item]:
  matrix = np.ones((SIDE, SIDE), np.float32) / SIDE
  for _ in itertools.count():
    matrix = np.tanh(matrix @ matrix)
    yield np.full(ITEM.shape, matrix[0, 0], np.float32)


def _feed(iterator: Iterator[Item]) -> Read:
  return adapters.callgate().feed(iterator, prefetch=16, shape=ITEM).next


def _io_callback(iterator: Iterator[Item]) -> Read:
  return lambda: io_callback(lambda: next(iterator), ITEM, ordered=True)


def _nothing(iterator: Iterator[Item]) -> Read:
  return lambda: jnp.ones(ITEM.shape, ITEM.dtype)


def _program(make: Callable[[Iterator[Item]], Read], cheap: bool) -> harness.Work:
  read = make(_cheap() if cheap else _work())

  def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
    total, matrix = carry
    item = read()
    if not cheap:
      matrix = jnp.tanh(matrix @ matrix) + item[:SIDE]
    return (total + item[0], matrix), None

  start = (jnp.float32(0), jnp.zeros((SIDE, SIDE)))

  def executions(repeats: int) -> harness.Thunk:
    program = jax.jit(lambda carry: jax.lax.scan(step, carry, length=repeats)[0])
    total, _ = program(start)
    harness.check(
      bool(jnp.isfinite(total)) and (not cheap or total == repeats), "items are missing"
    )
    return lambda: jax.block_until_ready(program(start))

  return harness.fitted(executions, 200)


CONTESTANTS: tuple[tuple[str, Callable[[Iterator[Item]], Read], bool], ...] = (
  (FEED, _feed, True),
  (JAX, _io_callback, True),
  (FEED_WORK, _feed, False),
  (JAX_WORK, _io_callback, False),
  (STEP, _nothing, False),
)
