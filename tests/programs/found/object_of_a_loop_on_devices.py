# SPDX-License-Identifier: Apache-2.0
"""XLA moved the call out of the loop: a step swept the object, and the next had none."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

made = []
hold = cg.hold(lambda x: made.append(x.copy()) or made[-1])


def use(array, x):
  return x + np.sum(array, dtype=x.dtype)


def program(x):
  def step(carry, _):
    return cg.use(use, hold(x), carry, out=carry, effect="io"), None

  return jax.lax.scan(step, x, length=3)[0]


mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
x = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
run = jax.jit(program)
for _ in range(3):
  np.testing.assert_array_equal(run(x), [7.0, 7.0])
  cg.barrier()
assert len(made) == 9
