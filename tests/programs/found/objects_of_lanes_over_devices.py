# SPDX-License-Identifier: Apache-2.0
"""A sweep freed objects of devices that were ahead, in the next step, or behind, in a branch."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

hold = cg.hold(lambda x: x.copy())
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
split = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))


def value(made, x):
  return np.asarray(made + 1, x.dtype)


def step(carry, _):
  boxes = jax.vmap(hold)(carry)  # spread over the devices, as split's lanes are
  use = lambda box, x: cg.use(value, box, x, out=x, effect="io")
  return jax.vmap(use)(boxes, carry) + 0 * split(carry), None


loops = [
  lambda x: jax.lax.scan(step, x, length=4)[0],
  lambda x: jax.lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, step(s[1], 0)[0]), (0, x))[
    1
  ],
  lambda x: cg.scan(step, x, length=4, stoppable=True)[0],
]
x = jnp.arange(4.0)
for loop in loops:
  run = jax.jit(loop)
  for _ in range(20):
    np.testing.assert_array_equal(run(x), x + 4)
    cg.barrier()
