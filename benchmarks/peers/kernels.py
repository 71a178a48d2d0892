# SPDX-License-Identifier: Apache-2.0
"""Native kernels of every kind, and what others have in their place.

Each function returns a JAX-traceable function, or raises NotInstalled where its package, or
callgate's kind of kernel, is not there. Kernels called `_empty` do nothing: their result is
garbage.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import harness
from benchmarks.peers import adapters, raw

Function = Callable[..., Any]
Spec = jax.ShapeDtypeStruct

SOURCE = Path(__file__).parent / "native.cc"

SAXPY = """
  void saxpy(cg::In<float, 0> a, cg::In<float, 1> x, cg::InOut<float, 1> y) {
    float factor = a[0];
    const float* from = x.data();
    float* to = y.data();
    for (int64_t i = 0; i < x.size(); ++i) to[i] += factor * from[i];
  }"""
SAXPY_THREADS = """
  void saxpy(cg::Context& context, cg::In<float, 0> a, cg::In<float, 1> x, cg::InOut<float, 1> y) {
    float factor = a[0];
    const float* from = x.data();
    float* to = y.data();
    context.parallel_ranges(0, x.size(), 1 << 16, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) to[i] += factor * from[i];
    });
  }"""


def kind(name: str) -> Any:
  """`callgate.<name>`, or NotInstalled."""
  package = adapters.callgate()
  if not hasattr(package, name):
    raise harness.NotInstalled(f"callgate has no {name}() here")
  return getattr(package, name)


# -- nothing, on a scalar ---
def cpp_empty(spec: Spec) -> Function:
  """`callgate.cpp`."""
  return kind("cpp")("void nothing(cg::In<float, 0>, cg::Out<float, 0>) {}", out=spec)


def library_empty(spec: Spec) -> Function:
  """`callgate.library`."""
  return kind("library")(native_library()).kernel("nothing", out=spec)


def cfunc_empty(spec: Spec) -> Function:
  """`callgate.cfunc` of a function of ctypes."""
  cfunc = kind("cfunc")
  function = ctypes.CDLL(str(native_library())).bench_nothing
  declared = "void bench_nothing(const float* x, float* z)"
  return cfunc(function, declared, args="x, out z", out=spec)


def numba_empty(spec: Spec) -> Function:
  """`callgate.numba`."""

  def nothing(out: Any, x: Any) -> None:
    pass

  harness.require("numba", "numba")
  return kind("numba")(nothing, out=spec)


def elementwise_copy(spec: Spec) -> Function:
  """`callgate.elementwise`: one element is the least that it does."""
  return kind("elementwise")("float32 x", "float32 z", "z = x")


def tvm_ffi_empty(spec: Spec) -> Function:
  """jax-tvm-ffi: a C++ function with an empty body."""
  return adapters.tvm_ffi_native_empty(spec)


def brainevent_empty(spec: Spec) -> Function:
  """brainevent's `numba_kernel` of a function with an empty body."""
  brainevent = harness.require("brainevent", "brainevent")
  numba = harness.require("numba", "numba")

  @numba.njit
  def nothing(x: Any, out: Any) -> None:
    pass

  function = brainevent.numba_kernel(nothing, outs=spec)
  return lambda x: jax.tree.leaves(function(x))[0]


@functools.cache
def native_library() -> Path:
  """`native.cc`, compiled with callgate's header."""
  from callgate._build import toolchain

  return raw.compiled(SOURCE, str(toolchain.include_dir()))


# -- a * x + y in place ---
def saxpy(source: str) -> Function:
  """`callgate.cpp`: y is an operand and the result."""
  return kind("cpp")(source, out=lambda a, x, y: y)


def saxpy_xla(a: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """XLA's own fusion."""
  return a * x + y


# -- x * y + 1 in place ---
def elementwise_fused() -> Function:
  """`callgate.elementwise`, its result in the memory of y."""
  kernel = kind("elementwise")("T x, T y", "T z", "z = x * y + T(1)", aliases={1: 0})
  return lambda a, x, y: kernel(x, y)


def fused_xla(a: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
  """XLA's own fusion of the same."""
  return x * y + 1


# -- soft-DTW: the smoothed cost of the best alignment of two series (Cuturi and Blondel, 2017) ---
def soft_dtw_numba(**options: Any) -> Function:
  """`callgate.numba`: one pass over the table, along its anti-diagonals, which Numba vectorises.

  Its `exp` and `log` are polynomials, since the library's functions take one number at a time.
  """
  import numpy as np

  numba = harness.require("numba", "numba")
  f32 = np.float32
  far, lowest, part, middle = f32(1e10), f32(-60), f32(1 / 256), f32(np.sqrt(3))
  e2, e3, e4, l0, l2, l4, l6 = map(f32, (1 / 2, 1 / 6, 1 / 24, np.log(3) / 2, 1 / 3, 1 / 5, 1 / 7))
  one, two = f32(1), f32(2)
  fast = {"fastmath": True, "error_model": "numpy"}

  @numba.njit(inline="always", **fast)
  def exp(x: Any) -> Any:  # of what is not positive, as the 256th power of exp(x / 256)
    u = (x if x > lowest else lowest) * part
    power = one + u * (one + u * (e2 + u * (e3 + u * e4)))
    for _ in range(8):
      power = power * power
    return power

  @numba.njit(inline="always", **fast)
  def log(x: Any) -> Any:  # from 1 to 3
    s = (x - middle) / (x + middle)
    q = s * s
    return l0 + two * s * (one + q * (l2 + q * (l4 + q * l6)))

  @numba.njit(**fast)
  def diagonal(corner: Any, above: Any, left: Any, cost: Any, now: Any) -> None:
    for i in range(now.size):
      a, b, c = corner[i], above[i], left[i]
      least = a if a < b else b
      least = least if least < c else c
      total = exp(least - a) + exp(least - b) + exp(least - c)
      now[i] = cost[i] + least - log(total)

  def soft_dtw(out: Any, costs: Any) -> None:
    rows, columns = costs.shape
    before, last, now = np.full(rows + 1, far), np.full(rows + 1, far), np.full(rows + 1, far)
    cost = np.empty(rows, np.float32)
    before[0] = 0
    for k in range(rows + columns - 1):
      first, end = max(0, k - columns + 1), min(rows, k + 1)
      for i in range(end - first):
        cost[i] = costs[first + i, k - first - i]
      inside = slice(first + 1, end + 1)
      diagonal(before[first:end], last[first:end], last[inside], cost[: end - first], now[inside])
      now[0] = far
      before, last, now = last, now, before
    out[()] = last[rows]

  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  return kind("numba")(soft_dtw, out=scalar, style="inplace", fastmath=True, **options)


def soft_dtw_scan(costs: jax.Array) -> jax.Array:
  """`lax.scan` over rows, and in each over cells."""

  def cell(left: jax.Array, inputs: Any) -> Any:
    cost, corner, above = inputs
    value = cost - jax.nn.logsumexp(-jnp.stack([corner, above, left]))
    return value, value

  def row(above: jax.Array, cost: jax.Array) -> Any:
    _, values = lax.scan(cell, jnp.float32(1e10), (cost, above[:-1], above[1:]))
    return jnp.concatenate([jnp.full(1, 1e10, jnp.float32), values]), None

  first = jnp.full(costs.shape[1] + 1, 1e10, jnp.float32).at[0].set(0)
  return lax.scan(row, first, costs)[0][-1]


def soft_dtw_diagonals(costs: jax.Array) -> jax.Array:
  """`lax.scan` over anti-diagonals, each one vector: the fast way in JAX, and the one to find."""
  rows, columns = costs.shape
  i = jnp.arange(rows)

  def diagonal(carry: Any, k: jax.Array) -> Any:
    before, last = carry  # diagonals k - 2 and k - 1 by row, with a row above the first
    j = k - i
    inside = (j >= 0) & (j < columns)
    corner = jnp.where((i == 0) & (k == 0), 0.0, jnp.where(j == 0, 1e10, before[:-1]))
    least = -jax.nn.logsumexp(-jnp.stack([corner, last[:-1], last[1:]]), axis=0)
    value = jnp.where(inside, costs[i, jnp.clip(j, 0, columns - 1)] + least, 1e10)
    return (last, jnp.concatenate([jnp.full(1, 1e10), value])), None

  start = jnp.full(rows + 1, 1e10, jnp.float32)
  (_, last), _ = lax.scan(diagonal, (start, start), jnp.arange(rows + columns - 1))
  return last[-1]
