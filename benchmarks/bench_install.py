# SPDX-License-Identifier: Apache-2.0
"""JAX's own callbacks in an unchanged program, before and after `callgate.install()`.

The same source (`jax.pure_callback` and `jax.experimental.io_callback` of the identity on an f32
scalar, in a compiled loop) is compiled before `callgate.install()` and again after it, in one
process; then both are run in interleaved rounds. The notes say if the callback got a `jax.Array`,
as JAX gives it. Unit: microseconds per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
PURE, PURE_INSTALLED = "jax pure_callback", "jax pure_callback after install()"
IO, IO_INSTALLED = "jax io_callback", "jax io_callback after install()"
ORDERED, ORDERED_INSTALLED = "jax io_callback, ordered", "jax io_callback, ordered, after install()"

TARGETS = (
  harness.Target("pure_callback before over after install()", PURE, PURE_INSTALLED, at_least=6.0),
  harness.Target("pure_callback after install(), microseconds", PURE_INSTALLED, at_most=4.0),
  harness.Target("io_callback after install(), microseconds", IO_INSTALLED, at_most=4.0),
  harness.Target("io_callback before over after install()", IO, IO_INSTALLED, at_least=6.0),
)


def run(options: harness.Options) -> harness.Report:
  """Measures JAX's two callbacks on both engines."""
  most = options.pick(1000, 100)
  types: dict[str, str] = {}
  contestants = [
    harness.Contestant(name, functools.partial(_loop, bind, installed, name, most, types))
    for name, bind, installed in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(100))
  rows = [_with_type(row, types) for row in rows]
  title = "JAX's callbacks on an f32 scalar before and after callgate.install(), in a loop"
  report = harness.Report("install", title, "us", rows, PURE, TARGETS, quick=options.quick)
  report.references = {IO: IO, IO_INSTALLED: IO, ORDERED: ORDERED, ORDERED_INSTALLED: ORDERED}
  return report


def _with_type(row: harness.Row, types: dict[str, str]) -> harness.Row:
  return replace(row, note=f"the callback got {types[row.name]}") if row.status == "ok" else row


def _pure(body: Callable[..., Any], x: jax.Array) -> jax.Array:
  return jax.pure_callback(body, SCALAR, x)


def _io(body: Callable[..., Any], x: jax.Array) -> jax.Array:
  return jax.experimental.io_callback(body, SCALAR, x)


def _io_ordered(body: Callable[..., Any], x: jax.Array) -> jax.Array:
  return jax.experimental.io_callback(body, SCALAR, x, ordered=True)


# JAX's own are built first: nothing has been installed yet when they are compiled.
CONTESTANTS = (
  (PURE, _pure, False),
  (IO, _io, False),
  (ORDERED, _io_ordered, False),
  (PURE_INSTALLED, _pure, True),
  (IO_INSTALLED, _io, True),
  (ORDERED_INSTALLED, _io_ordered, True),
)


def _loop(
  bind: Callable[..., jax.Array], installed: bool, name: str, most: int, types: dict[str, str]
) -> harness.Work:
  """Compiles the loop with JAX's engine or, between install and uninstall, with callgate's."""
  callgate = adapters.callgate() if installed else None
  seen: set[type] = set()

  def spy(x: Any) -> Any:
    seen.add(type(x))
    harness.check(isinstance(x, jax.Array), f"the callback got {type(x).__name__}, not jax.Array")
    return x

  if callgate:
    callgate.install()
  try:
    jax.block_until_ready(_compile(bind, spy, 3)())
    work = harness.fitted(functools.partial(_compile, bind, adapters.give_back), most, least=100)
    work.thunk()
  finally:
    if callgate:
      callgate.uninstall()
  types[name] = " and ".join(sorted(_type_name(kind) for kind in seen))
  return work


def _type_name(kind: type) -> str:
  return "jax.Array" if issubclass(kind, jax.Array) else kind.__name__


def _compile(bind: Callable[..., jax.Array], body: Callable[..., Any], calls: int) -> harness.Thunk:
  """The loop, compiled ahead of time: `install()` clears what `jit` itself has compiled."""
  program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: bind(body, carry), x))
  operand = jnp.float32(1.5)
  compiled = program.lower(operand).compile()
  harness.check(float(compiled(operand)) == 1.5, "the result is not the argument")
  return lambda: jax.block_until_ready(compiled(operand))
