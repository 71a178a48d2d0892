# SPDX-License-Identifier: Apache-2.0
"""Handles of values that devices share had another type in a loop's step than before it."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

hold = cg.hold(lambda x: float(x))
negated = cg.gate(lambda x: -x, out=lambda x: x, effect="io")


def program(apart, shared):
  def held(handle, x):
    return hold(x), cg.use(lambda made, x: np.float32(made) + x, handle, x, out=x)

  def started(ticket, x):
    return negated.start(x), ticket.result()

  sums = jax.lax.scan(held, hold(shared[0]), shared[1:])[1]
  last, negatives = jax.lax.scan(started, negated.start(shared[0]), shared[1:])
  return jnp.concatenate([sums, negatives, last.result()[None]]) + 0 * apart


mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
P = jax.sharding.PartitionSpec
over_devices = jax.shard_map(program, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
for run in (jax.jit(over_devices), over_devices):
  found = np.reshape(run(jnp.zeros(4), jnp.arange(3.0)), (4, 5))
  np.testing.assert_array_equal(found, [[1, 3, 0, -1, -2]] * 4)
  cg.barrier()
