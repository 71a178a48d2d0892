# SPDX-License-Identifier: Apache-2.0
"""Native kernels: what a call costs, what their loops reach, how long compilers take.

Four groups, each measured in interleaved rounds of its own: empty kernels on an f32 scalar in a
compiled loop; loops over 4 Mi floats, in place; soft-DTW, alone and under vmap; and compile times,
in fresh processes. Unit: microseconds per call.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters, kernels, raw

RAW = "C++ FFI handler, empty"
CPP = "callgate.cpp, empty"
NUMBA = "callgate.numba, empty"
TVM = "jax-tvm-ffi, native function, empty"
BRAINEVENT = "brainevent numba_kernel, empty"
WARP = "warp jax_callable, copy"
MEMCPY = "memcpy of as many bytes"
SAXPY = "saxpy, callgate.cpp"
SAXPY_THREADS = "saxpy, callgate.cpp on XLA's threads"
SAXPY_XLA = "saxpy, XLA"
FUSED = "x * y + 1, callgate.elementwise"
FUSED_XLA = "x * y + 1, XLA"
DTW = "soft-DTW, callgate.numba"
DTW_SCAN = "soft-DTW, lax.scan over cells"
DTW_DIAGONALS = "soft-DTW, lax.scan over anti-diagonals"
LANES = "soft-DTW, vmap on one thread"
LANES_THREADS = "soft-DTW, vmap on XLA's threads"
COLD = "callgate.cpp, first call with an empty cache"
WARM = "callgate.cpp, made in the next process"
HEADER = "c++ of a file with kernel.h alone"

# Name and adapter of the calls of nothing; the result's type is the argument's.
EMPTY = (
  ("loop only (one addition)", lambda spec: lambda x: x + 1.0),
  (RAW, adapters.raw_noop),
  (CPP, kernels.cpp_empty),
  (NUMBA, kernels.numba_empty),
  ("callgate.cfunc, empty", kernels.cfunc_empty),
  ("callgate.library, empty", kernels.library_empty),
  ("callgate.elementwise, copy", kernels.elementwise_copy),
  (TVM, kernels.tvm_ffi_empty),
  (BRAINEVENT, kernels.brainevent_empty),
  (WARP, adapters.warp_callable),
)
NATIVE = (CPP, NUMBA, "callgate.cfunc, empty", "callgate.library, empty")

TARGETS = (
  *(harness.Target(f"{name} over the raw handler", name, RAW, at_most=1.15) for name in NATIVE),
  harness.Target("callgate.cpp over jax-tvm-ffi's native function", CPP, TVM, at_most=1.0),
  harness.Target("brainevent over callgate.numba", BRAINEVENT, NUMBA, at_least=10.0),
  harness.Target("Warp over callgate.cpp", WARP, CPP, at_least=10.0),
  harness.Target("saxpy over a memcpy of as many bytes", SAXPY, MEMCPY, at_most=1.15),
  harness.Target("saxpy on threads over XLA's", SAXPY_THREADS, SAXPY_XLA, at_most=1.1),
  harness.Target("elementwise over XLA's fusion", FUSED, FUSED_XLA, at_most=1.1),
  harness.Target("lax.scan over Numba, soft-DTW", DTW_SCAN, DTW, at_least=10.0),
  harness.Target("vmap on one thread over two", LANES, LANES_THREADS, at_least=1.95),
  harness.Target("first call with an empty cache, microseconds", COLD, at_most=3e6),
  harness.Target("made in the next process, microseconds", WARM, at_most=5e3),
  harness.Target("kernel.h, microseconds", HEADER, at_most=1e6),
)
REFERENCES = {
  **{name: RAW for name, _ in EMPTY},
  **dict.fromkeys((MEMCPY, SAXPY, SAXPY_THREADS, SAXPY_XLA), MEMCPY),
  **dict.fromkeys((FUSED, FUSED_XLA), FUSED_XLA),
  **dict.fromkeys((DTW, DTW_SCAN, DTW_DIAGONALS), DTW),
  **dict.fromkeys((LANES, LANES_THREADS), LANES),
}


def run(options: harness.Options) -> harness.Report:
  """Measures the four groups one after the other."""
  most = options.pick(2000, 200)
  size = options.pick(1 << 22, 1 << 16)
  cells, lanes = options.pick(512, 32), options.pick(256, 8)
  rows = [
    *harness.measure(_empty(most), rounds=options.rounds_or(150)),
    *harness.measure(_large(size), rounds=options.rounds_or(60)),
    *harness.measure(_tables(cells, lanes), rounds=options.rounds_or(20)),
    *_compile_times(options.rounds_or(3, quick=1)),
  ]
  title = f"Native kernels: empty calls in a loop of up to {most}, {size} elements, {cells}² cells"
  settings = {"elements": size, "cells": [cells, cells], "lanes": lanes}
  report = harness.Report(
    "kernels", title, "us", rows, None, TARGETS, settings, quick=options.quick
  )
  report.references = REFERENCES
  report.facts = _bandwidths(report, size)
  return report


def _bandwidths(report: harness.Report, size: int) -> dict[str, Any]:
  """The bytes that a loop over three arrays of `size` floats moves, in GB/s."""
  facts: dict[str, Any] = {}
  for name in (MEMCPY, SAXPY, SAXPY_THREADS, SAXPY_XLA, FUSED, FUSED_XLA):
    row = report.row(name)
    if row is not None and row.minimum is not None:
      facts[f"{name}, GB/s"] = round(12 * size / row.minimum / 1e3, 1)
  return facts


# -- calls of nothing ---
def _empty(most: int) -> list[harness.Contestant]:
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  one = jax.ShapeDtypeStruct((1,), jnp.float32)  # Warp has no rank 0
  return [
    harness.Contestant(
      name, functools.partial(_calls, adapter, one if name == WARP else scalar, most)
    )
    for name, adapter in EMPTY
  ]


def _calls(adapter: Callable[..., Any], spec: jax.ShapeDtypeStruct, most: int) -> harness.Work:
  function = adapter(spec)

  def make(calls: int) -> harness.Thunk:
    program = jax.jit(lambda x: lax.fori_loop(0, calls, lambda _, carry: function(carry), x))
    operand = jnp.full(spec.shape, 1.5, spec.dtype)
    compiled = program.lower(operand).compile()
    return lambda: jax.block_until_ready(compiled(operand))

  return harness.fitted(make, most, least=100)


# -- large arrays, in place ---
def _large(size: int) -> list[harness.Contestant]:
  """y = a * x + y and y = x * y + 1, again and again on the loop's own y."""

  def loop(make: Callable[[], Callable[..., Any]], exact: Callable[..., Any]) -> harness.Work:
    function = make()
    a = jnp.float32(0.5)
    x = jnp.linspace(-1, 1, size, dtype=jnp.float32)
    np.testing.assert_allclose(jax.jit(function)(a, x, x), exact(0.5, x, x), rtol=1e-5, atol=1e-6)

    def repeat(calls: int) -> harness.Thunk:
      program = jax.jit(
        lambda a, x, y: lax.fori_loop(0, calls, lambda _, y: function(a, x, y), y),
        donate_argnums=2,
      )
      compiled = program.lower(a, x, x).compile()
      held = [jnp.ones_like(x)]

      def thunk() -> None:
        held[0] = jax.block_until_ready(compiled(a, x, held[0]))

      return thunk

    return harness.fitted(repeat, 20)

  saxpy, fused = kernels.saxpy_xla, kernels.fused_xla
  return [
    harness.Contestant(MEMCPY, functools.partial(_memcpy, size)),
    harness.Contestant(SAXPY, lambda: loop(lambda: kernels.saxpy(kernels.SAXPY), saxpy)),
    harness.Contestant(
      SAXPY_THREADS, lambda: loop(lambda: kernels.saxpy(kernels.SAXPY_THREADS), saxpy)
    ),
    harness.Contestant(SAXPY_XLA, lambda: loop(lambda: saxpy, saxpy)),
    harness.Contestant(FUSED, lambda: loop(kernels.elementwise_fused, fused)),
    harness.Contestant(FUSED_XLA, lambda: loop(lambda: fused, fused)),
  ]


def _memcpy(size: int) -> harness.Work:
  source = np.ones(size * 3 // 2, np.float32)
  target = np.zeros_like(source)

  def make(calls: int) -> harness.Thunk:
    def thunk() -> None:
      for _ in range(calls):
        np.copyto(target, source)

    return thunk

  return harness.fitted(make, 20)


# -- soft-DTW ---
def _tables(cells: int, lanes: int) -> list[harness.Contestant]:
  one = np.random.default_rng(0).random((cells, cells), np.float32)
  many = np.random.default_rng(1).random((lanes, cells // 4, cells // 4), np.float32)

  def alone(make: Callable[[], Callable[..., Any]]) -> harness.Work:
    return _program(jax.jit(make()), one, jax.jit(kernels.soft_dtw_diagonals)(one))

  def mapped(thread_safe: bool) -> harness.Work:
    function = jax.vmap(kernels.soft_dtw_numba(thread_safe=thread_safe))
    exact = jax.jit(jax.vmap(kernels.soft_dtw_diagonals))(many)
    return _program(jax.jit(function), many, exact)

  return [
    harness.Contestant(DTW, lambda: alone(kernels.soft_dtw_numba)),
    harness.Contestant(DTW_SCAN, lambda: alone(lambda: kernels.soft_dtw_scan)),
    harness.Contestant(DTW_DIAGONALS, lambda: alone(lambda: kernels.soft_dtw_diagonals)),
    harness.Contestant(LANES, lambda: mapped(thread_safe=False)),
    harness.Contestant(LANES_THREADS, lambda: mapped(thread_safe=True)),
  ]


def _program(program: Callable[..., Any], operand: np.ndarray, exact: Any) -> harness.Work:
  harness.check(bool(np.allclose(program(operand), exact, rtol=1e-3)), "the result is another")
  held = jnp.asarray(operand)

  def make(calls: int) -> harness.Thunk:
    def thunk() -> None:
      for _ in range(calls):
        jax.block_until_ready(program(held))

    return thunk

  return harness.fitted(make, 20)


# -- compilers ---
_MAKE = """
import jax, jax.numpy as jnp, callgate as cg
x = jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
from time import perf_counter as now
start = now()
kernel = cg.cpp("void k(cg::In<float, 1> x, cg::Out<float, 1> z) {"
                "for (int64_t i = 0; i < x.size(); ++i) z[i] = 2 * x[i] + %d; }",
                out=lambda x: x)
made = now()
jax.block_until_ready(kernel(x))
print("seconds", made - start, now() - start)
"""


def _compile_times(rounds: int) -> list[harness.Row]:
  """Each round has a cache of its own: two processes, the first one compiles."""
  samples: dict[str, list[float]] = {COLD: [], WARM: [], HEADER: []}
  try:
    kernels.kind("cpp")
    for number in range(rounds):
      with tempfile.TemporaryDirectory() as cache:
        samples[COLD].append(_made(cache, number)[1] * 1e6)
        samples[WARM].append(_made(cache, number)[0] * 1e6)
        samples[HEADER].append(_header_seconds(Path(cache)) * 1e6)
  except harness.NotInstalled as error:
    return [harness.Row(name, "not installed", harness.neutral(str(error))) for name in samples]
  except (OSError, subprocess.CalledProcessError) as error:
    return [harness.Row(name, "failed", harness.neutral(str(error))) for name in samples]
  return [harness.Row(name, samples=tuple(values)) for name, values in samples.items()]


def _made(cache: str, number: int) -> list[float]:
  """Seconds until the kernel was made, and until its first call was done."""
  child = subprocess.run(
    [sys.executable, "-c", _MAKE % number],
    env={**os.environ, "CALLGATE_CACHE_DIR": cache},
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  return [float(word) for word in child.stdout.split()[-2:]]


def _header_seconds(directory: Path) -> float:
  from callgate._build import toolchain

  source = directory / "header.cc"
  source.write_text(
    '#include "callgate/kernel.h"\nvoid nothing(cg::In<float> x) {}\nCALLGATE_KERNEL(nothing, x);\n'
  )
  command = [raw.compiler(), "-std=c++20", "-O3", "-fPIC", "-c", f"-I{toolchain.include_dir()}"]
  start = time.perf_counter()
  subprocess.run([*command, str(source), "-o", os.devnull], check=True, capture_output=True)
  return time.perf_counter() - start
