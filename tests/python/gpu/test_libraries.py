# SPDX-License-Identifier: Apache-2.0
"""Kernels of CuPy, Numba, Triton and `callgate.elementwise` on a device; run with -m gpu."""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # newer versions ask for it to be set

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import callgate as cg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

try:
  import triton
  import triton.language as tl
except ImportError:
  triton = tl = None


def jit_if_there(function: Any) -> Any:
  return function if triton is None else triton.jit(function)


needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")


@jit_if_there
def saxpy_kernel(x_ptr, y_ptr, n, a, out_ptr, BLOCK: tl.constexpr):
  at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
  mask = at < n
  x = tl.load(x_ptr + at, mask=mask)
  tl.store(out_ptr + at, a * x + tl.load(y_ptr + at, mask=mask), mask=mask)


@jit_if_there
def softmax_kernel(x_ptr, columns, out_ptr, BLOCK: tl.constexpr):
  row = tl.program_id(0)
  at = tl.arange(0, BLOCK)
  x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-float("inf"))
  e = tl.exp(x - tl.max(x, axis=0))
  tl.store(out_ptr + row * columns + at, e / tl.sum(e, axis=0), mask=at < columns)


@jit_if_there
def matmul_kernel(
  a_ptr, b_ptr, m, n, k, c_ptr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
  rows = tl.program_id(0) * BM + tl.arange(0, BM)
  columns = tl.program_id(1) * BN + tl.arange(0, BN)
  total = tl.zeros((BM, BN), dtype=tl.float32)
  for start in range(0, k, BK):
    inner = start + tl.arange(0, BK)
    a = tl.load(
      a_ptr + rows[:, None] * k + inner[None, :],
      mask=(rows[:, None] < m) & (inner[None, :] < k),
      other=0.0,
    )
    b = tl.load(
      b_ptr + inner[:, None] * n + columns[None, :],
      mask=(inner[:, None] < k) & (columns[None, :] < n),
      other=0.0,
    )
    total += tl.dot(a, b, input_precision="ieee")
  at = rows[:, None] * n + columns[None, :]
  tl.store(c_ptr + at, total, mask=(rows[:, None] < m) & (columns[None, :] < n))


def normal(*shape: int, seed: int = 0) -> Any:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@needs_triton
@pytest.mark.parametrize("size", [1, 1000, 4096, 100_003])
def test_saxpy_by_triton(size: int) -> None:
  kernel = cg.triton(
    saxpy_kernel, grid=lambda meta: triton.cdiv(meta["n"], meta["BLOCK"]), out=lambda x, y: x,
    BLOCK=1024,
  )  # fmt: skip
  x, y = normal(size), normal(size, seed=1)
  got = jax.jit(lambda x, y: kernel(x, y, size, 2.5))(x, y)
  np.testing.assert_allclose(got, 2.5 * np.asarray(x) + np.asarray(y), rtol=1e-5, atol=1e-5)


@needs_triton
def test_lanes_of_any_alignment_by_triton() -> None:
  kernel = cg.triton(saxpy_kernel, grid=1, out=lambda x, y: x, BLOCK=128, name="lanes")
  x, y = normal(5, 101), normal(101, seed=1)
  got = jax.jit(jax.vmap(lambda x: kernel(x, y, 101, 2.0)))(x)
  np.testing.assert_allclose(got, 2 * np.asarray(x) + np.asarray(y), rtol=1e-5, atol=1e-5)


@needs_triton
def test_softmax_by_triton_with_its_derivative() -> None:
  kernel = cg.triton(
    softmax_kernel, grid=lambda meta, shapes: shapes[0].shape[0], out=lambda x: x, BLOCK=1024,
    name="softmax",
  )  # fmt: skip
  softmax = jax.custom_vjp(lambda x: kernel(x, x.shape[1]))
  softmax.defvjp(
    lambda x: (softmax(x), softmax(x)),
    lambda y, g: (y * (g - jnp.sum(y * g, axis=1, keepdims=True)),),
  )
  x, w = normal(64, 781), normal(64, 781, seed=1)
  value = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(w * f(x))))(x)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    value(softmax),
    value(lambda x: jax.nn.softmax(x, axis=1)),
  )


@needs_triton
def test_a_tuned_matrix_product_by_triton(tmp_path: Any, monkeypatch: Any) -> None:
  monkeypatch.setenv("CALLGATE_CACHE_DIR", str(tmp_path))
  configs = [
    triton.Config({"BM": 32, "BN": 32, "BK": 32}, num_warps=2),
    triton.Config({"BM": 64, "BN": 64, "BK": 32}, num_warps=4),
  ]
  tuned = triton.autotune(configs=configs, key=["m", "n", "k"])(matmul_kernel)
  kernel = cg.triton(
    tuned, grid=lambda p: (triton.cdiv(p["m"], p["BM"]), triton.cdiv(p["n"], p["BN"])),
    out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype), name="matmul",
  )  # fmt: skip
  a, b = normal(300, 200), normal(200, 130, seed=1)
  got = jax.jit(lambda a, b: kernel(a, b, 300, 130, 200))(a, b)
  np.testing.assert_allclose(got, np.asarray(a) @ np.asarray(b), rtol=1e-3, atol=1e-3)
  assert len(list(tmp_path.rglob("triton/*/*.json"))) == 1


def cupy_module() -> Any:
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return pytest.importorskip("cupy", exc_type=ImportError)


def test_a_raw_modules_function_of_cupy() -> None:
  cupy = cupy_module()
  module = cupy.RawModule(
    code="""
      template <class T> __global__ void scale(const T* x, T* y, T a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i];
      }""",
    options=("-std=c++17",),
    name_expressions=["scale<float>"],
  )
  kernel = cg.cupy(
    module, "scale<float>", grid=lambda x: -(-x.size // 128), block=128, out=lambda x, a, n: x
  )
  x = normal(1001)
  got = jax.jit(lambda x: kernel(x, 3.0, 1001))(x)
  np.testing.assert_allclose(got, 3 * np.asarray(x), rtol=1e-6)


def test_an_elementwise_kernel_of_cupy() -> None:
  cupy = cupy_module()
  made = cupy.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared")
  kernel = cg.cupy(made, jvp="dz = 2 * (x - y) * (dx - dy)")
  x, y = normal(7, 1, 33), normal(5, 1, seed=1)
  np.testing.assert_allclose(jax.jit(kernel)(x, y), np.square(np.asarray(x) - y), rtol=1e-5)
  slope = jax.jit(jax.grad(lambda x: jnp.sum(kernel(x, y))))(x)
  np.testing.assert_allclose(slope, jax.grad(lambda x: jnp.sum((x - y) ** 2))(x), rtol=1e-4)


def test_a_kernel_of_numba_in_two_dimensions_with_shared_memory() -> None:
  pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
  cuda = pytest.importorskip("numba.cuda")

  @cuda.jit
  def transpose(x, out):
    tile = cuda.shared.array((16, 16), dtype=np.float32)
    row, column = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
      tile[cuda.threadIdx.x, cuda.threadIdx.y] = x[row, column]
    cuda.syncthreads()
    if row < x.shape[0] and column < x.shape[1]:
      out[column, row] = tile[cuda.threadIdx.x, cuda.threadIdx.y]

  kernel = cg.numba_cuda(
    transpose, griddim=lambda x: (-(-x.shape[0] // 16), -(-x.shape[1] // 16)), blockdim=(16, 16),
    out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
  )  # fmt: skip
  x = normal(3, 45, 70)
  np.testing.assert_array_equal(jax.jit(kernel)(x[0]), np.asarray(x[0]).T)
  np.testing.assert_array_equal(jax.jit(jax.vmap(kernel))(x), np.asarray(x).transpose(0, 2, 1))


@pytest.mark.parametrize(
  "dtype",
  [
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2"),
  ],
)
@pytest.mark.parametrize("shapes", [((1000,), (1000,)), ((3, 1, 17), (5, 1))], ids=str)
def test_elementwise_of_every_dtype(dtype: str, shapes: Any) -> None:
  with jax.enable_x64(True):
    random = np.random.default_rng(0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x, y = (jnp.asarray(random.integers(1, 4, s).astype(kind)) for s in shapes)
    kernel = cg.elementwise(
      "T x, T y", "T z", "z = x * y + x", name=f"gpu_{dtype}_{len(shapes[0])}"
    )
    got = jax.jit(kernel)(x, y)
    small = dtype.startswith("float8")  # JAX doesn't promote these
    want = jnp.asarray(x, jnp.float32 if small else jnp.promote_types(kind, jnp.float32))
    want = want * y.astype(want.dtype) + want
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(kind)))


def test_the_derivative_of_an_elementwise_kernel() -> None:
  kernel = cg.elementwise(
    "T x, T y", "T z", "z = pow(x, y)", jvp="dz = y * pow(x, y - 1) * dx + z * log(x) * dy"
  )
  x, y = jnp.abs(normal(50)) + 0.5, normal(3, 50, seed=1)
  total = lambda f: jax.jit(jax.grad(lambda x, y: jnp.sum(f(x, y)), (0, 1)))(x, y)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    total(kernel),
    total(jnp.power),
  )
