# SPDX-License-Identifier: Apache-2.0
"""How much a channel moves, its consumer included: from the first tap to the last delivery.

A sample runs a program that sends its records, then waits until the consumer has had them all.
Unit: microseconds per record; for records of 64 MiB, a copy of that size stands beside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters

NATIVE = "native sink (statistics), f32 scalars"
BATCH = "batch consumer, f32 scalars"
EACH = "function called for each record, f32 scalars"
LARGE = "batch consumer, records of 64 MiB"
COPY = "numpy copy of 64 MiB"
HIGH_WATER = "most bytes in a channel of 1 MiB, over its capacity"
DEBUG = "jax debug.callback, f32 scalars"

TARGETS = (
  harness.Target("native sink: a million a second, microseconds", NATIVE, at_most=1.0),
  harness.Target("batch consumer: a million a second, microseconds", BATCH, at_most=1.0),
  harness.Target("function: 200,000 a second, microseconds", EACH, at_most=5.0),
  harness.Target("64 MiB: half of a copy's bandwidth", LARGE, COPY, at_most=2.0),
  harness.Target("memory over capacity", HIGH_WATER, at_most=1.1),
)


def run(options: harness.Options) -> harness.Report:
  """Measures sustained throughput."""
  cg = adapters.callgate()
  count = options.pick(200_000, 2_000)
  contestants = [
    harness.Contestant(NATIVE, functools.partial(_scalars, "native", cg.sinks.Stats, {}, count)),
    harness.Contestant(
      BATCH, functools.partial(_scalars, "batch", _nothing, {"batch": True}, count)
    ),
    harness.Contestant(EACH, functools.partial(_scalars, "each", _nothing, {}, count // 4)),
    harness.Contestant(DEBUG, functools.partial(_debug, options.pick(2_000, 100))),
    harness.Contestant(LARGE, functools.partial(_large, options.pick(1 << 24, 1 << 16))),
    harness.Contestant(COPY, functools.partial(_copy, options.pick(1 << 24, 1 << 16))),
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(15))
  rows.append(_high_water(options.pick(100_000, 1_000)))
  title = "One record through a channel, consumer included"
  references = {LARGE: COPY, COPY: COPY, HIGH_WATER: HIGH_WATER}
  return harness.Report(
    "channels", title, "us", rows, BATCH, TARGETS, quick=options.quick, references=references
  )


def _nothing() -> Callable[[Any], None]:
  return lambda value: None


def _sender(name: str, count: int) -> Any:
  cg = adapters.callgate()
  body = lambda i, c: (cg.tap(c, name), c)[1]
  return jax.jit(lambda x: lax.fori_loop(0, count, body, x))


def _scalars(
  name: str, consumer: Callable[[], Any], options: dict[str, Any], count: int
) -> harness.Work:
  channel = adapters.callgate().channel(f"benchmark {name}", to=consumer(), **options)
  program = _sender(channel.name, count)
  operand = jnp.float32(1)

  def thunk() -> None:
    jax.block_until_ready(program(operand))
    channel.flush()

  return harness.Work(thunk, count)


def _debug(count: int) -> harness.Work:
  def body(_: Any, carry: Any) -> Any:
    jax.debug.callback(lambda x: None, carry)
    return carry

  program = jax.jit(lambda x: lax.fori_loop(0, count, body, x))

  def thunk() -> None:
    jax.block_until_ready(program(jnp.float32(1)))
    jax.effects_barrier()

  return harness.Work(thunk, count)


def _large(size: int) -> harness.Work:
  cg = adapters.callgate()
  channel = cg.channel("benchmark large", capacity="256MiB", to=lambda values: None, batch=1)
  calls = 4
  # The array is no carry of the loop, which XLA would copy for itself.
  body = lambda x, i, count: (cg.tap(x, channel.name), count + 1)[1]
  program = jax.jit(lambda x: lax.fori_loop(0, calls, functools.partial(body, x), 0))
  operand = jnp.ones(size)

  def thunk() -> None:
    jax.block_until_ready(program(operand))
    channel.flush()

  return harness.Work(thunk, calls)


def _copy(size: int) -> harness.Work:
  source = np.ones(size, np.float32)
  target = np.empty_like(source)
  return harness.Work(lambda: np.copyto(target, source), 1)


def _high_water(count: int) -> harness.Row:
  capacity = 1 << 20
  cg = adapters.callgate()
  with cg.channel("benchmark high water", capacity=capacity, to=lambda value: None) as channel:
    jax.block_until_ready(_sender(channel.name, count)(jnp.float32(1)))
  share = channel.stats()["high_water"] / capacity
  return harness.Row(HIGH_WATER, samples=(share,), note="a share", unit="")
