# SPDX-License-Identifier: Apache-2.0
"""Results of JAX's callbacks lie on one device: callgate's partitioner took that for tiles."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import callgate as cg

seen = []


@cg.gate(out=lambda x: x, effect="io")
def negated(x):
  seen.append(float(x.sum()))
  return -x


def program(x):
  y = io_callback(lambda x: np.asarray(x), x, x)
  return jax.lax.scan(lambda carry, _: (carry + negated(y), None), y, length=2)[0]


mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
for shape in ((), (4,), (2, 2)):
  x = jnp.full(shape, 0.5)
  x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
  np.testing.assert_array_equal(jax.jit(program)(x), -x)
assert seen == [0.5, 0.5, 2.0, 2.0, 2.0, 2.0]
