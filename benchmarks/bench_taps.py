# SPDX-License-Identifier: Apache-2.0
"""The cost of a tap for its program, beside JAX's debug callbacks and a copy.

Every contestant sends one value a round of a compiled loop, and is timed until the program is done,
while its consumer takes what came before. "loop only" is the same loop around one
addition; it is reported, not subtracted. The step of a training program is a chain of matrix
products of about a millisecond, with and without ten taps. Unit: microseconds per tap, or per step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters

SCALAR, KIB4, MIB4 = "callgate tap, f32 scalar", "callgate tap, 4 KiB", "callgate tap, 4 MiB"
DEBUG = "jax debug.callback, f32 scalar"
COPY = "C++ FFI handler that copies 4 MiB"
LANES = "callgate tap under vmap, 1,024 lanes"
CHECK = "callgate check that holds"
CHECK_LANES = "callgate check that holds, under vmap, 1,024 lanes"
PLAIN, TEN = "a step of about 1 ms", "the same with ten taps"

TARGETS = (
  harness.Target("tap of a scalar, microseconds", SCALAR, at_most=0.13),
  harness.Target("debug.callback over it", DEBUG, SCALAR, at_least=100.0),
  harness.Target("tap of 4 KiB, microseconds", KIB4, at_most=0.4),
  harness.Target("tap of 4 MiB over a copy", MIB4, COPY, at_most=1.3),
  harness.Target("vmap of 1,024 lanes, microseconds", LANES, at_most=3.0),
  harness.Target("check that holds, microseconds", CHECK, at_most=0.2),
  harness.Target("check of 1,024 lanes that holds, microseconds", CHECK_LANES, at_most=0.3),
  harness.Target("ten taps in a step of 1 ms", TEN, PLAIN, at_most=1.01),
)

Body = Callable[[Any], Any]


def run(options: harness.Options) -> harness.Report:
  """Measures the program's side of taps."""
  most = options.pick(20_000, 200)  # the dispatch of a program with effects is spread over these
  scalar, kib4 = jnp.float32(1), jnp.ones(1024)
  contestants = [
    *_loops("loop only (one addition)", lambda x: x + 1.0, scalar, most),
    *_loops("C++ FFI handler, empty", adapters.raw_noop(_spec(scalar)), scalar, most),
    *_loops(SCALAR, _tapped, scalar, most),
    *_loops("callgate tap, ordered", functools.partial(_tapped, ordered=True), scalar, most),
    *_loops(
      "callgate tap, in the flow of data",
      functools.partial(_tapped, effect="dataflow"),
      scalar,
      most,
    ),
    *_loops(DEBUG, _debug_callback, scalar, most),
    *_loops("jax debug.print, f32 scalar", _debug_print, scalar, most),
    *_loops("jax io_callback, f32 scalar", adapters.io_callback(_spec(scalar)), scalar, most),
    harness.Contestant("jax-tap, every step", functools.partial(_jax_tap, most)),
    *_loops(KIB4, _tapped, kib4, most),
    *_loops(LANES, lambda x: jax.vmap(_tapped)(x), kib4, most),
    *_loops(CHECK, _checked, scalar, most),
    *_loops(CHECK_LANES, lambda x: jax.vmap(_checked)(x), kib4, most),
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(60))
  size = options.pick(1 << 20, 1 << 14)
  large = [
    harness.Contestant(MIB4, functools.partial(_large, _tapped, size)),
    harness.Contestant(
      COPY, functools.partial(_large, adapters.raw_memcpy(_spec(jnp.ones(size))), size)
    ),
  ]
  rows += harness.measure(large, rounds=options.rounds_or(60))
  steps = [
    harness.Contestant(PLAIN, functools.partial(_step, lambda x: x, options.pick(32, 1))),
    harness.Contestant(TEN, functools.partial(_step, _ten_taps, options.pick(32, 1))),
  ]
  rows += harness.measure(steps, rounds=options.rounds_or(200))
  title = "The cost of one tap to the program, in a compiled loop"
  references = {MIB4: COPY, COPY: COPY, PLAIN: PLAIN, TEN: PLAIN}
  return harness.Report(
    "taps", title, "us", rows, SCALAR, TARGETS, quick=options.quick, references=references
  )


def _spec(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _loops(name: str, body: Body, operand: Any, most: int) -> list[harness.Contestant]:
  build = lambda: harness.fitted(functools.partial(_loop, body, operand), most, least=20)
  return [harness.Contestant(name, build)]


def _loop(body: Body, operand: Any, calls: int) -> harness.Thunk:
  program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: body(carry), x))
  compiled = program.lower(operand).compile()

  return lambda: jax.block_until_ready(compiled(operand))


@functools.cache
def _channel() -> Any:
  """A channel whose consumer takes the records in batches and does nothing with them."""
  cg = adapters.callgate()
  return cg.channel("benchmark", to=lambda values: None, batch=True)


def _tapped(x: Any, **options: Any) -> Any:
  return adapters.callgate().tap(x, _channel(), **options)


def _checked(x: Any) -> Any:
  adapters.callgate().check(x > 0, "expected more than 0")
  return x


def _debug_callback(x: Any) -> Any:
  jax.debug.callback(lambda x: None, x)
  return x


def _debug_print(x: Any) -> Any:
  jax.debug.print("", skip_format_check=True)
  return x


def _jax_tap(most: int) -> harness.Work:
  module = harness.require("jaxtap", "jax-tap")
  seen: list[Any] = []

  def loop(steps: int) -> harness.Thunk:
    function = lambda x: lax.scan(lambda c, _: (c + 1.0, None), x, length=steps)[0]
    program = jax.jit(module.verbose(function, on_step=seen.append))
    operand = jnp.float32(1)
    jax.block_until_ready(program(operand))
    jax.effects_barrier()
    harness.check(len(seen) == steps, f"{len(seen)} events of {steps} steps")

    def thunk() -> None:
      jax.block_until_ready(program(operand))
      seen.clear()

    seen.clear()
    return thunk

  return harness.fitted(loop, min(most, 200), least=20)


def _large(body: Body, size: int) -> harness.Work:
  """Sixteen at a time: that many fit into the channel."""
  calls = 8
  program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: body(carry), x))
  operand = jnp.ones(size)
  compiled = program.lower(operand).compile()
  return harness.Work(lambda: jax.block_until_ready(compiled(operand)), calls)


def _ten_taps(x: Any) -> Any:
  for i in range(10):
    _tapped(x[0, i])
  return x


def _step(body: Body, steps: int) -> harness.Work:
  """Steps of products of matrices, about a millisecond each on one core."""
  matrix = jnp.eye(256) * 0.999

  def step(carry: Any, _: Any) -> tuple[Any, None]:
    for _ in range(3):
      carry = carry @ matrix
    return body(carry), None

  program = jax.jit(lambda x: lax.scan(step, x, length=steps)[0])
  operand = jnp.ones((256, 256))
  compiled = program.lower(operand).compile()
  return harness.Work(lambda: jax.block_until_ready(compiled(operand)), steps)
