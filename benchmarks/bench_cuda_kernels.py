# SPDX-License-Identifier: Apache-2.0
"""The cost of a kernel's launch: callgate's, a hand-written handler's, the driver's, and others'.

An empty kernel is launched again and again in one program: in a loop, which XLA runs launch by
launch, and unrolled, which XLA records as CUDA graphs where the handler allows it. "cuLaunchKernel"
is the driver alone, on a stream of its own. Unit: microseconds a launch, by the clock; `min cpu` is
the processor's time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import cuda, raw_cuda

DRIVER = "cuLaunchKernel"
RAW = "C++ FFI handler"
OURS = "callgate.cuda"
GRAPH = ", in a CUDA graph"
LESS = "callgate.cuda less the driver"

LOOPED = (
  (RAW, raw_cuda.launch),
  (OURS, cuda.cuda_empty),
  ("callgate.triton", cuda.triton_empty),
  ("callgate.numba_cuda", cuda.numba_empty),
  ("warp jax_kernel", cuda.warp_empty),
  ("jax-triton", cuda.jax_triton_empty),
  ("jax-tvm-ffi", cuda.tvm_ffi_empty),
)
UNROLLED = (
  (RAW, functools.partial(raw_cuda.launch, graph=True)),
  (OURS, cuda.cuda_empty),
  ("callgate gate, command_buffer", functools.partial(cuda.gate_empty, command_buffer=True)),
  ("warp jax_kernel", cuda.warp_empty),
  ("jax-triton", cuda.jax_triton_empty),
)
TARGETS = (
  harness.Target("callgate.cuda over a hand-written handler", OURS, RAW, at_most=1.05),
  harness.Target("the same in a CUDA graph", OURS + GRAPH, RAW + GRAPH, at_most=1.05),
  harness.Target("beyond cuLaunchKernel, microseconds", LESS, at_most=0.5),
  *(
    harness.Target(f"{name} over callgate.cuda", name, OURS, at_least=1.0) for name, _ in LOOPED[4:]
  ),
)


def run(options: harness.Options) -> harness.Report:
  """Measures launches in loops, in graphs and by the driver."""
  device = raw_cuda.device()
  most, unrolled = options.pick(2000, 50), options.pick(200, 20)
  contestants = [
    harness.Contestant(DRIVER, lambda: harness.fitted(raw_cuda.launches, most, least=20)),
    *(harness.Contestant(n, functools.partial(_looped, a, most, device)) for n, a in LOOPED),
    *(
      harness.Contestant(n + GRAPH, functools.partial(_unrolled, a, unrolled, device))
      for n, a in UNROLLED
    ),
  ]
  rows = harness.measure(contestants, rounds=options.rounds_or(60))
  title = f"One launch of an empty kernel, in loops of up to {most} and {unrolled} unrolled"
  report = harness.Report("cuda_kernels", title, "us", rows, RAW, TARGETS, quick=options.quick)
  report.device = raw_cuda.described()
  report.references = {name + GRAPH: RAW + GRAPH for name, _ in UNROLLED}
  _difference(report)
  return report


def _difference(report: harness.Report) -> None:
  """A row for what a launch of ours costs beyond the driver's."""
  ours, driver = report.row(OURS), report.row(DRIVER)
  if ours is None or driver is None or ours.minimum is None or driver.minimum is None:
    return
  report.rows.append(harness.Row(LESS, samples=(ours.minimum - driver.minimum,)))


def _operand(device: jax.Device) -> jax.Array:
  return jax.device_put(jnp.ones(32), device)


def _looped(adapter: Any, most: int, device: jax.Device) -> harness.Work:
  operand = _operand(device)
  function = adapter(jax.ShapeDtypeStruct(operand.shape, operand.dtype))

  def make(calls: int) -> harness.Thunk:
    program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: function(carry), x))
    compiled = program.lower(operand).compile()
    return lambda: jax.block_until_ready(compiled(operand))

  return harness.fitted(make, most, least=20)


def _unrolled(adapter: Any, calls: int, device: jax.Device) -> harness.Work:
  operand = _operand(device)
  function = adapter(jax.ShapeDtypeStruct(operand.shape, operand.dtype))

  def chain(x: jax.Array) -> jax.Array:
    for _ in range(calls):
      x = function(x)
    return x

  compiled = jax.jit(chain).lower(operand).compile()
  return harness.Work(lambda: jax.block_until_ready(compiled(operand)), calls)
