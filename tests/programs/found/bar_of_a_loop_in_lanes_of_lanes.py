# SPDX-License-Identifier: Apache-2.0
"""JAX refused calls in a while loop with a bar, or with a collective, under two vmaps."""

import io

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

seen = []


def count(n, x):
  def step(state):
    k, x = state
    return k + 1, cg.tap(x, lambda value: seen.append(value.tolist())) + 1

  bar = cg.Progress("bar", file=io.StringIO())
  return cg.while_loop(lambda state: state[0] < n, step, (0, x), progress=bar)[1]


counts, x = jnp.array([[2, 1], [0, 1]]), jnp.arange(12).reshape(2, 2, 3)
values = jax.jit(jax.vmap(jax.vmap(count)))(counts, x)
np.testing.assert_array_equal(values, x + counts[..., None])
cg.barrier()
assert sorted(seen) == [[0, 1, 2], [1, 2, 3], [3, 4, 5], [9, 10, 11]]
