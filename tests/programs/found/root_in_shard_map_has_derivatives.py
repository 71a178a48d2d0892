# SPDX-License-Identifier: Apache-2.0
"""A root's derivative made its matrix of what does not vary over the devices of a `shard_map`."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

root = cg.root(
  lambda x, theta: x**3 - theta, solver=lambda theta, x0: np.asarray(np.cbrt(theta), theta.dtype)
)
mesh, P = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",)), jax.sharding.PartitionSpec("d")


@jax.jit
def program(theta):
  return jax.shard_map(lambda t: root(t, t), mesh=mesh, in_specs=P, out_specs=P)(theta)


theta = jnp.array([1.0, 8.0, 27.0, 64.0])
expected = 1 / (3 * program(theta) ** 2)
np.testing.assert_allclose(jax.grad(lambda t: program(t).sum())(theta), expected, rtol=1e-5)
np.testing.assert_allclose(jax.jvp(program, (theta,), (jnp.ones(4),))[1], expected, rtol=1e-5)
