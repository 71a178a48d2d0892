# SPDX-License-Identifier: Apache-2.0
"""Kernels in CUDA C++ on a real GPU: run with -m gpu."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import callgate as cg
from callgate import _callgate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

SAXPY = """
__global__ void saxpy(float a, const float* x, const float* y, float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  x += blockIdx.z * (size_t)n, y += blockIdx.z * (size_t)n, z += blockIdx.z * (size_t)n;
  if (i < n) z[i] = a * x[i] + y[i];
}
"""
SUM = """
// The sum of each block's elements, by way of dynamic shared memory.
__global__ void sums(cg::In<float, 1> x, cg::Out<float, 1> y) {
  extern __shared__ float part[];
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  part[threadIdx.x] = i < x.size() ? x[i] : 0.0f;
  for (int step = blockDim.x / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
  }
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
"""


def saxpy(**options):
  options = {"grid": lambda x, y: -(-x.size // 256), "block": 256, **options}
  return cg.cuda(SAXPY, out=lambda a, x, y, n: x, **options)


def random(*shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(0), shape, dtype)


def test_a_chain_of_kernels_and_xla_operations_keeps_its_order():
  kernel = saxpy()

  @jax.jit
  def program(x):
    for _ in range(20):
      x = jnp.sin(kernel(0.5, x, x, n=x.size))
    return x

  x = random(10_000)
  want = np.asarray(x)
  for _ in range(20):
    want = np.sin(1.5 * want)
  np.testing.assert_allclose(program(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vmap", ["each", "grid"])
def test_vmap(vmap):
  kernel, x, y = saxpy(vmap=vmap), random(7, 5, 333), random(333)
  call = jax.vmap(jax.vmap(lambda x, y: kernel(3.0, x, y, n=333), (0, None)), (0, None))
  np.testing.assert_allclose(
    jax.jit(call)(x, y), 3 * np.asarray(x) + np.asarray(y), rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32])
def test_templates_for_every_dtype(dtype):
  kernel = cg.cuda(
    """template <typename T, int R>
    __global__ void twice(cg::In<T, R> x, cg::Out<T, R> y) {
      int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
      if (i < x.size()) y[i] = x[i] + x[i];
    }""",
    grid=lambda x: -(-x.size // 128),
    block=128,
    out=lambda x: x,
  )
  x = jnp.arange(600).reshape(20, 30).astype(dtype)
  got = jax.jit(kernel)(x)
  assert got.dtype == dtype
  np.testing.assert_array_equal(got, x + x)


def test_views_know_their_extents():
  kernel = cg.cuda(
    """__global__ void transpose(cg::In<float, 2> x, cg::Out<float, 2> y) {
      int i = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
      if (i < x.extent(0) && j < x.extent(1)) y(j, i) = x(i, j);
    }""",
    grid=lambda x: (-(-x.shape[0] // 16), -(-x.shape[1] // 16)),
    block=(16, 16),
    out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
  )
  x = random(100, 37)
  np.testing.assert_array_equal(jax.jit(kernel)(x), np.asarray(x).T)


@pytest.mark.parametrize("shared", [1024, 100 * 1024])
def test_dynamic_shared_memory(shared):
  kernel = cg.cuda(
    SUM,
    grid=lambda x: -(-x.size // 256),
    block=256,
    shared=shared,
    out=lambda x: jax.ShapeDtypeStruct((-(-x.size // 256),), x.dtype),
  )
  x = random(256 * 50)
  want = np.asarray(x).reshape(50, 256).sum(1)
  np.testing.assert_allclose(jax.jit(kernel)(x), want, rtol=1e-4, atol=1e-4)


def test_more_shared_memory_than_the_device_has_is_an_error():
  kernel = cg.cuda(SUM, grid=1, block=256, shared=2**20, out=jax.ShapeDtypeStruct((1,), "float32"))
  with pytest.raises(jax.errors.JaxRuntimeError, match="1048576 bytes of dynamic shared memory"):
    jax.block_until_ready(jax.jit(kernel)(random(256)))


def test_clusters():
  if _callgate.cuda_capabilities()[0] < 90:
    pytest.skip("clusters need compute capability 9.0")
  kernel = cg.cuda(
    """#include <cooperative_groups.h>
    __global__ void ranks(int* y) {
      auto cluster = cooperative_groups::this_cluster();
      if (threadIdx.x == 0) y[blockIdx.x] = cluster.block_rank();
    }""",
    grid=8,
    block=32,
    cluster=4,
    out=jax.ShapeDtypeStruct((8,), "int32"),
  )
  np.testing.assert_array_equal(jax.jit(lambda: kernel())(), np.arange(8) % 4)


def test_scratch_memory_and_zeroed_results():
  kernel = cg.cuda(
    """__global__ void total(const float* x, float* part, float* y, int n) {
      float mine = 0;
      for (int i = threadIdx.x; i < n; i += blockDim.x) mine += x[i];
      part[threadIdx.x] = mine;
      atomicAdd(y, part[threadIdx.x]);
    }""",
    grid=1,
    block=128,
    scratch={"part": 4 * 128},
    zeroed=[0],
    out=lambda x, n: jax.ShapeDtypeStruct((), x.dtype),
  )
  x = random(5000)
  for _ in range(3):
    got = jax.jit(lambda x: kernel(x, n=x.size))(x)
    np.testing.assert_allclose(got, np.asarray(x).sum(), rtol=1e-3, atol=1e-2)


def test_a_kernel_in_place():
  kernel = cg.cuda(
    """__global__ void add(cg::InOut<float, 1> x) {
      if (threadIdx.x < x.size()) x[threadIdx.x] += 1;
    }""",
    grid=1,
    block=lambda x: x.size,
    out=lambda x: x,
  )
  x = random(100)
  np.testing.assert_allclose(jax.jit(kernel)(x), np.asarray(x) + 1, rtol=1e-6)


def test_derivatives():
  kernel = saxpy(linear=(1, 2))
  kernel.deftranspose(lambda ct, a, x, y, n: (kernel(a, ct, 0 * ct, n=n), ct))
  x = random(50)
  got = jax.jit(jax.grad(lambda x: jnp.sum(kernel(3.0, x, x * 0 + 1, n=50) ** 2)))(x)
  np.testing.assert_allclose(got, 6 * (3 * np.asarray(x) + 1), rtol=1e-4, atol=1e-4)


def test_arrays_without_elements():
  kernel = saxpy()
  assert jax.jit(lambda x: kernel(2.0, x, x, n=0))(jnp.ones(0)).shape == (0,)


def test_one_kernel_for_both_platforms():
  kernel = cg.cpp(
    "void k(cg::In<float> x, cg::Out<float> y) {"
    "  for (int64_t i = 0; i < x.size(); ++i) y[i] = 2 * x[i]; }",
    out=lambda x: x,
    cuda_source="""__global__ void k(const float* x, float* y) {
      y[blockIdx.x] = 2 * x[blockIdx.x];
    }""",
    grid=lambda x: x.size,
    block=1,
  )
  x = random(100)
  np.testing.assert_allclose(jax.jit(kernel)(x), 2 * np.asarray(x), rtol=1e-6)
  cpu = jax.device_put(np.asarray(x), jax.devices("cpu")[0])
  np.testing.assert_allclose(jax.jit(kernel)(cpu), 2 * np.asarray(x), rtol=1e-6)
