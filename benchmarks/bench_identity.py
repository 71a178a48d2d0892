# SPDX-License-Identifier: Apache-2.0
"""The cost of a copy: the identity on f32[8,1024,1024] (32 MiB), through host code, 100 calls.

Three ways of making the calls, because they cost different things:

- *in a loop*: one compiled program calls 100 times (`lax.fori_loop`). XLA reuses its buffers, so
  this is the price of the calls and of the loop's own copy of its carry. The targets are on these.
- *unrolled*: one compiled program with 100 calls, each on the last one's result. The only copies
  are the calls' own.
- *dispatched*: a program of one call, dispatched from Python and waited for. Every result is fresh
  memory from the system, whose page faults cost more than the copy; this hits all contestants.

The floor is a C++ handler that does one memcpy. The aliased contestants have their argument's
memory for a result and nothing to copy; their argument is donated. Unit: milliseconds per call.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters

MEMCPY = "C++ FFI handler, memcpy"
INPLACE = "callgate in-place gate"
ALIASED = "callgate aliased gate, donated"
PURE = "jax pure_callback"
UNROLLED, DISPATCHED = ", unrolled", ", dispatched"
SPEC = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32)

# Name, adapter, and whether the argument is donated.
CONTESTANTS = (
  (MEMCPY, adapters.raw_memcpy, False),
  (INPLACE, adapters.callgate_inplace, False),
  (ALIASED, adapters.callgate_aliased, True),
  ("callgate return gate", adapters.callgate_return, False),
  ("jax buffer_callback", adapters.buffer_callback, False),
  (PURE, adapters.pure_callback, False),
  ("jax io_callback", adapters.io_callback, False),
  ("jax-tvm-ffi, Python function", adapters.tvm_ffi_python, False),
  ("torch2jax (rdyro)", adapters.torch2jax, False),
)

TARGETS = (
  harness.Target("in-place gate over the C++ memcpy", INPLACE, MEMCPY, at_most=1.1),
  harness.Target("aliased gate over the C++ memcpy", ALIASED, MEMCPY, at_most=0.05),
  harness.Target("pure_callback over the in-place gate", PURE, INPLACE, at_least=8.0),
  *(
    harness.Target(
      f"in-place gate over the C++ memcpy{way}", INPLACE + way, MEMCPY + way, at_most=1.1
    )
    for way in (UNROLLED, DISPATCHED)
  ),
  harness.Target(
    "pure_callback over in-place, unrolled", PURE + UNROLLED, INPLACE + UNROLLED, at_least=8.0
  ),
)


def run(options: harness.Options) -> harness.Report:
  """Measures all three ways of calling in the same rounds."""
  looped = options.pick(100, 5)
  dispatched = options.pick(5, 2)
  ways = (("", _loop, looped), (UNROLLED, _unrolled, looped), (DISPATCHED, _calls, dispatched))
  contestants = [
    harness.Contestant(name + way, functools.partial(build, adapter, donate, calls))
    for way, build, calls in ways
    for name, adapter, donate in CONTESTANTS
    if way != UNROLLED or name in (MEMCPY, INPLACE, PURE)
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(10), unit="ms")
  title = f"Identity on f32[8,1024,1024], {looped} calls in a program and single dispatches"
  settings = {"calls": looped, "dispatched_calls": dispatched, "shape": list(SPEC.shape)}
  report = harness.Report(
    "identity", title, "ms", rows, MEMCPY, TARGETS, settings, quick=options.quick
  )
  report.references = {
    name + way: MEMCPY + way for way in (UNROLLED, DISPATCHED) for name, *_ in CONTESTANTS
  }
  return report


def _loop(adapter: adapters.Adapter, donate: bool, calls: int) -> harness.Work:
  """Runs one program of `calls` calls."""
  function = adapter(SPEC)

  def loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, calls, lambda _, carry: function(carry), x)

  return harness.Work(_calls(lambda spec: loop, donate, 1).thunk, calls)


def _unrolled(adapter: adapters.Adapter, donate: bool, calls: int) -> harness.Work:
  """Runs one program of `calls` calls without a loop."""
  function = adapter(SPEC)

  def chain(x: jax.Array) -> jax.Array:
    for _ in range(calls):
      x = function(x)
    return x

  return harness.Work(_calls(lambda spec: chain, donate, 1).thunk, calls)


def _calls(adapter: adapters.Adapter, donate: bool, calls: int) -> harness.Work:
  """Dispatches the program `calls` times, each on the last one's result if donated."""
  host = np.arange(np.prod(SPEC.shape), dtype=np.float32).reshape(SPEC.shape)
  program = jax.jit(adapter(SPEC), donate_argnums=(0,) if donate else ())
  harness.check(np.array_equal(program(jnp.array(host)), host), "the result is not the argument")
  state = jax.block_until_ready(jnp.array(host))

  def thunk() -> None:
    nonlocal state
    for _ in range(calls):
      result = jax.block_until_ready(program(state))
      if donate:
        state = result

  return harness.Work(thunk, calls)
