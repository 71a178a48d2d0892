# SPDX-License-Identifier: Apache-2.0
"""The bar of a `while_loop` in two `vmap`s in a `shard_map` made a carry that JAX refused."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

seen = []


def loop(x):
  def step(state):
    return state[0] + 1, cg.tap(state[1] + 0, lambda value: seen.append(float(value)))

  return jax.lax.while_loop(lambda state: state[0] < (x > 2.7), step, (0, x))[1]


def device(xs):
  lanes = xs + jnp.arange(6.0).reshape(2, 3)
  return jax.vmap(jax.vmap(loop))(lanes)[0]


mesh, P = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",)), jax.sharding.PartitionSpec("d")
program = jax.shard_map(device, mesh=mesh, in_specs=P, out_specs=P)
xs = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
with cg.bars(min_steps=0):
  found = jax.jit(program)(xs)
  cg.barrier()
np.testing.assert_array_equal(found, np.concatenate([x + np.arange(3) for x in xs]))
assert sorted(seen) == sorted(float(x + lane) for x in xs for lane in range(6) if x + lane > 2.7)
