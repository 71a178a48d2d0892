# SPDX-License-Identifier: Apache-2.0
"""Over devices a sweep can't wait for a use of no elements: it freed the object before."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

hold = cg.hold(lambda x: x.copy())


def use(made, x):
  return x + made.sum()


def program(x):
  def step(carry, _):
    return cg.use(use, hold(x), x, out=x, effect="io"), None

  return jax.lax.scan(step, x, length=3)[0]


mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
x = jax.device_put(jnp.zeros((3, 0)), everywhere)
run = jax.jit(program)
for _ in range(10):
  jax.block_until_ready(run(x))
  cg.barrier()
