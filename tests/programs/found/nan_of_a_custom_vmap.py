# SPDX-License-Identifier: Apache-2.0
"""`find_nan` named the call of a `custom_vmap`, or a linear solve, and no operation inside."""

import jax
import jax.numpy as jnp

import callgate as cg


@jax.custom_batching.custom_vmap
def logarithm(x):
  return jnp.log(x)


@logarithm.def_vmap
def logarithms(size, batched, x):
  return jnp.log(x), True


def solved(b):
  return jax.lax.custom_linear_solve(lambda x: 2 * x, b, lambda _, b: jnp.log(b), symmetric=True)


for function in (logarithm, solved):
  report = cg.find_nan(lambda x, f=function: f(x) + 1)(-1.0)
  assert report.primitive == "log", report
