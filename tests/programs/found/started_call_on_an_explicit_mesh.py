# SPDX-License-Identifier: Apache-2.0
"""The result of a started call was gathered on an explicit mesh, and no loop's carry."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))


def start_again(state):
  i, ticket = state
  return i + 1, gate.start(ticket.result())


gate = cg.gate(lambda x: -x, out=lambda x: x, effect="io")
twice = lambda x: jax.lax.while_loop(lambda s: s[0] < 2, start_again, (0, gate.start(x)))[
  1
].result()
with jax.set_mesh(mesh):
  x = jax.device_put(jnp.arange(8.0), jax.P("d"))
  result = jax.jit(twice)(x)
  assert result.sharding.spec == jax.P("d")
  np.testing.assert_array_equal(result, -x)
