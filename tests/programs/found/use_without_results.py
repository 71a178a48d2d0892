# SPDX-License-Identifier: Apache-2.0
"""The end of a loop's step didn't wait for a use without results: it freed the object before."""

import time

import jax
import jax.numpy as jnp

import callgate as cg

hold = cg.hold(lambda x: x.copy())
seen = []


def look(made):
  time.sleep(0.01)
  seen.append(made[0])


def step(carry, x):
  made = hold(jnp.full(1000, x))
  cg.use(look, made, out=None, effect="io")
  cg.use(look, made, out=None, effect="io")
  return carry, jnp.sin(jnp.full(1000, x)).sum()


jax.block_until_ready(jax.jit(lambda xs: jax.lax.scan(step, 0, xs))(jnp.arange(5.0)))
cg.barrier()
assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], seen
