# SPDX-License-Identifier: Apache-2.0
"""A tap that goes through JAX's callback counted for `every=` the calls of all devices together."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

got = []
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))


def shard(x):
  def step(_, row):
    together = row + 0 * jax.lax.psum(jnp.sum(row), "d")
    return None, cg.tap(together, lambda value: got.append(float(value[0])), every=2)

  return jax.lax.scan(step, None, jnp.stack([x, x + 10]))[1]


P = jax.sharding.PartitionSpec
with cg.config(engine="jax"):
  run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("d"), out_specs=P(None, "d")))
  for _ in range(3):
    jax.block_until_ready(run(jnp.arange(4.0)))
  cg.barrier()
assert sorted(got) == sorted([0.0, 1.0, 2.0, 3.0] * 3), got
