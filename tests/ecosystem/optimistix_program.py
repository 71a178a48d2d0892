# SPDX-License-Identifier: Apache-2.0
"""A root and a minimum, with steps that are printed and failures that raise."""

import jax.numpy as jnp
import optimistix as optx


def run():
  newton = optx.Newton(rtol=1e-6, atol=1e-6)
  root = optx.root_find(lambda y, _: y - jnp.tanh(y + 1), newton, jnp.array(0.5)).value
  noisy = optx.BFGS(rtol=1e-5, atol=1e-5, verbose=True)
  least = optx.minimise(lambda y, _: jnp.sum((y - 3) ** 2), noisy, jnp.zeros(3)).value
  try:
    optx.root_find(lambda y, _: y**2 + 1, newton, jnp.array(0.5), max_steps=8)
    raised = "nothing"
  except Exception as error:  # noqa: BLE001 - of any library
    raised = "maximum number of steps" in str(error) or "nonlinear" in str(error).lower()
  return {"root": root, "least": least, "raised": raised}
