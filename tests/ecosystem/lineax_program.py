# SPDX-License-Identifier: Apache-2.0
"""A solve, and one of a singular matrix, which raises."""

import jax
import jax.numpy as jnp
import lineax as lx


def run():
  matrix = jnp.array([[2.0, 1.0], [1.0, 3.0]])
  solve = jax.jit(lambda a, b: lx.linear_solve(lx.MatrixLinearOperator(a), b).value)
  try:
    jax.block_until_ready(solve(jnp.zeros((2, 2)), jnp.ones(2)))
    raised = "nothing"
  except Exception as error:  # noqa: BLE001 - of any library
    raised = "linear solver" in str(error)
  return {"x": solve(matrix, jnp.ones(2)), "raised": raised}
