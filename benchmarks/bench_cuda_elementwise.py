# SPDX-License-Identifier: Apache-2.0
"""`cg.elementwise` on a GPU against its copy bandwidth: x * y + 1 and a copy, on 256 MiB an array.

Each contestant works in place in a loop over its own result. "cuMemcpyDtoD" moves as many bytes as
x * y + 1 does: it copies one and a half arrays. Unit: microseconds a call.
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
from benchmarks.peers import raw_cuda
from benchmarks.peers.kernels import kind

COPY = "cuMemcpyDtoD of as many bytes"
OURS, XLA = "x * y + 1, callgate.elementwise", "x * y + 1, XLA"
HALF, HALF_XLA = "the same in bfloat16", "the same in bfloat16, XLA"
TARGETS = (
  harness.Target("elementwise over the device's copy", OURS, COPY, at_most=1 / 0.9),
  harness.Target("elementwise over XLA's fusion", OURS, XLA, at_most=1.05),
  harness.Target("bfloat16 over XLA's fusion", HALF, HALF_XLA, at_most=1.05),
)


def run(options: harness.Options) -> harness.Report:
  """Measures float32 and bfloat16."""
  device = raw_cuda.device()
  size = options.pick(1 << 26, 1 << 16)
  kinds = {OURS: (_ours, jnp.float32), XLA: (_xla, jnp.float32)}
  kinds |= {HALF: (_ours, jnp.bfloat16), HALF_XLA: (_xla, jnp.bfloat16)}
  contestants = [
    harness.Contestant(name, functools.partial(_loop, make, dtype, size, device))
    for name, (make, dtype) in kinds.items()
  ]
  contestants.append(harness.Contestant(COPY, functools.partial(_copies, 6 * size)))
  rows = harness.measure(contestants, rounds=options.rounds_or(30))
  raw_cuda.room(0)
  title = f"x * y + 1 on {size:,} elements, in place, on a GPU"
  report = harness.Report("cuda_elementwise", title, "us", rows, COPY, TARGETS, quick=options.quick)
  report.settings = {"elements": size}
  report.device = raw_cuda.described()
  for name, nbytes in ((COPY, 12), (OURS, 12), (XLA, 12), (HALF, 6), (HALF_XLA, 6)):
    row = report.row(name)
    if row is not None and row.minimum is not None:
      report.facts[f"{name}, GB/s"] = round(nbytes * size / row.minimum / 1e3, 1)
  return report


def _ours() -> Callable[..., Any]:
  return kind("elementwise")("T x, T y", "T z", "z = x * y + T(1)", aliases={1: 0})


def _xla() -> Callable[..., Any]:
  return lambda x, y: x * y + 1


def _loop(make: Callable[[], Any], dtype: Any, size: int, device: jax.Device) -> harness.Work:
  function = make()
  x = jax.device_put(jnp.linspace(-1, 1, size, dtype=dtype), device)
  got = np.asarray(jax.jit(function)(x, x), np.float32)
  exact = np.asarray(x, np.float32) ** 2 + 1
  harness.check(
    bool(np.allclose(got, exact, rtol=2e-2 if dtype == jnp.bfloat16 else 1e-6)), "wrong result"
  )

  def repeat(calls: int) -> harness.Thunk:
    program = jax.jit(
      lambda x, y: lax.fori_loop(0, calls, lambda _, y: function(x, y), y), donate_argnums=1
    )
    compiled = program.lower(x, x).compile()
    held = [jnp.ones_like(x)]

    def thunk() -> None:
      held[0] = jax.block_until_ready(compiled(x, held[0]))

    return thunk

  return harness.fitted(repeat, 20)


def _copies(nbytes: int) -> harness.Work:
  return harness.fitted(lambda calls: raw_cuda.copies(nbytes, raw_cuda.ON_DEVICE, calls), 20)
