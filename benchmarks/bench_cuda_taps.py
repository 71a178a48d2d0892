# SPDX-License-Identifier: Apache-2.0
"""The cost of a tap on a GPU: of 4 bytes, and of 64 MiB beside work of the device.

The loop of small taps is timed until the program is done, as in `bench_taps`. The large tap is in a
program of matrix products that take about as long as its copy; the same program without the tap is
what it is compared to. "64 MiB, until delivered" is a program of eight taps and nothing else, with
`cg.barrier()`, beside as many copies to pinned memory by the driver alone. Unit: microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters, raw_cuda

LOOP = "loop only (one addition)"
SCALAR, DEBUG = "callgate tap, f32 scalar", "jax debug.callback, f32 scalar"
EXTRA = "callgate tap, f32 scalar, minus the loop"
PLAIN, TAPPED = "a step of matrix products", "a step of matrix products with a tap of 64 MiB"
DEBUGGED = "a step of matrix products with debug.callback of 64 MiB"
DELIVERED, COPIED = "tap of 64 MiB, until delivered", "pinned copy of 64 MiB"
TARGETS = (
  harness.Target("a tap's host time, microseconds", EXTRA, at_most=2.0),
  harness.Target("debug.callback over a tap", DEBUG, SCALAR, at_least=10.0),
  harness.Target("a step with a tap of 64 MiB over one without", TAPPED, PLAIN, at_most=1.03),
  harness.Target("until delivered over the pinned copy", DELIVERED, COPIED, at_most=1 / 0.85),
)

Body = Callable[[Any], Any]


def run(options: harness.Options) -> harness.Report:
  """Measures small taps, then large ones."""
  device = raw_cuda.device()
  most = options.pick(2000, 50)
  small = [
    harness.Contestant(name, functools.partial(_small, body, most, device))
    for name, body in ((LOOP, lambda x: x + 1.0), (SCALAR, _tapped), (DEBUG, _debugged))
  ]
  rows = harness.measure(small, rounds=options.rounds_or(60))
  floats = options.pick(1 << 24, 1 << 16)
  steps = options.pick(4, 1)
  products = options.pick(12, 1)
  large = [
    harness.Contestant(name, functools.partial(_step, body, floats, steps, products, device))
    for name, body in ((PLAIN, lambda x: x), (TAPPED, _tapped), (DEBUGGED, _debugged))
  ]
  large += [
    harness.Contestant(DELIVERED, functools.partial(_delivered, floats, device)),
    harness.Contestant(
      COPIED, lambda: harness.Work(raw_cuda.copies(4 * floats, raw_cuda.TO_HOST, 8), 8)
    ),
  ]
  rows += harness.measure(large, rounds=options.rounds_or(20))
  raw_cuda.room(0)
  title = "The cost of one tap to the program, on a GPU"
  report = harness.Report("cuda_taps", title, "us", rows, SCALAR, TARGETS, quick=options.quick)
  report.references = {TAPPED: PLAIN, DEBUGGED: PLAIN, DELIVERED: COPIED}
  report.settings = {"large_bytes": 4 * floats, "steps": steps, "products": products}
  report.device = raw_cuda.described()
  loop, tap = report.row(LOOP), report.row(SCALAR)
  if loop and tap and loop.minimum is not None and tap.minimum is not None:
    report.rows.append(harness.Row(EXTRA, samples=(tap.minimum - loop.minimum,)))
  return report


@functools.cache
def _channel(batch: bool) -> Any:
  """A channel with room for what is on its way; its consumer does nothing with the records."""
  return adapters.callgate().channel(
    f"benchmark, batch={batch}", to=lambda values: None, batch=batch, capacity="1GiB"
  )


def _tapped(x: Any) -> Any:
  # Small records come many at once, as a consumer of thousands would ask for them.
  return adapters.callgate().tap(x, _channel(batch=x.ndim == 0))


def _debugged(x: Any) -> Any:
  jax.debug.callback(lambda x: None, x)
  return x


def _small(body: Body, most: int, device: jax.Device) -> harness.Work:
  operand = jax.device_put(jnp.float32(1), device)

  def make(calls: int) -> harness.Thunk:
    def each(_: Any, carry: Any) -> Any:
      return body(carry + 1.0)

    program = jax.jit(lambda x: lax.fori_loop(0, calls, each, x))
    compiled = program.lower(operand).compile()
    return lambda: jax.block_until_ready(compiled(operand))

  return harness.fitted(make, most, least=20)


def _step(body: Body, floats: int, steps: int, products: int, device: jax.Device) -> harness.Work:
  """Steps of products of square matrices, each with one call of `body` on the large carry."""
  side = int(floats**0.5)
  matrix = jax.device_put(jnp.eye(side) * 0.999, device)

  def step(carry: Any, _: Any) -> tuple[Any, None]:
    for _ in range(products):
      carry = carry @ matrix
    return body(carry), None

  program = jax.jit(lambda x: lax.scan(step, x, length=steps)[0])
  operand = jax.device_put(jnp.ones((side, side)), device)
  compiled = program.lower(operand).compile()
  return harness.Work(lambda: jax.block_until_ready(compiled(operand)), steps)


def _delivered(floats: int, device: jax.Device) -> harness.Work:
  calls = 8
  barrier = adapters.callgate().barrier
  program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: _tapped(carry), x))
  operand = jax.device_put(jnp.ones(floats), device)
  compiled = program.lower(operand).compile()

  def thunk() -> None:
    jax.block_until_ready(compiled(operand))
    barrier()

  return harness.Work(thunk, calls)
