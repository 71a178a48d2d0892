# SPDX-License-Identifier: Apache-2.0
"""Assertions on values in compiled code."""

import chex
import jax
import jax.numpy as jnp


def run():
  @chex.chexify
  @jax.jit
  def safe_log(x):
    chex.assert_tree_all_finite(jnp.log(x))
    jax.debug.callback(lambda value: None, x)
    return jnp.log(x)

  good = safe_log(jnp.ones(3))
  safe_log.wait_checks()
  try:
    safe_log(-jnp.ones(3))
    safe_log.wait_checks()
    raised = "nothing"
  except AssertionError as error:
    raised = "finite" in str(error)
  return {"good": good, "raised": raised}
