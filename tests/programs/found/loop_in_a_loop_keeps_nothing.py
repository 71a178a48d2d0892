# SPDX-License-Identifier: Apache-2.0
"""cg.scan kept its bodies for calls to come, and with them the tracers that they close over."""

import jax
import jax.numpy as jnp

import callgate as cg


def program(x):
  def outer(carry, _):
    def inner(carry, _):
      return jnp.sin(x) + carry, None

    return cg.scan(inner, carry, length=2, stoppable=True)[0], None

  return jax.lax.scan(outer, x, length=2)[0]


with jax.checking_leaks():
  jax.block_until_ready(jax.jit(program)(1.0))
