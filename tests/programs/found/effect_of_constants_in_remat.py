# SPDX-License-Identifier: Apache-2.0
"""JAX dropped a `jax.checkpoint` of constants whose result nobody uses, with its effects."""

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

seen = []
constant = np.float32(2)


@cg.gate(out=lambda x: x, effect="io")
def noted(x):
  seen.append(float(x))
  return x


def program(y):
  jax.checkpoint(lambda _: noted(constant))(y)
  jax.jit(jax.checkpoint(lambda: noted(constant + 1)))()
  jax.checkpoint(lambda: (cg.tap(constant + 2, lambda x: seen.append(float(x))), None)[1])()
  return y


run = jax.jit(program)
for _ in range(2):
  jax.block_until_ready(run(jnp.float32(1)))
  cg.barrier()
  assert sorted(seen) == [2, 3, 4], seen
  seen.clear()
