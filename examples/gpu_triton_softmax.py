# SPDX-License-Identifier: Apache-2.0
"""A softmax in Triton, with its own derivative in Triton, in compiled JAX programs.

Triton compiles each kernel once, when a program is lowered. The runtime launches it on XLA's stream
without Python. `jax.nn.softmax` checks values, derivatives and vmap.
"""

import jax
import jax.numpy as jnp

import callgate as cg

try:
  import triton
  import triton.language as tl
except ImportError:
  triton = None


def kernels():
  @triton.jit
  def forward(x, columns, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < columns
    row = tl.program_id(0) * columns
    values = tl.load(x + row + at, mask=inside, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(y + row + at, powers / tl.sum(powers, 0), mask=inside)

  @triton.jit
  def backward(y, y_bar, columns, x_bar, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < columns
    row = tl.program_id(0) * columns
    share = tl.load(y + row + at, mask=inside, other=0.0)
    slope = tl.load(y_bar + row + at, mask=inside, other=0.0)
    tl.store(x_bar + row + at, share * (slope - tl.sum(share * slope, 0)), mask=inside)

  def rows(meta, shapes):
    return (shapes[0].shape[0],)

  return (
    cg.triton(forward, grid=rows, out=lambda x: x, name="softmax"),
    cg.triton(backward, grid=rows, out=lambda y, y_bar: y, name="softmax.backward"),
  )


def make_softmax():
  forward, backward = kernels()

  def settings(x):
    return {"columns": x.shape[1], "BLOCK": triton.next_power_of_2(x.shape[1])}

  @jax.custom_vjp
  def softmax(x):
    return forward(x, **settings(x))

  softmax.defvjp(lambda x: (softmax(x),) * 2, lambda y, y_bar: (backward(y, y_bar, **settings(y)),))
  return softmax


def main():
  if triton is None:
    return print("skipped: Triton is not installed (pip install 'callgate[triton]')")
  if jax.default_backend() != "gpu":
    return print("skipped: there is no CUDA device, or JAX has no CUDA here")
  softmax = jax.vmap(make_softmax())
  x, weight = jax.random.normal(jax.random.key(0), (2, 4, 300, 777))

  def slope(softmax):
    return jax.grad(lambda x: jnp.sum(weight * softmax(x)))

  pairs = {"values": (softmax, jax.nn.softmax)}
  pairs["gradient"] = (slope(softmax), slope(jax.nn.softmax))
  for name, (ours, exact) in pairs.items():
    difference = jnp.abs(jax.jit(ours)(x) - jax.jit(exact)(x)).max()
    print(f"{name}: differs from jax.nn.softmax's by {difference:.1e}")


if __name__ == "__main__":
  main()
