# SPDX-License-Identifier: Apache-2.0
"""The host's cost of an on-device gate: calls of an empty body in a loop on a GPU.

Nothing is enqueued, so that the program's time is the host's. "loop only" is the same loop around
one addition, whose launch each contestant's loop also has where XLA copies the carry; it is
reported, not subtracted. Unit: microseconds a call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters, cuda, raw_cuda

LOOP = "loop only (one addition)"
GATE = "callgate gate, Buffer, aliased"
BUFFER = "jax buffer_callback, empty body"
RAW = "C++ FFI handler, one empty launch"
NUMPY = "callgate numpy gate, aliased"
PURE = "jax pure_callback"

CONTESTANTS = (
  (LOOP, lambda spec: lambda x: x + 1.0),
  (RAW, raw_cuda.launch),
  (GATE, cuda.gate_aliased),
  ("callgate gate, CuPy, empty body", functools.partial(cuda.gate_empty, arrays="cupy")),
  ("callgate gate, PyTorch, empty body", functools.partial(cuda.gate_empty, arrays="torch")),
  (BUFFER, cuda.buffer_callback_empty),
  (NUMPY, cuda.gate_numpy_aliased),
  (PURE, adapters.pure_callback),
)
TARGETS = (
  harness.Target("an on-device gate's host time, microseconds", GATE, at_most=8.0),
  harness.Target("buffer_callback over it", BUFFER, GATE, at_least=2.0),
  harness.Target("pure_callback over a numpy gate", PURE, NUMPY, at_least=2.0),
)


def run(options: harness.Options) -> harness.Report:
  """Measures calls on 1,024 floats."""
  device = raw_cuda.device()
  most = options.pick(2000, 50)
  contestants = [
    harness.Contestant(name, functools.partial(_calls, adapter, most, device))
    for name, adapter in CONTESTANTS
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(60))
  title = f"One gate on the device, in a compiled loop of up to {most}, f32[1024]"
  report = harness.Report("cuda_gates", title, "us", rows, GATE, TARGETS, quick=options.quick)
  report.device = raw_cuda.described()
  return report


def _calls(adapter: Any, most: int, device: jax.Device) -> harness.Work:
  spec = jax.ShapeDtypeStruct((1024,), jnp.float32)
  function = adapter(spec)
  operand = jax.device_put(jnp.ones(1024), device)

  def make(calls: int) -> harness.Thunk:
    program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: function(carry), x))
    compiled = program.lower(operand).compile()
    return lambda: jax.block_until_ready(compiled(operand))

  return harness.fitted(make, most, least=20)
