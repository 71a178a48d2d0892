# SPDX-License-Identifier: Apache-2.0
"""Checks that raise, and a callback that is filtered."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Model(eqx.Module):
  layer: eqx.nn.Linear

  def __call__(self, x):
    x = eqx.error_if(x, jnp.any(x > 100), "too large")
    y = eqx.filter_pure_callback(
      np.sort, self.layer(x), result_shape_dtypes=x, vmap_method="sequential"
    )
    return eqx.error_if(y, ~jnp.isfinite(y).all(), "not finite")


def run():
  model = Model(eqx.nn.Linear(4, 4, key=jax.random.key(0)))
  program = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
  good = program(model, jnp.ones((3, 4)))
  try:
    jax.block_until_ready(program(model, jnp.full((3, 4), 101.0)))
    raised = "nothing"
  except Exception as error:  # noqa: BLE001 - of any library
    raised = "too large" in str(error)
  return {"good": good, "raised": raised}
