# SPDX-License-Identifier: Apache-2.0
"""The cost of a host iterator's item in a compiled scan: a feed, and JAX's io_callback.

"cheap" items, and "scalar" ones, are there at once: the price of handing one over. Items of 1 MiB
feed a step of about 0.2 ms, beside a Python loop that gives each to a compiled step by
`jax.device_put`: a row is an item's time, the step's included. Beside them stand the step alone, on
items that the device has, and the iterator alone: no way of feeding is faster than these. "work"
items take about as long to make, in NumPy code that frees the interpreter's lock, as the program's
step takes: a feed makes the next one meanwhile, if there is a second core. Unit: microseconds per
item.
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
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
MIB, LARGE_STEPS = jax.ShapeDtypeStruct((1 << 18,), jnp.float32), 32
FEED_SCALAR = "callgate feed, scalar items"
FEED_MIB, PUT_MIB = "callgate feed, 1 MiB and a step", "device_put in a loop, 1 MiB and a step"
STEP_MIB, ITERATOR_MIB = "the step alone, on 1 MiB", "the iterator alone, 1 MiB"
FEED, FEED_WORK = "callgate feed, cheap items", "callgate feed, work items"
JAX, JAX_WORK = "jax ordered io_callback, cheap items", "jax ordered io_callback, work items"
STEP = "the step alone"

Item = np.ndarray
Read = Callable[[], jax.Array]


TARGETS = (
  harness.Target("a scalar item, microseconds", FEED_SCALAR, at_most=1.0),
  harness.Target("an f32[1024] item, microseconds", FEED, at_most=2.0),
  harness.Target("a device_put loop over a feed of 1 MiB", PUT_MIB, FEED_MIB, at_least=2.0),
  harness.Target("a feed overlaps, as a share of io_callback", FEED_WORK, JAX_WORK, at_most=0.9),
)


def run(options: harness.Options) -> harness.Report:
  """Measures reading within a scan that is as long as a sample allows."""
  contestants = [
    harness.Contestant(name, functools.partial(_program, make, cheap))
    for name, make, cheap in CONTESTANTS
  ]
  contestants += [
    harness.Contestant(FEED_SCALAR, _scalars),
    harness.Contestant(FEED_MIB, functools.partial(_large, fed=True)),
    harness.Contestant(PUT_MIB, functools.partial(_large, fed=False)),
    harness.Contestant(STEP_MIB, _large_step),
    harness.Contestant(ITERATOR_MIB, _large_iterator),
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


def _scalars() -> harness.Work:
  item = np.ones((), np.float32)
  items = (item for _ in itertools.count())
  read = adapters.callgate().feed(items, prefetch=256, shape=SCALAR).next

  def executions(repeats: int) -> harness.Thunk:
    program = jax.jit(lambda c: jax.lax.scan(lambda c, _: (c + read(), None), c, length=repeats)[0])
    harness.check(float(program(0.0)) == repeats, "items are missing")
    return lambda: jax.block_until_ready(program(0.0))

  return harness.fitted(executions, 5000)


def _large_items() -> Iterator[Item]:
  for number in itertools.count():
    yield np.full(MIB.shape, number % 2, np.float32)


def _large_step_on(total: jax.Array, item: jax.Array) -> jax.Array:
  for _ in range(4):  # some 0.2 ms
    item = jnp.tanh(item * 0.5)
  return total + item.sum()


def _large(*, fed: bool) -> harness.Work:
  """A step on items of 1 MiB, each of which the iterator writes anew, as loaders do."""
  if fed:
    read = adapters.callgate().feed(_large_items(), prefetch=4, shape=MIB).next
    program = jax.jit(
      lambda total: jax.lax.scan(
        lambda c, _: (_large_step_on(c, read()), None), total, length=LARGE_STEPS
      )[0]
    )
    return harness.Work(lambda: jax.block_until_ready(program(jnp.float32(0))), LARGE_STEPS)
  compiled, source = jax.jit(_large_step_on), _large_items()

  def loop() -> None:
    total = jnp.float32(0)
    for _ in range(LARGE_STEPS):
      total = compiled(total, jax.device_put(next(source)))
    jax.block_until_ready(total)

  return harness.Work(loop, LARGE_STEPS)


def _large_step() -> harness.Work:
  items = jnp.stack([jnp.full(MIB.shape, n % 2, MIB.dtype) for n in range(LARGE_STEPS)])
  program = jax.jit(
    lambda total, xs: jax.lax.scan(lambda c, x: (_large_step_on(c, x), None), total, xs)[0]
  )
  return harness.Work(lambda: jax.block_until_ready(program(jnp.float32(0), items)), LARGE_STEPS)


def _large_iterator() -> harness.Work:
  source = _large_items()

  def loop() -> None:
    for _ in range(LARGE_STEPS):
      next(source)

  return harness.Work(loop, LARGE_STEPS)


CONTESTANTS: tuple[tuple[str, Callable[[Iterator[Item]], Read], bool], ...] = (
  (FEED, _feed, True),
  (JAX, _io_callback, True),
  (FEED_WORK, _feed, False),
  (JAX_WORK, _io_callback, False),
  (STEP, _nothing, False),
)
