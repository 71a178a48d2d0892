# SPDX-License-Identifier: Apache-2.0
"""The cost of a use of a host object, in a compiled loop, by the thread on which the object lives.

Every contestant counts its calls in a list. callgate's gets it by a handle: on the object's own
thread, which is the default, or on XLA's. Beside them stand a gate and JAX's callback, which close
over one list for all programs. Unit: microseconds per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

import callgate as cg
from benchmarks import harness

OWN = "callgate use, on the object's own thread"
MADE = "callgate hold and use, on the object's own thread"
XLA = "callgate use, on XLA's thread"
GATE_THREAD = "callgate gate, run_on=thread"
GATE = "callgate gate"
JAX = "jax io_callback"
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)

TARGETS = (
  harness.Target("a use on its own thread, microseconds", OWN, at_most=15.0),
  harness.Target("an object made and used on its thread, microseconds", MADE, at_most=10.0),
  harness.Target("io_callback over a use on its own thread", JAX, OWN, at_least=2.0),
)


def run(options: harness.Options) -> harness.Report:
  """Measures calls of a function that gets an object, or closes over one."""
  calls = options.pick(2000, 200)
  contestants = [
    harness.Contestant(name, functools.partial(_build, make, calls)) for name, make in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(60))
  title = "One call that changes a host object, in a compiled loop"
  return harness.Report("objects", title, "us", rows, OWN, TARGETS, quick=options.quick)


def _count(log: list[float], x: Any) -> Any:
  log[0] += 1
  return x


# Each makes the body's function for a program, of which a use needs the object of a hold.
Body = Callable[[jax.Array], jax.Array]


def _use(place: Any, _: list[float], x: jax.Array) -> Body:
  log = cg.hold(lambda _: [0.0], run_on=place)(x)
  return lambda carry: cg.use(_count, log, carry, out=SCALAR, effect="io", run_on=place)


def _made(place: Any, _: list[float], __: jax.Array) -> Body:
  """Each call makes an object, and uses it once."""
  hold = cg.hold(lambda _: [0.0], run_on=place)
  return lambda carry: cg.use(_count, hold(carry), carry, out=SCALAR, effect="io", run_on=place)


def _gate(place: Any, log: list[float], _: jax.Array) -> Body:
  return cg.gate(functools.partial(_count, log), out=SCALAR, effect="io", run_on=place)


def _io_callback(log: list[float], _: jax.Array) -> Body:
  return lambda carry: io_callback(functools.partial(_count, log), SCALAR, carry)


CONTESTANTS: tuple[tuple[str, Callable[[list[float], jax.Array], Body]], ...] = (
  (OWN, functools.partial(_use, cg.thread("objects"))),
  (MADE, functools.partial(_made, cg.thread("made objects"))),
  (XLA, functools.partial(_use, "xla")),
  (GATE_THREAD, functools.partial(_gate, cg.thread("objects"))),
  (GATE, functools.partial(_gate, "xla")),
  (JAX, _io_callback),
)


def _build(make: Callable[[list[float], jax.Array], Body], most: int) -> harness.Work:
  return harness.fitted(functools.partial(_loop, make), most, least=100)


def _loop(make: Callable[[list[float], jax.Array], Body], calls: int) -> harness.Thunk:
  """A program that makes an object and calls `calls` times with it."""
  log = [0.0]

  def program(x: jax.Array) -> jax.Array:
    body = make(log, x)
    return lax.fori_loop(0, calls, lambda _, carry: body(carry), x)

  operand = jnp.float32(1.5)
  compiled = jax.jit(program).lower(operand).compile()
  harness.check(float(compiled(operand)) == 1.5, "the result is not the argument")
  return lambda: jax.block_until_ready(compiled(operand))
