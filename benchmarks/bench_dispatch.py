# SPDX-License-Identifier: Apache-2.0
"""The cost of an effect at dispatch: the time that `jit(f)(x)` takes to come back to Python.

JAX sends a program that reports an effect through its Python dispatch path; callgate keeps such
programs on the C++ one, unless `callgate.config(fast_dispatch=False)` says otherwise. Every
contestant calls one compiled function on an f32 scalar in a Python loop; nothing but the last
result is waited for. The calls of the gates' bodies are counted against the dispatches. Unit:
microseconds per call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.peers import adapters

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
PLAIN = "no callback, no effect"
PURE_GATE = "callgate pure gate"
IO, ORDERED, TAP = "callgate io gate", "callgate ordered gate", "callgate tap"
SLOW = "callgate io gate, fast_dispatch=False"

TARGETS = (
  harness.Target("io gate, microseconds", IO, at_most=6.0),
  harness.Target("tap, microseconds", TAP, at_most=6.0),
  harness.Target("ordered gate, microseconds", ORDERED, at_most=8.0),
  harness.Target("io gate over a pure gate", IO, PURE_GATE, at_most=1.3),
)


def run(options: harness.Options) -> harness.Report:
  """Measures the dispatch of one-call programs with and without effects."""
  most = options.pick(500, 50)
  contestants = [
    harness.Contestant(name, functools.partial(_dispatches, make, configure, most))
    for name, make, configure in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(100))
  title = f"Dispatch of jit(f)(x), f32 scalar, up to {most} calls"
  return harness.Report("dispatch", title, "us", rows, PLAIN, TARGETS, quick=options.quick)


Count = Callable[[], None]
Configure = Callable[[], contextlib.AbstractContextManager[Any]]


def _dispatches(make: Callable[[Count], Any], configure: Configure, most: int) -> harness.Work:
  """Many dispatches; first a few are made with a counting body, and compared."""
  executed = 0

  def count() -> None:
    nonlocal executed
    executed += 1

  counted = _dispatch_all(make(count), configure, 20)
  adapters.callgate().barrier()  # a tap's consumer may be behind
  executed = 0
  counted()
  adapters.callgate().barrier()
  harness.check(executed == (0 if make is _plain else 20), f"20 dispatches made {executed} calls")
  return harness.fitted(functools.partial(_dispatch_all, make(_nothing), configure), most, least=20)


def _dispatch_all(function: Callable[..., Any], configure: Configure, calls: int) -> harness.Thunk:
  """Compiles under the contestant's configuration, which also holds while the thunk runs."""
  operand = jnp.float32(1.5)
  with configure():
    program = jax.jit(function)
    harness.check(float(program(operand)) == 1.5, "the result is not the argument")

  def thunk() -> None:
    with configure():
      for _ in range(calls - 1):
        program(operand)
      jax.block_until_ready(program(operand))

  return thunk


def _nothing() -> None:
  """A counter that does not count."""


def _plain(count: Count) -> Callable[..., Any]:
  return lambda x: x * 1.0


def _gate(effect: str, count: Count) -> Callable[..., Any]:
  def copy(out: np.ndarray, x: np.ndarray) -> None:
    count()
    out[...] = x

  return adapters.callgate().gate(copy, out=lambda x: x, style="inplace", effect=effect)


def _pure_callback(count: Count) -> Callable[..., Any]:
  def body(x: jax.Array) -> jax.Array:
    count()
    return x

  return lambda x: jax.pure_callback(body, SCALAR, x)


def _io_callback(count: Count) -> Callable[..., Any]:
  def body(x: jax.Array) -> jax.Array:
    count()
    return x

  return lambda x: jax.experimental.io_callback(body, SCALAR, x)


def _tap(count: Count) -> Callable[..., Any]:
  """To a consumer that takes records in batches: one for each would compete for the GIL."""
  cg = adapters.callgate()
  name = f"dispatch {next(_numbers)}"
  channel = cg.channel(name, to=lambda values: [count() for _ in values], batch=True)
  return lambda x: cg.tap(x, channel)


_numbers = itertools.count()


def _by_jax() -> contextlib.AbstractContextManager[Any]:
  return adapters.callgate().config(fast_dispatch=False)


CONTESTANTS: tuple[tuple[str, Callable[[Count], Any], Configure], ...] = (
  (PLAIN, _plain, contextlib.nullcontext),
  (PURE_GATE, functools.partial(_gate, "pure"), contextlib.nullcontext),
  (IO, functools.partial(_gate, "io"), contextlib.nullcontext),
  (SLOW, functools.partial(_gate, "io"), _by_jax),
  (TAP, _tap, contextlib.nullcontext),
  (ORDERED, functools.partial(_gate, "ordered"), contextlib.nullcontext),
  ("jax pure_callback", _pure_callback, contextlib.nullcontext),
  ("jax io_callback", _io_callback, contextlib.nullcontext),
)
