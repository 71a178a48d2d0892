# SPDX-License-Identifier: Apache-2.0
"""JAX's barrier raised a program's error that callgate's had raised, as it kept a failed token."""

import jax
import jax.numpy as jnp

import callgate as cg
from callgate.compat import callbacks


def fail(x):
  if x > 0:
    raise KeyError("refused")
  return x


gate = cg.gate(fail, out=lambda x: x, effect="io")


@jax.jit
def program(x):  # callbacks keep it off JAX's C++ dispatch, so it has a token of JAX's
  x = callbacks.io_callback(lambda x: x, jax.ShapeDtypeStruct((), "float32"), x, ordered=False)
  return gate(x + 0 * jnp.sum(jnp.tanh(jnp.arange(65536.0) + x)))


jax.block_until_ready(program(0.0))
raised = []
for begin in (cg.barrier, jax.effects_barrier, cg.barrier):
  try:
    with cg.errors():
      if not raised:
        jax.block_until_ready(program(1.0))
  except KeyError as error:
    raised.append(error)
  begin()
assert len(raised) == 1
