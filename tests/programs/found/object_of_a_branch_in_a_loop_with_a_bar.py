# SPDX-License-Identifier: Apache-2.0
"""XLA took out that a loop's sweep waits for a branch: it freed the branch's object before."""

import io

import jax
import jax.numpy as jnp
import numpy as np

import callgate as cg

hold = cg.hold(lambda x: x.copy())


def add(made, x):
  return np.asarray(made + x)


def program(x, empty):
  def branch(x):
    def step(made, x):
      return hold(x), cg.use(add, made, x, out=x, effect="io")

    return jnp.sum(jax.lax.scan(step, hold(x), jnp.stack([x, x]))[1])

  def body(_, x):
    return jax.lax.cond(jnp.sum(empty) > 5, lambda x: x, branch, x)

  return cg.fori_loop(0, 1, body, x, progress=cg.Progress("bar", file=io.StringIO()))


run = jax.jit(program)
for _ in range(3):
  assert run(jnp.float32(1), jnp.zeros(0)) == 4
  cg.barrier()
