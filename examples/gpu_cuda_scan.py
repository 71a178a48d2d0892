# SPDX-License-Identifier: Apache-2.0
"""A prefix sum in CUDA source as a JAX function: any length and type, one launch under vmap.

A block walks along its lane in steps of 1,024 elements. In each step it sums within warps by
shuffles, then over the warps' sums. Lanes of a vmap are the grid's z axis. The transpose of a
prefix sum starts from the end, so a derivative is two reversals. `jnp.cumsum` checks the results.
"""

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

SOURCE = """
template <typename T>
__device__ T sum_of_warp(T value) {
  for (int distance = 1; distance < 32; distance *= 2) {
    T left = __shfl_up_sync(0xffffffff, value, distance);
    if (threadIdx.x % 32 >= distance) value += left;
  }
  return value;
}

template <typename T>
__global__ void scan(cg::In<T, 1> x, cg::Out<T, 1> y) {
  __shared__ T warps[32];
  const T* from = x.data() + blockIdx.z * x.size();
  T* to = y.data() + blockIdx.z * y.size();
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T before = 0;
  for (int64_t first = 0; first < x.size(); first += 1024) {
    int64_t i = first + threadIdx.x;
    T sum = sum_of_warp(i < x.size() ? from[i] : T(0));
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    if (warp == 0) warps[lane] = sum_of_warp(warps[lane]);
    __syncthreads();
    if (i < x.size()) to[i] = before + sum + (warp > 0 ? warps[warp - 1] : T(0));
    before += warps[31];
    __syncthreads();
  }
}
"""


def make_scan():
  scan = cg.cuda(
    SOURCE, "scan", grid=1, block=1024, out=lambda x: x, vmap="grid", linear=True, name="scan"
  )
  scan.deftranspose(lambda y_bar, x: scan(y_bar[::-1])[::-1])
  return scan


def main():
  if jax.default_backend() != "gpu":
    return print("skipped: there is no CUDA device, or JAX has no CUDA here")
  scan = make_scan()
  whole = jnp.arange(1_000_003, dtype=jnp.int32) % 7
  same = bool((jax.jit(scan)(whole) == jnp.cumsum(whole)).all())
  print(f"{whole.size:,} integers: {'equal to' if same else 'NOT equal to'} jnp.cumsum")

  rows = jax.random.normal(jax.random.key(0), (500, 4321))
  weight = jnp.linspace(-1, 1, 4321)
  exact = np.cumsum(np.asarray(rows, np.float64), 1)
  for name, sums in (("cg.cuda", jax.vmap(scan)), ("jnp.cumsum", lambda x: jnp.cumsum(x, 1))):
    error = np.abs(jax.jit(sums)(rows) - exact).max()
    slope = jax.jit(jax.grad(lambda x, sums=sums: (sums(x) @ weight).sum()))(rows)
    off = np.abs(slope - np.cumsum(np.asarray(weight, np.float64)[::-1])[::-1]).max()
    print(f"{name}: error of 500 lanes {error:.1e}, of their gradient {off:.1e}")


if __name__ == "__main__":
  main()
